"""Four complaints of an operator, explained from numbers: a small pool, refused long requests, idle hits, slow steps.

Guarantees: a finding carries every number that it was drawn from; numbers as they should be give "nothing wrong"; a
cause is named only if it alone accounts for what was seen, within the tolerance that stands beside it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import GroupBytes, request_pages, slot_page_bytes, token_bytes, usable_pages
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS
from pdkv.geometry.row_format import MAIN_ROWS

NOTHING_WRONG = "nothing wrong"
Number = int | float | str


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one complaint."""

    complaint: str
    wrong: bool
    numbers: dict[str, Number]
    """What it was drawn from, units last in the names."""
    finding: str
    way_out: tuple[str, ...] = ()


def _fine(complaint: str, numbers: dict[str, Number], why: str) -> Finding:
    return Finding(complaint, False, numbers, f"{NOTHING_WRONG}: {why}")


def _wrong(complaint: str, numbers: dict[str, Number], why: str, *way_out: str) -> Finding:
    return Finding(complaint, True, numbers, why, way_out)


def _require_counts(facts: Any) -> None:
    """Every number of a complaint is finite and not below 0. Raises `ConfigError` naming the first that isn't."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(field.name, value, "a finite number, not below 0")


# --- 1: the pool is smaller than expected -----------------------------------------------------------------------------

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
    _require_counts(facts)
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
        return _fine(POOL, numbers, "the pool has the pages that its memory gives")
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
        return _wrong(POOL, numbers, why, "give the pool its memory: weights and workspaces were taken from it first")
    causes = [words for words, size in _page_causes(shape, main_row, facts) if low <= size <= high]
    if not causes:
        why = f"{short}; no change of layers, rows, drafts or DCP gives a page of {low:,} to {high:,} B"
        return _wrong(POOL, numbers, why, "compare the node's segments with the plan's, one by one")
    single = [words for words in causes if " and " not in words]
    why = f"{short}; explained by: {'; or by: '.join((single or causes)[:3])}"
    return _wrong(POOL, numbers, why, "give the engine the planned row format and the model's own list of full layers")


def _page(shape: ModelShape, main_row: str, facts: PoolFacts) -> GroupBytes:
    return slot_page_bytes(shape, main_row=main_row, dcp=facts.dcp, rollback_tokens=facts.rollback_tokens)


def _page_causes(shape: ModelShape, main_row: str, facts: PoolFacts) -> Iterator[tuple[str, int]]:
    """What else a page may hold, with its bytes: one change, or two or three of them joined by "and"."""
    full = len(shape.full_layers)
    index_page = _page(shape, main_row, facts).index // (full + shape.draft_layers)
    for words, size in _other_pages(shape, main_row, facts):
        if words:
            yield " and ".join(words), size
        for count in range(1, shape.num_layers + 1):
            if count != full:
                more = f"{count} layers with index-K instead of {full}"
                more += " (all layers treated as full)" if count == shape.num_layers else ""
                yield " and ".join((*words, more)), size + (count - full) * index_page
    for dcp in (1, 2, 4, 8):
        if dcp != facts.dcp:
            size = _page(shape, main_row, replace(facts, dcp=dcp)).total
            yield f"index-K of dcp {dcp} instead of {facts.dcp}", size


def _other_pages(shape: ModelShape, main_row: str, facts: PoolFacts) -> Iterator[tuple[tuple[str, ...], int]]:
    """Pages with other main rows or another count of MTP layers, the planned one among them (with no words)."""
    drafts = {0: (), 1: ("an MTP layer more",), -1: ("an MTP layer less",)}
    for row in MAIN_ROWS.values():
        rows = () if row.name == main_row else (f"main rows of {row.row_bytes} B ({row.name})",)
        for more, words in drafts.items():
            if shape.draft_layers + more >= 0:
                other = replace(shape, draft_layers=shape.draft_layers + more)
                yield (*rows, *words), _page(other, row.name, facts).total


# --- 2: long requests are refused while short ones pass ---------------------------------------------------------------

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
    _require_counts(facts)
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
        return _wrong(REFUSED, numbers, why, "refuse it at once and by name, waiting doesn't help", larger)
    if needed <= now:
        return _fine(REFUSED, numbers, "free and evictable pages are enough for it; what refuses it isn't the pool")
    numbers["held_pages"] = held = facts.total_pages - now - facts.quarantined_pages
    why = f"it fits an empty pool, but now {needed - now:,} pages are short; running requests hold {held:,}"
    way_out = [f"let it wait at the head of the queue: what fits {now:,} pages passes it for ever if nothing bounds it"]
    if facts.quarantined_pages:
        why += f", quarantine {facts.quarantined_pages:,}"
        way_out.append("quarantined pages come back when the peer's reads have an end: see the node's status")
    return _wrong(REFUSED, numbers, why, *way_out)


# --- 3: a high hit rate, but no better TTFT ---------------------------------------------------------------------------

TTFT = "a high hit rate, but no better TTFT"
TOLERANCE = 1.1
"""A time is as expected up to this factor."""


@dataclass(frozen=True, slots=True)
class TtftFacts:
    """One prompt without and with its hit. Times in seconds; the parts are those of the run with the hit, if known."""

    prompt_tokens: int
    hit_tokens: int
    cold_ttft_s: float
    ttft_s: float
    prefill_s: float = 0.0
    exposed_transfer_s: float = 0.0
    shipped_pages: int = 0


def diagnose_ttft(shape: ModelShape, main_row: str, facts: TtftFacts) -> Finding:
    """Whether the hit gave what a hit of its length can give, and if not where the time went."""
    _require_counts(facts)
    if not 0 <= facts.hit_tokens <= facts.prompt_tokens or facts.prompt_tokens < 1:
        raise ConfigError("hit_tokens", facts.hit_tokens, f"0 to prompt_tokens, {facts.prompt_tokens}")
    if not (facts.cold_ttft_s > 0 and facts.ttft_s > 0):
        raise ConfigError("ttft_s, cold_ttft_s", f"{facts.ttft_s}, {facts.cold_ttft_s}", "seconds above 0")
    share = facts.hit_tokens / facts.prompt_tokens
    best, worst = (1 - share) * facts.cold_ttft_s, (1 - share * share) * facts.cold_ttft_s
    rest = facts.prompt_tokens - facts.hit_tokens
    numbers: dict[str, Number] = {
        "prompt_tokens": facts.prompt_tokens,
        "hit_tokens": facts.hit_tokens,
        "tokens_saved_share": round(share, 4),
        "scores_saved_share": round(share * share, 4),
        "cross_pairs_left": rest * facts.hit_tokens,
        "cold_ttft_s": facts.cold_ttft_s,
        "ttft_s": facts.ttft_s,
        "possible_ttft_s": f"{best:.4g} (all work grows with tokens) to {worst:.4g} (all work is scores)",
    }
    if facts.ttft_s <= max(worst, 0.1 * facts.cold_ttft_s) * TOLERANCE:
        if share >= 0.5:
            return _fine(TTFT, numbers, "the first token comes as early as a hit of this length allows")
        why = (
            f"the hit is short for its prompt: {share:.0%} of the tokens, but only {share * share:.0%} of the scores, "
            f"since each of the other {rest:,} tokens still scores all {facts.hit_tokens:,}"
        )
        return _wrong(TTFT, numbers, why, "longer shared prefixes: what prompts have in common has to lead")
    return _lost_time(shape, main_row, facts, numbers)


def _lost_time(shape: ModelShape, main_row: str, facts: TtftFacts, numbers: dict[str, Number]) -> Finding:
    waiting = facts.ttft_s - facts.prefill_s - facts.exposed_transfer_s
    numbers |= {"prefill_s": facts.prefill_s, "exposed_transfer_s": facts.exposed_transfer_s}
    if not facts.prefill_s and not facts.exposed_transfer_s:
        why = "the hit gives less than its length allows; where the time went needs prefill_s and exposed_transfer_s"
        return _wrong(TTFT, numbers, why, "give both: they stand in each request's account (pdkv generate --json)")
    if facts.exposed_transfer_s >= max(facts.prefill_s, waiting):
        shipped = slot_page_bytes(shape, main_row=main_row).total * facts.shipped_pages
        numbers |= {"shipped_pages": facts.shipped_pages, "shipped_bytes": shipped}
        why = (
            f"{facts.exposed_transfer_s:.4g} s of the transfer came after prefill's end: {facts.shipped_pages:,} pages "
            "still went over the link, a hit on prefill alone doesn't spare them"
        )
        routing = "keep the prefix on decode as well: route requests of one prefix to one decode node"
        return _wrong(TTFT, numbers, why, routing, "look at the lane in the node's status: RDMA or TCP")
    if waiting >= facts.prefill_s:
        numbers["waiting_s"] = round(waiting, 6)
        why = f"{waiting:.4g} s of {facts.ttft_s:.4g} s are neither prefill nor transfer: the request waited"
        return _wrong(TTFT, numbers, why, "more prefill nodes or a shorter queue: a hit doesn't shorten the wait")
    why = f"prefill took {facts.prefill_s:.4g} s, more than the rest of the prompt needs: the hit is not prefill's"
    return _wrong(
        TTFT,
        numbers,
        why,
        "one namespace for all that should share: another extra_key or cache_salt is another chain",
        "the same EAGLE rule on both nodes: drop-page finds a page less, bigram a token",
    )


# --- 4: step time grows with the context ------------------------------------------------------------------------------

STEP = "step time grows with the context, whatever the batch"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Decode steps at two contexts, seconds each; `memory_bytes_per_s` is the rate of the memory that pages lie in.

    `requests`: with a context of this length in one step of one rank.
    """

    context_tokens: int
    step_s: float
    short_context_tokens: int
    short_step_s: float
    memory_bytes_per_s: float
    requests: int = 1


def diagnose_step(shape: ModelShape, main_row: str, facts: StepFacts) -> Finding:
    """Which read accounts for the growth: index-K (as designed), all of main KV (not sparse), or neither."""
    _require_counts(facts)
    if not 0 < facts.short_context_tokens < facts.context_tokens:
        raise ConfigError("short_context_tokens", facts.short_context_tokens, f"above 0, below {facts.context_tokens}")
    if not (facts.step_s > 0 and facts.short_step_s > 0 and facts.memory_bytes_per_s > 0 and facts.requests > 0):
        raise ConfigError("step_s, short_step_s, memory_bytes_per_s, requests", "0 or less", "numbers above 0")
    token = token_bytes(shape, main_row=main_row)
    slope = (facts.step_s - facts.short_step_s) / (facts.context_tokens - facts.short_context_tokens)
    seen = slope * facts.memory_bytes_per_s / facts.requests
    numbers: dict[str, Number] = {
        "context_tokens": facts.context_tokens,
        "step_s": facts.step_s,
        "short_context_tokens": facts.short_context_tokens,
        "short_step_s": facts.short_step_s,
        "requests": facts.requests,
        "index_bytes_per_token": token.index,
        "main_bytes_per_token": token.main,
        "index_read_per_step_bytes": token.index * facts.context_tokens * facts.requests,
        "index_read_floor_s": token.index * facts.context_tokens * facts.requests / facts.memory_bytes_per_s,
        "seen_bytes_per_token": round(seen, 1),
    }
    if facts.step_s <= facts.short_step_s * TOLERANCE:
        return _fine(STEP, numbers, f"the step is the same within {TOLERANCE - 1:.0%} over the whole range of contexts")
    layers = len(shape.full_layers)
    # a kernel reaches a third of the memory's rate, or better
    if seen <= 3 * token.index:
        why = (
            f"index-K explains it: each of {layers} full layers scores every token of each request in each step; "
            f"top-k bounds what attention reads ({shape.index_topk} rows), not what the indexer reads"
        )
        model = "fewer full layers (indexer_types) or kpool: both are the model's"
        return _wrong(STEP, numbers, why, model, "MTP: the tokens that a step accepts share its read; requests don't")
    if seen > 3 * token.total:
        why = (
            f"{seen:,.0f} B a token are more than all rows of both caches: it isn't a read but work on every token, "
            "attention over the whole context or a copy of it in another form"
        )
        dense = f"see that index_topk {shape.index_topk} and a sparse kernel are in force"
        return _wrong(STEP, numbers, why, dense, "see that memory_bytes_per_s is the rate of the memory with the pages")
    if seen >= token.total / 3:
        why = "main KV explains it: attention reads all rows and not the selected ones, so sparse attention is off"
        return _wrong(STEP, numbers, why, f"see that index_topk {shape.index_topk} and a sparse kernel are in force")
    why = f"{seen:,.0f} B a token is more than index-K and less than main KV: no read of either cache explains it"
    return _wrong(
        STEP,
        numbers,
        why,
        "a page table with a row a token is 64 times one with a row a page: is it built or copied in each step?",
        "scores and top-k over columns padded to the longest context cost as much for a short one",
    )
