"""Memory beside the pages against the golden ledger, and top-k in row chunks against top-k of the whole matrix."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry import workspaces
from pdkv.geometry.workspaces import logits_row_bytes, logits_row_chunks

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))
M1 = 1_048_576


def test_workspaces() -> None:
    want = GOLDEN["workspaces"]
    for row in want["topk_indices_bytes"]:
        assert workspaces.topk_buffer_bytes(row["max_num_batched_tokens"], row["index_topk"]) == row["bytes"]
    for row in want["logits_bytes"]:
        assert workspaces.logits_bytes(row["rows"], row["cols"]) == row["bytes"]
    assert want["logits_never_chunk_below_elements"] == workspaces.LOGITS_NEVER_SPLIT_BELOW


def test_page_tables() -> None:
    assert {
        "per_token_int32_row_bytes_1m": workspaces.page_table_bytes(M1),
        "per_page_int32_row_bytes_1m": workspaces.page_table_bytes(M1, page_tokens=64),
        "per_token_rows_32_requests": workspaces.page_table_bytes(M1, requests=32),
        "per_page_rows_32_requests": workspaces.page_table_bytes(M1, page_tokens=64, requests=32),
    } == GOLDEN["page tables"]
    assert workspaces.page_table_bytes(M1, page_tokens=64, requests=32, groups=2) == 2 * 2_097_152


@pytest.mark.parametrize("want", GOLDEN["logits budget"], ids=lambda w: f"{w['rows']}x{w['cols']}")
def test_logits_budget(want: dict[str, Any]) -> None:
    budget = workspaces.logits_budget_bytes(want["total_bytes"], want["mem_fraction_static"])
    assert want["elements"] == want["rows"] * want["cols"]
    assert want["never_chunk"] == workspaces.logits_never_split(want["rows"], want["cols"])
    assert want["budget_bytes"] == budget
    assert want["rows_per_chunk"] == workspaces.logits_rows_per_chunk(budget, want["cols"])


def test_logits_budget_has_three_caps() -> None:
    assert workspaces.logits_budget_bytes(1000, 0.0) == 200
    assert workspaces.logits_budget_bytes(1000, 0.9, free_bytes=50) == 10
    assert workspaces.logits_rows_per_chunk(1, 300) == 1
    # 257 columns take the space of 512
    assert workspaces.logits_rows_per_chunk(2048, 257) == 1
    assert workspaces.logits_rows_per_chunk(2048, 256) == 2


@pytest.mark.parametrize("want", GOLDEN["logits budget"], ids=lambda w: f"{w['rows']}x{w['cols']}")
def test_chunks_follow_the_budget(want: dict[str, Any]) -> None:
    chunks = logits_row_chunks(want["rows"], want["cols"], want["budget_bytes"])
    step = want["rows"] if want["never_chunk"] else want["rows_per_chunk"]
    assert len(chunks) == -(-want["rows"] // step)
    assert len(chunks[0]) == step
    plan = workspaces.logits_plan(want["rows"], want["cols"], want["budget_bytes"])
    assert (plan.rows_per_chunk, plan.chunks) == (step, len(chunks))
    assert want["never_chunk"] or plan.peak_bytes <= want["budget_bytes"]


@given(st.integers(0, 5000), st.integers(1, 20_000), st.integers(0, 10**9), st.none() | st.integers(0, 10**9))
def test_chunks_cover_each_row_once_within_the_budget(rows: int, cols: int, budget: int, free: int | None) -> None:
    chunks = logits_row_chunks(rows, cols, budget, free_bytes=free)
    assert [row for chunk in chunks for row in chunk] == list(range(rows))
    cap = budget if free is None else min(budget, free // 5)
    if rows * cols < 8_000_000:
        assert len(chunks) == min(rows, 1)
    else:
        assert all(len(c) * logits_row_bytes(cols) <= cap or len(c) == 1 for c in chunks)
        # as few chunks as that allows
        assert len(chunks) == -(-rows // max(cap // logits_row_bytes(cols), 1))


def test_the_moving_cap_only_lowers() -> None:
    rows, cols, budget = 4096, 4096, 4096 * 4 * 1024
    assert len(logits_row_chunks(rows, cols, budget)) == 4
    assert len(logits_row_chunks(rows, cols, budget, free_bytes=10**12)) == 4
    assert len(logits_row_chunks(rows, cols, budget, free_bytes=5 * budget // 2)) == 8
    assert len(logits_row_chunks(rows, cols, budget, free_bytes=0)) == rows


def test_drafts_multiply_the_rows() -> None:
    assert workspaces.query_rows(7) == 7
    assert workspaces.query_rows(7, 5) == 42
    # 7 requests at 1M are one piece, with 5 drafts each they are not
    budget = workspaces.logits_budget_bytes(85_899_345_920, 0.98)
    assert len(logits_row_chunks(workspaces.query_rows(7), M1, budget)) == 1
    assert len(logits_row_chunks(workspaces.query_rows(7, 20), M1, budget)) == 2


def topk(scores: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    """Columns of the k largest int64 scores of each row, ascending; ties go to the lower column."""
    cols = scores.shape[1]
    keys = scores * cols - np.arange(cols)
    return np.sort(np.argpartition(keys, cols - k, axis=1)[:, cols - k :], axis=1)


def merged_topk(scores: np.ndarray[Any, Any], k: int, chunks: tuple[range, ...]) -> np.ndarray[Any, Any]:
    return np.concatenate([topk(scores[c.start : c.stop], k) for c in chunks])


def test_topk_of_merged_chunks_is_that_of_the_whole_matrix() -> None:
    rows, cols, k = 900, 9_000, 16
    # few distinct values: ties must not depend on the chunk either
    scores = np.random.default_rng(5).integers(0, 5_000, (rows, cols))
    whole = topk(scores, k)
    for budget in (logits_row_bytes(cols) * 250, 0):
        chunks = logits_row_chunks(rows, cols, budget)
        assert len(chunks) > 1
        assert np.array_equal(merged_topk(scores, k, chunks), whole)


def test_a_lost_or_repeated_row_would_be_seen() -> None:
    scores = np.random.default_rng(6).integers(0, 10**6, (900, 9_000))
    whole = topk(scores, 8)
    first, *others = logits_row_chunks(900, 9_000, logits_row_bytes(9_000) * 450)
    for wrong in ((range(first.start, first.stop - 1), *others), (range(1, first.stop), range(449, 900))):
        assert not np.array_equal(merged_topk(scores, 8, wrong), whole)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: workspaces.logits_budget_bytes(1, 1.5), "mem_fraction_static"),
        (lambda: workspaces.logits_budget_bytes(1, 0.5, free_bytes=-1), "free_bytes"),
        (lambda: logits_row_chunks(-1, 1, 1), "rows"),
        (lambda: logits_row_chunks(1, 0, 1), "cols"),
        (lambda: logits_row_chunks(1, 1, -1), "budget_bytes"),
        (lambda: workspaces.topk_buffer_bytes(0, 1), "max_batched_tokens"),
        (lambda: workspaces.query_rows(-1), "requests"),
        (lambda: workspaces.page_table_bytes(1, groups=0), "groups"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
