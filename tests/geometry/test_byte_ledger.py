"""Every figure of the golden ledger that a formula gives, computed again."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))
GLM = load_config("glm-5.3")
SHAPE = model_shape(GLM)
MTP = model_shape(load_config("glm-5.3-mtp"))
PAGE = page_format(SHAPE)
M1 = 1_048_576


def test_every_section_of_the_golden_file_is_covered() -> None:
    assert set(GOLDEN) == {
        "glm-5.3",
        "glm-5.3, 39 full layers",
        "glm-5.3 with one MTP layer (own main KV and own index-K)",
        "glm-5.3, main row 576 B",
        "glm-5.3, main row 1152 B",
        "glm-5.3, index_kpool 2 (page 128 tokens, index page still 64 rows)",
        "glm-5.3, index_kpool 16",
        "pool sizes",
        "workspaces",
        "1m request",
        "page tables",
        "decode writes",
        "dcp",
        "dcp index slots",
        "eagle",
        "logits budget",
        "trace hits, conversation_trace.jsonl, infinite pool",  # of the cache, not of a formula
    }


def test_glm() -> None:
    want = GOLDEN["glm-5.3"]
    token, page = ledger.token_bytes(SHAPE), ledger.page_group_bytes(PAGE)
    have = {
        "layers": SHAPE.num_layers,
        "full_layers": len(SHAPE.full_layers),
        "page_tokens": PAGE.page_tokens,
        "main_row_bytes": PAGE.main_row.row_bytes,
        "index_row_bytes": PAGE.index_row.row_bytes,
        "main_bytes_per_token": token.main,
        "index_bytes_per_token": token.index,
        "bytes_per_token": token.total,
        "main_bytes_per_page": page.main,
        "index_bytes_per_page": page.index,
        "bytes_per_page": PAGE.page_bytes,
        "index_share_of_total": round(token.index / token.total, 5),
        "index_share_of_main": round(token.index / token.main, 6),
        "contexts": [_context(context["tokens"]) for context in want["contexts"]],
    }
    assert have == want


def _context(tokens: int) -> dict[str, int]:
    pages = ledger.request_pages(tokens)
    size = ledger.page_group_bytes(PAGE).times(pages)
    return {
        "tokens": tokens,
        "pages": pages,
        "main_bytes": size.main,
        "index_bytes": size.index,
        "total_bytes": size.total,
    }


def test_39_full_layers() -> None:
    full = {*SHAPE.full_layers, *[i for i in range(78) if i not in SHAPE.full_layers][:18]}
    types = ["full" if i in full else "shared" for i in range(78)]
    token = ledger.token_bytes(model_shape({**GLM, "indexer_types": types}))
    base = ledger.token_bytes(SHAPE)
    assert {
        "bytes_per_token": token.total,
        "capacity_ratio_vs_21_full": round(base.total / token.total, 5),
        "extra_bytes_at_1m": (token.total - base.total) * M1,
    } == GOLDEN["glm-5.3, 39 full layers"]


def test_one_mtp_layer() -> None:
    fmt = page_format(MTP)
    assert {
        "bytes_per_token": ledger.token_bytes(MTP).total,
        "bytes_per_page": fmt.page_bytes,
        "regions": len(fmt.segments),
    } == GOLDEN["glm-5.3 with one MTP layer (own main KV and own index-K)"]


@pytest.mark.parametrize(("row", "bytes_"), [("fp8", 576), ("bf16", 1152)])
def test_other_rows(row: str, bytes_: int) -> None:
    assert {
        "bytes_per_token": ledger.token_bytes(SHAPE, main_row=row).total,
        "bytes_per_page": page_format(SHAPE, main_row=row).page_bytes,
    } == GOLDEN[f"glm-5.3, main row {bytes_} B"]


def test_pooled_index() -> None:
    two, sixteen = (model_shape({**GLM, "index_kpool": k}) for k in (2, 16))
    token = ledger.token_bytes(two)
    assert {
        "index_bytes_per_token": token.index,
        "bytes_per_token": token.total,
    } == GOLDEN["glm-5.3, index_kpool 2 (page 128 tokens, index page still 64 rows)"]
    assert (page_format(two).page_tokens, page_format(two).index_tokens) == (128, 64)
    fmt = page_format(sixteen)
    assert {
        "page_tokens": fmt.page_tokens,
        "index_bytes_per_token_ceil": ledger.token_bytes(sixteen).index,
        "index_page_rows": fmt.index_tokens,
        "index_bytes_per_page_per_layer": fmt.segment("index.0").length,
    } == GOLDEN["glm-5.3, index_kpool 16"]


@pytest.mark.parametrize("want", GOLDEN["pool sizes"], ids=lambda w: str(w["available_bytes"]))
def test_pool_sizes(want: dict[str, Any]) -> None:
    available = want["available_bytes"]
    prompt = ledger.pool_fit(available, PAGE.page_bytes, ledger.request_pages(M1))
    output = ledger.pool_fit(available, PAGE.page_bytes, ledger.request_pages(M1, output_tokens=256))
    assert {
        "available_bytes": available,
        "note": want["note"],
        "usable_tokens": prompt.usable_pages * PAGE.page_tokens,
        "usable_pages": prompt.usable_pages,
        "fits_1048576_tokens": prompt.fits,
        "fits_1048576_prompt_plus_256_output": output.fits,
    } == want


def test_workspaces() -> None:
    want = GOLDEN["workspaces"]
    for row in want["topk_indices_bytes"]:
        assert ledger.topk_buffer_bytes(row["max_num_batched_tokens"], row["index_topk"]) == row["bytes"]
    for row in want["logits_bytes"]:
        assert ledger.logits_bytes(row["rows"], row["cols"]) == row["bytes"]
    assert want["logits_never_chunk_below_elements"] == ledger.LOGITS_NEVER_SPLIT_BELOW


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
        "index_only_seconds_at_400gbps": round(ledger.link_seconds(token.index * M1, 400), 4),
        "total_seconds_at_400gbps": round(ledger.link_seconds(token.total * M1, 400), 4),
        "index_write_per_layer_per_chunk": PAGE.index_row.row_bytes * chunk,
        "index_write_per_chunk": token.index * chunk,
        "index_read_per_decode_step_at_1m": token.index * M1,
        "index_read_over_32_prefill_chunks": ledger.index_reads(M1, chunk, token.index),
        "pages_with_256_output_tokens": ledger.request_pages(M1, output_tokens=256),
        "drop_page_hit_of_100000": {"pages": ledger.drop_page_usable(100_000) // PAGE.page_tokens},
        "score_flops_per_pair_per_layer": ledger.score_flops(GLM["index_n_heads"], SHAPE.index_head_dim),
        "full_layers": len(SHAPE.full_layers),
        "prefix_saving_of_scores": want["prefix_saving_of_scores"],
    }
    assert have == want
    assert ledger.scores_saved(M1 // 2, M1) == 0.25


def test_page_tables_and_decode_writes() -> None:
    assert {
        "per_token_int32_row_bytes_1m": ledger.page_table_bytes(M1),
        "per_page_int32_row_bytes_1m": ledger.page_table_bytes(M1, page_tokens=64),
        "per_token_rows_32_requests": ledger.page_table_bytes(M1, requests=32),
        "per_page_rows_32_requests": ledger.page_table_bytes(M1, page_tokens=64, requests=32),
    } == GOLDEN["page tables"]
    index = ledger.token_bytes(SHAPE).index
    assert {"index_bytes_per_token": index, "index_bytes_per_mtp_verify_of_6": 6 * index} == GOLDEN["decode writes"]


@pytest.mark.parametrize("want", GOLDEN["dcp"], ids=lambda w: str(w["dcp"]))
def test_dcp(want: dict[str, Any]) -> None:
    assert ledger.token_bytes(SHAPE, dcp=want["dcp"]).total == want["bytes_per_local_token"]
    assert ledger.token_bytes(MTP, dcp=want["dcp"]).total == want["with_one_mtp_layer"]


@pytest.mark.parametrize("want", GOLDEN["dcp index slots"], ids=lambda w: str(w["dcp"]))
def test_dcp_index_slots(want: dict[str, Any]) -> None:
    size = want["size"]
    assert ledger.dcp_index_slots(size, want["page_tokens"], want["dcp"]) == want["index_slots"]
    assert ledger.dcp_index_slots(size, want["page_tokens"], want["dcp"], logical=True) == size


@pytest.mark.parametrize("want", GOLDEN["eagle"], ids=lambda w: str(w["prompt_tokens"]))
def test_eagle_lengths(want: dict[str, Any]) -> None:
    tokens = want["prompt_tokens"]
    assert ledger.bigram_recorded(tokens) == want["bigram_recorded"]
    assert ledger.drop_page_usable(tokens) == want["drop_page_usable_when_all_full_pages_are_cached"]


@pytest.mark.parametrize("want", GOLDEN["logits budget"], ids=lambda w: f"{w['rows']}x{w['cols']}")
def test_logits_budget(want: dict[str, Any]) -> None:
    budget = ledger.logits_budget_bytes(want["total_bytes"], want["mem_fraction_static"])
    assert want["elements"] == want["rows"] * want["cols"]
    assert want["never_chunk"] == ledger.logits_never_split(want["rows"], want["cols"])
    assert want["budget_bytes"] == budget
    assert want["rows_per_chunk"] == ledger.logits_rows_per_chunk(budget, want["cols"])


def test_logits_budget_has_three_caps() -> None:
    assert ledger.logits_budget_bytes(1000, 0.0) == 200
    assert ledger.logits_budget_bytes(1000, 0.9, free_bytes=50) == 10
    assert ledger.logits_rows_per_chunk(1, 300) == 1
    # 257 columns take the space of 512
    assert ledger.logits_rows_per_chunk(2048, 257) == 1
    assert ledger.logits_rows_per_chunk(2048, 256) == 2


@given(st.integers(0, 1000), st.integers(1, 100))
def test_index_reads_are_the_sum_over_chunks(context: int, chunk: int) -> None:
    ends = [min(at + chunk, context) for at in range(0, context, chunk)]
    assert ledger.index_reads(context, chunk, 3) == 3 * sum(ends)


def test_published_errors_are_not_repeated() -> None:
    assert ledger.page_group_bytes(PAGE).times(16_384).main == 53_653_536_768  # and not 53,687,091,712
    assert -(-GOLDEN["1m request"]["index_read_per_decode_step_at_1m"] // PAGE.page_bytes) == 842
    assert ledger.scores_saved(1, 2) == 0.25


@given(st.integers(0, 10**12), st.integers(1, 10**7), st.integers(1, 10**5))
def test_missing_bytes_are_exactly_what_is_missing(available: int, page_bytes: int, needed: int) -> None:
    fit = ledger.pool_fit(available, page_bytes, needed)
    if fit.fits:
        assert fit.missing_bytes == 0
    else:
        assert fit.missing_pages == needed - fit.usable_pages
        assert ledger.pool_fit(available + fit.missing_bytes, page_bytes, needed).fits
        assert not ledger.pool_fit(available + fit.missing_bytes - 1, page_bytes, needed).fits


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: ledger.token_bytes(SHAPE, main_row="fp9"), "main_row"),
        (lambda: ledger.token_bytes(SHAPE, dcp=0), "dcp"),
        (lambda: ledger.request_pages(-1), "prompt_tokens"),
        (lambda: ledger.request_pages(1, page_tokens=0), "page_tokens"),
        (lambda: ledger.usable_pages(1, 0), "page_bytes"),
        (lambda: ledger.link_seconds(1, 0), "gbps"),
        (lambda: ledger.index_reads(1, 0, 1), "chunk_tokens"),
        (lambda: ledger.scores_saved(1, 0), "context_tokens"),
        (lambda: ledger.logits_budget_bytes(1, 1.5), "mem_fraction_static"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
