"""A pool that is smaller than expected: by what factor, and which change of the page explains exactly that.

Guarantees: a cause is named only if its page, and no memory beside it, gives the pool as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import GroupBytes, slot_page_bytes, usable_pages
from pdkv.geometry.diagnose.finding import Finding, Number, fine, require_counts, wrong
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.row_format import MAIN_ROWS

POOL = "the pool is smaller than expected"


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A pool as it was planned (`memory_bytes` for pages and sink) and as it is (`usable_pages`, without the sink)."""

    memory_bytes: int
    usable_pages: int
    page_bytes: int | None = None
    """Of a page of the running node, where that is known; else it is inferred."""
    dcp: int = 1
    """Of the plan."""
    rollback_tokens: int = 0
    """Of the plan; a pooled index keeps the keys of so many drafts."""


def diagnose_pool(shape: ModelShape, main_row: str, facts: PoolFacts) -> Finding:
    """By what factor a pool falls short, and which single or double change of the page accounts for exactly that."""
    require_counts(facts)
    planned = _page(shape, main_row, facts).total
    expected = usable_pages(facts.memory_bytes, planned)
    if not expected:
        raise ConfigError("memory_bytes", facts.memory_bytes, f"room for a page and the sink, {2 * planned} B")
    numbers: dict[str, Number] = {
        "memory_bytes": facts.memory_bytes,
        "planned_page_bytes": planned,
        "expected_pages": expected,
        "usable_pages": facts.usable_pages,
        "ratio": round(facts.usable_pages / expected, 5),
    }
    if facts.usable_pages >= expected:
        return fine(POOL, numbers, "the pool has the pages that its memory gives")
    if facts.page_bytes is None:
        # the page sizes of which exactly so many, and the sink, go into the memory
        low = facts.memory_bytes // (facts.usable_pages + 2) + 1
        high = facts.memory_bytes // (facts.usable_pages + 1)
    else:
        low = high = numbers["page_bytes"] = facts.page_bytes
    short = f"{numbers['ratio']} of what is expected"
    if low <= planned <= high:
        numbers["held_bytes"] = held = (facts.usable_pages + 1) * planned
        why = f"{short}; a page has the planned size, so the pool got {held:,} B, not {facts.memory_bytes:,} B"
        return wrong(POOL, numbers, why, "give the pool its memory: weights and workspaces were taken from it first")
    causes = [cause for cause, size in _page_causes(shape, main_row, facts) if low <= size <= high]
    if not causes:
        why = f"{short}; no change of layers, rows, drafts or DCP gives a page of {low:,} to {high:,} B"
        return wrong(POOL, numbers, why, "compare the node's segments with the plan's, one by one")
    likely = ([cause for cause in causes if len(cause) == 1] or causes)[:3]
    why = f"{short}; explained by: {'; or by: '.join(' and '.join(c.words for c in cause) for cause in likely)}"
    return wrong(POOL, numbers, why, *dict.fromkeys(change.remedy for cause in likely for change in cause))


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing in which a page is not the planned one, and what is done about that very thing."""

    words: str
    remedy: str


def _page(shape: ModelShape, main_row: str, facts: PoolFacts) -> GroupBytes:
    return slot_page_bytes(shape, main_row=main_row, dcp=facts.dcp, rollback_tokens=facts.rollback_tokens)


def _page_causes(shape: ModelShape, main_row: str, facts: PoolFacts) -> Iterator[tuple[tuple[_Change, ...], int]]:
    """What else a page may hold, with its bytes: one change, or two or three of them."""
    full = len(shape.full_layers)
    index_page = _page(shape, main_row, facts).index // (full + shape.draft_layers)
    for changes, size in _other_pages(shape, main_row, facts):
        if changes:
            yield changes, size
        for count in range(1, shape.num_layers + 1):
            if count != full:
                yield (*changes, _other_layers(count, full, shape.num_layers)), size + (count - full) * index_page
    for dcp in (1, 2, 4, 8):
        if dcp != facts.dcp:
            size = _page(shape, main_row, replace(facts, dcp=dcp)).total
            remedy = f"start the engine with DCP {facts.dcp}, or plan with --dcp {dcp}"
            yield (_Change(f"index-K of dcp {dcp} instead of {facts.dcp}", remedy),), size


def _other_layers(count: int, full: int, layers: int) -> _Change:
    every = " (all layers treated as full)" if count == layers else ""
    return _Change(
        f"{count} layers with index-K instead of {full}{every}",
        "give the engine the model's own list of full layers (indexer_types)",
    )


def _other_pages(shape: ModelShape, main_row: str, facts: PoolFacts) -> Iterator[tuple[tuple[_Change, ...], int]]:
    """Pages with other main rows or another count of MTP layers, the planned one among them (with no change)."""
    for row in MAIN_ROWS.values():
        remedy = f"give the engine the planned row format ({main_row}), or plan with --main-row {row.name}"
        other_row = _Change(f"main rows of {row.row_bytes} B ({row.name})", remedy)
        rows = () if row.name == main_row else (other_row,)
        for more in (0, 1, -1):
            drafts = shape.draft_layers + more
            if drafts >= 0:
                other = replace(shape, draft_layers=drafts)
                yield (*rows, *_other_drafts(more, drafts)), _page(other, row.name, facts).total


def _other_drafts(more: int, drafts: int) -> tuple[_Change, ...]:
    if not more:
        return ()
    engine = "without an MTP layer more" if more > 0 else "with its MTP layer"
    remedy = f"start the engine {engine}, as planned, or plan with --draft-layers {drafts}"
    return (_Change(f"an MTP layer {'more' if more > 0 else 'less'}", remedy),)
