"""Every figure of the golden ledger that a formula gives, computed again (those of time and memory beside the pages in
`test_traffic` and `test_workspaces`)."""

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


def test_published_errors_are_not_repeated() -> None:
    page = ledger.page_group_bytes(PAGE)
    assert page.times(16_384).main == 53_653_536_768  # and not 53,687,091,712
    assert -(-GOLDEN["1m request"]["index_read_per_decode_step_at_1m"] // PAGE.page_bytes) == 842  # and not 53
    assert page.times(ledger.request_pages(32_768)).total == 1_767_505_920  # 1.768 GB, and not 1.69
    hit = page.times(100_000 // 64)
    assert (100_000 // 64, hit.main, hit.index) == (1_562, 5_115_162_624, 277_111_296)
    assert GOLDEN["glm-5.3, 39 full layers"]["extra_bytes_at_1m"] == 18 * 132 * M1 == 2_491_416_576  # 2.49 GB


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
def test_a_page_of_local_slots_is_64_times_a_slot(dcp: int) -> None:
    for shape in (SHAPE, MTP):
        token, page = ledger.token_bytes(shape, dcp=dcp), ledger.slot_page_bytes(shape, dcp=dcp)
        assert (page.main, page.index) == (64 * token.main, 64 * token.index)
    pooled = model_shape({**GLM, "index_kpool": 16})
    page, fmt = ledger.slot_page_bytes(pooled, dcp=dcp), page_format(pooled)
    assert (page.main, page.index) == (1024 * 51168, fmt.index_bytes * dcp)
    drafts = ledger.slot_page_bytes(pooled, dcp=dcp, rollback_tokens=5)
    assert drafts.index - page.index == 5 * 256 * 21 * dcp  # keys wait in bf16
    assert ledger.slot_page_bytes(SHAPE, rollback_tokens=5) == ledger.slot_page_bytes(SHAPE)
    assert ledger.index_page_bytes(pooled) == ledger.index_page_bytes(SHAPE) == 21 * 8448
    assert ledger.index_page_bytes(MTP) == 22 * 8448


def test_tail_waste() -> None:
    waste = ledger.tail_waste(1000, 64, PAGE.page_bytes)
    assert (waste.average_tokens, waste.average_bytes) == (32_000, 500 * PAGE.page_bytes)
    assert waste.worst_bytes == 1000 * 63 * 53_940
    assert ledger.tail_waste(0, 64, PAGE.page_bytes) == ledger.TailWaste(0, 0, 0)


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
        (lambda: ledger.slot_page_bytes(SHAPE, dcp=0), "dcp"),
        (lambda: ledger.tail_waste(-1, 64, 1), "requests"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
