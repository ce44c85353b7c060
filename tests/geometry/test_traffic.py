"""Reads, links and prefix hits against the golden ledger, and against sums that are counted one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry import traffic
from pdkv.geometry.byte_ledger import GroupBytes
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))
GLM = load_config("glm-5.3")
SHAPE = model_shape(GLM)
PAGE = page_format(SHAPE)
M1 = 1_048_576


def test_request_of_1m() -> None:
    want = GOLDEN["1m request"]
    token, page = ledger.token_bytes(SHAPE), ledger.page_group_bytes(PAGE)
    chunk = want["chunk_tokens"]
    hit = 100_000 // PAGE.page_tokens
    have = {
        "chunk_tokens": 32_768,
        "chunks": -(-M1 // chunk),
        "pages_per_chunk": ledger.request_pages(chunk),
        "chunk_bytes": page.times(ledger.request_pages(chunk)).total,
        "prefix_hit_100000_tokens": {
            "pages": hit,
            "tokens": hit * PAGE.page_tokens,
            "main_bytes": page.times(hit).main,
            "index_bytes": page.times(hit).index,
        },
        "index_only_seconds_at_400gbps": round(traffic.link_seconds(token.index * M1, 400), 4),
        "total_seconds_at_400gbps": round(traffic.link_seconds(token.total * M1, 400), 4),
        "index_write_per_layer_per_chunk": PAGE.index_row.row_bytes * chunk,
        "index_write_per_chunk": token.index * chunk,
        "index_read_per_decode_step_at_1m": token.index * M1,
        "index_read_over_32_prefill_chunks": traffic.index_reads(M1, chunk, token.index),
        "pages_with_256_output_tokens": ledger.request_pages(M1, output_tokens=256),
        "drop_page_hit_of_100000": {"pages": ledger.drop_page_usable(100_000) // PAGE.page_tokens},
        "score_flops_per_pair_per_layer": traffic.score_flops(GLM["index_n_heads"], SHAPE.index_head_dim),
        "full_layers": len(SHAPE.full_layers),
        "prefix_saving_of_scores": want["prefix_saving_of_scores"],
    }
    assert have == want
    assert traffic.scores_saved(M1 // 2, M1) == 0.25


def test_decode_writes() -> None:
    index = ledger.token_bytes(SHAPE).index
    assert {"index_bytes_per_token": index, "index_bytes_per_mtp_verify_of_6": 6 * index} == GOLDEN["decode writes"]


def test_scores_are_a_layers_and_the_model_has_21_times_them() -> None:
    layer = traffic.score_flops(GLM["index_n_heads"], SHAPE.index_head_dim)
    assert layer * len(SHAPE.full_layers) == 21 * 8192


@given(st.integers(0, 1000), st.integers(1, 100))
def test_index_reads_are_the_sum_over_chunks(context: int, chunk: int) -> None:
    ends = [min(at + chunk, context) for at in range(0, context, chunk)]
    assert traffic.index_reads(context, chunk, 3) == 3 * sum(ends)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 300))
def test_reads_after_a_hit_are_the_sum_over_the_chunks_of_the_rest(context: int, chunk: int, prefix: int) -> None:
    prefix = min(prefix, context)
    ends = [min(at + chunk, context) for at in range(prefix, context, chunk)]
    assert traffic.index_reads(context, chunk, 7, prefix_tokens=prefix) == 7 * sum(ends)


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(1, 2_000))
def test_a_hit_saves_its_own_scores_and_nothing_else(context: int, hit: int, chunk: int) -> None:
    hit = min(hit, context)
    made = traffic.hit_saving(hit, context, page=GroupBytes(640, 64), page_tokens=64, read_bytes=64, chunk_tokens=chunk)
    assert made.tokens == made.pages * 64 == hit // 64 * 64
    assert made.bytes == GroupBytes(640 * made.pages, 64 * made.pages)
    # all of L^2 / 2, but for two halves that are rounded down
    left = made.saved_pairs + made.cross_pairs + made.rest_pairs
    assert context * context // 2 - left in (0, 1)
    assert made.scores_share == pytest.approx(made.tokens_share**2)
    if hit % 64 == 0 and hit < context:
        ends = [min(at + chunk, context) for at in range(hit, context, chunk)]
        assert made.index_read_bytes == sum(ends)


def test_half_a_prompt_saves_a_quarter_of_the_scores() -> None:
    page = ledger.page_group_bytes(PAGE)
    made = traffic.hit_saving(
        M1 // 2, M1, page=page, page_tokens=64, read_bytes=ledger.index_page_bytes(SHAPE), chunk_tokens=32_768
    )
    assert (made.scores_share, made.tokens_share) == (0.25, 0.5)  # and not 0.75
    assert made.cross_pairs == 2 * made.saved_pairs
    assert made.index_read_without_bytes == GOLDEN["1m request"]["index_read_over_32_prefill_chunks"]
    # half the chunks, but three quarters of the reads are left
    assert made.index_read_bytes / made.index_read_without_bytes == pytest.approx(0.742, abs=0.001)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: traffic.link_seconds(1, 0), "gbps"),
        (lambda: traffic.link_seconds(1, float("nan")), "gbps"),
        (lambda: traffic.link_seconds(1, float("inf")), "gbps"),
        (lambda: traffic.index_reads(1, 0, 1), "chunk_tokens"),
        (lambda: traffic.index_reads(1, 1, 1, prefix_tokens=2), "context_tokens"),
        (lambda: traffic.scores_saved(1, 0), "context_tokens"),
        (lambda: traffic.hit_saving(2, 1, page=GroupBytes(1, 1), page_tokens=1, read_bytes=1, chunk_tokens=1), "hit"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
