"""Long requests that are refused while short ones pass: never, not now, or not for want of pages.

Guarantees: pages are counted for both caches together, and a request with its output and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.geometry.byte_ledger import request_pages, slot_page_bytes
from pdkv.geometry.diagnose.finding import Finding, Number, fine, require_counts, wrong
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS

REFUSED = "long requests are refused while short ones pass"


@dataclass(frozen=True, slots=True)
class RefusedFacts:
    """A pool's pages by what they are used for, and the request that is refused (prompt, output and drafts)."""

    request_tokens: int
    total_pages: int
    free_pages: int
    cached_pages: int = 0
    """Of the tree; counted as evictable, unless `locked_pages` says otherwise."""
    locked_pages: int = 0
    quarantined_pages: int = 0
    dcp: int = 1


def diagnose_refused(shape: ModelShape, main_row: str, facts: RefusedFacts) -> Finding:
    """Whether the request can ever fit, fits later, or should have been let in."""
    require_counts(facts)
    page = slot_page_bytes(shape, main_row=main_row, dcp=facts.dcp)
    needed = request_pages(facts.request_tokens, page_tokens=INDEX_PAGE_ROWS * shape.index_kpool * facts.dcp)
    evictable = facts.cached_pages - facts.locked_pages
    now = facts.free_pages + evictable
    numbers: dict[str, Number] = {
        "request_tokens": facts.request_tokens,
        "needed_pages": needed,
        "needed_main_bytes": page.main * needed,
        "needed_index_bytes": page.index * needed,
        "total_pages": facts.total_pages,
        "free_pages": facts.free_pages,
        "evictable_pages": evictable,
        "quarantined_pages": facts.quarantined_pages,
    }
    if needed > facts.total_pages:
        short = needed - facts.total_pages
        why = f"it can never fit: {short:,} pages short of an empty pool ({short * page.total:,} B)"
        if page.main * needed <= facts.total_pages * page.total:
            why += "; counted in main KV alone it would fit, so index-K was left out of the arithmetic"
        larger = "a larger pool, DCP or a smaller row: the plan of this context says what fits"
        return wrong(REFUSED, numbers, why, "refuse it at once and by name, waiting doesn't help", larger)
    if needed <= now:
        return fine(REFUSED, numbers, "free and evictable pages are enough for it; what refuses it isn't the pool")
    numbers["held_pages"] = held = facts.total_pages - now - facts.quarantined_pages
    why = f"it fits an empty pool, but now {needed - now:,} pages are short; running requests hold {held:,}"
    way_out = [f"let it wait at the head of the queue: what fits {now:,} pages passes it for ever if nothing bounds it"]
    if facts.quarantined_pages:
        why += f", quarantine {facts.quarantined_pages:,}"
        way_out.append("quarantined pages come back when the peer's reads have an end: see the node's status")
    return wrong(REFUSED, numbers, why, *way_out)
