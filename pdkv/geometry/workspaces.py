"""Memory beside the pages: the buffer of selected tokens, page tables, and the matrix of index scores.

Guarantees: `logits_row_chunks` covers every row once and in order; a chunk stays within the budget it was given, but
for a single row that alone is larger, and for a matrix under `LOGITS_NEVER_SPLIT_BELOW` elements, which is never split.
A row's top-k depends on that row alone, so the top-k of the merged chunks is that of the whole matrix. Integers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import request_pages, require_not_negative, require_positive

INT32_BYTES = 4
FLOAT32_BYTES = 4
LOGITS_NEVER_SPLIT_BELOW = 8_000_000
"""Elements of a score matrix under which the indexer never works in row chunks."""
LOGITS_COLUMN_ALIGN = 256


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """How a score matrix (float32 [rows, cols]) is worked off."""

    rows: int
    cols: int
    bytes: int
    """Of the whole matrix, unaligned."""
    budget_bytes: int
    rows_per_chunk: int
    chunks: int
    peak_bytes: int
    """Of the largest chunk, columns aligned."""


def topk_buffer_bytes(max_batched_tokens: int, index_topk: int) -> int:
    """Buffer of selected token numbers (int32), one for the process."""
    require_positive(max_batched_tokens=max_batched_tokens, index_topk=index_topk)
    return max_batched_tokens * index_topk * INT32_BYTES


def page_table_bytes(context_tokens: int, *, page_tokens: int = 1, requests: int = 1, groups: int = 1) -> int:
    """int32 table rows of `requests` requests, one entry a page; the default page of 1 is the per-token table.

    `groups`: tables kept for each request; 1 where both caches share page ids, as here, 2 where each has its own.
    """
    require_not_negative(requests=requests)
    require_positive(groups=groups)
    return request_pages(context_tokens, page_tokens=page_tokens) * INT32_BYTES * requests * groups


def query_rows(requests: int, draft_tokens: int = 0) -> int:
    """Rows of a decode step's scores: a step verifies `draft_tokens` drafts beside the token of each request."""
    require_not_negative(requests=requests, draft_tokens=draft_tokens)
    return requests * (draft_tokens + 1)


def logits_bytes(rows: int, cols: int) -> int:
    """Indexer scores (float32) of `rows` queries against `cols` keys, unaligned."""
    return rows * cols * FLOAT32_BYTES


def logits_never_split(rows: int, cols: int) -> bool:
    return rows * cols < LOGITS_NEVER_SPLIT_BELOW


def logits_budget_bytes(total_bytes: int, mem_fraction_static: float, *, free_bytes: int | None = None) -> int:
    """Memory for scores: min(0.3 of all, 0.2 of what the static part leaves, 0.2 of what is free now), rounded down.

    `free_bytes`: free at this moment, asked for before each use; None plans without this second, moving cap.
    """
    static = Fraction(str(mem_fraction_static))
    if not 0 <= static <= 1:
        raise ConfigError("mem_fraction_static", mem_fraction_static, "0 to 1")
    limits: list[Fraction] = [Fraction(3, 10) * total_bytes, Fraction(1, 5) * (1 - static) * total_bytes]
    if free_bytes is not None:
        require_not_negative(free_bytes=free_bytes)
        limits.append(Fraction(1, 5) * free_bytes)
    budget = min(limits)
    return budget.numerator // budget.denominator


def logits_row_bytes(cols: int) -> int:
    """Bytes of one row as it is laid out: columns aligned to 256."""
    return -(-cols // LOGITS_COLUMN_ALIGN) * LOGITS_COLUMN_ALIGN * FLOAT32_BYTES


def logits_rows_per_chunk(budget_bytes: int, cols: int) -> int:
    """Rows scored at once: the budget over a row's bytes, columns aligned to 256; at least 1."""
    require_positive(cols=cols)
    return max(budget_bytes // logits_row_bytes(cols), 1)


def logits_row_chunks(rows: int, cols: int, budget_bytes: int, *, free_bytes: int | None = None) -> tuple[range, ...]:
    """Ranges of rows to score one after the other; no range for no rows.

    `budget_bytes` is `logits_budget_bytes` as planned; `free_bytes`, where known, caps it once more at 0.2 of what is
    free now. Under MTP pass `query_rows(...)`. Raises `ConfigError` for negative numbers or no columns.
    """
    require_not_negative(rows=rows, budget_bytes=budget_bytes)
    require_positive(cols=cols)
    if free_bytes is not None:
        require_not_negative(free_bytes=free_bytes)
        budget_bytes = min(budget_bytes, free_bytes // 5)
    step = _rows_at_once(rows, cols, budget_bytes)
    return tuple(range(start, min(start + step, rows)) for start in range(0, rows, step))


def logits_plan(rows: int, cols: int, budget_bytes: int) -> LogitsPlan:
    """`logits_row_chunks` in figures, without the ranges. Raises `ConfigError` for no rows or columns."""
    require_positive(rows=rows, cols=cols)
    require_not_negative(budget_bytes=budget_bytes)
    largest = min(_rows_at_once(rows, cols, budget_bytes), rows)
    return LogitsPlan(
        rows=rows,
        cols=cols,
        bytes=logits_bytes(rows, cols),
        budget_bytes=budget_bytes,
        rows_per_chunk=largest,
        chunks=-(-rows // largest),
        peak_bytes=largest * logits_row_bytes(cols),
    )


def _rows_at_once(rows: int, cols: int, budget_bytes: int) -> int:
    return max(rows, 1) if logits_never_split(rows, cols) else logits_rows_per_chunk(budget_bytes, cols)
