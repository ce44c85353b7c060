"""A high hit rate without a better time to first token: what the hit can give at most, and where the time went.

Guarantees: a time is wrong only beyond `TOLERANCE` times what the hit's length allows in the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import slot_page_bytes
from pdkv.geometry.diagnose.finding import TOLERANCE, Finding, Number, fine, require_counts, wrong
from pdkv.geometry.model_config import ModelShape

TTFT = "a high hit rate, but no better TTFT"


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
    require_counts(facts)
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
            return fine(TTFT, numbers, "the first token comes as early as a hit of this length allows")
        why = (
            f"the hit is short for its prompt: {share:.0%} of the tokens, but only {share * share:.0%} of the scores, "
            f"since each of the other {rest:,} tokens still scores all {facts.hit_tokens:,}"
        )
        return wrong(TTFT, numbers, why, "longer shared prefixes: what prompts have in common has to lead")
    return _lost_time(shape, main_row, facts, numbers)


def _lost_time(shape: ModelShape, main_row: str, facts: TtftFacts, numbers: dict[str, Number]) -> Finding:
    waiting = facts.ttft_s - facts.prefill_s - facts.exposed_transfer_s
    numbers |= {"prefill_s": facts.prefill_s, "exposed_transfer_s": facts.exposed_transfer_s}
    if not facts.prefill_s and not facts.exposed_transfer_s:
        why = "the hit gives less than its length allows; where the time went needs prefill_s and exposed_transfer_s"
        return wrong(TTFT, numbers, why, "give both: they stand in each request's account (pdkv generate --json)")
    if facts.exposed_transfer_s >= max(facts.prefill_s, waiting):
        shipped = slot_page_bytes(shape, main_row=main_row).total * facts.shipped_pages
        numbers |= {"shipped_pages": facts.shipped_pages, "shipped_bytes": shipped}
        why = (
            f"{facts.exposed_transfer_s:.4g} s of the transfer came after prefill's end: {facts.shipped_pages:,} pages "
            "still went over the link, a hit on prefill alone doesn't spare them"
        )
        routing = "keep the prefix on decode as well: route requests of one prefix to one decode node"
        return wrong(TTFT, numbers, why, routing, "look at the lane in the node's status: RDMA or TCP")
    if waiting >= facts.prefill_s:
        numbers["waiting_s"] = round(waiting, 6)
        why = f"{waiting:.4g} s of {facts.ttft_s:.4g} s are neither prefill nor transfer: the request waited"
        return wrong(TTFT, numbers, why, "more prefill nodes or a shorter queue: a hit doesn't shorten the wait")
    why = f"prefill took {facts.prefill_s:.4g} s, more than the rest of the prompt needs: the hit is not prefill's"
    return wrong(
        TTFT,
        numbers,
        why,
        "one namespace for all that should share: another extra_key or cache_salt is another chain",
        "the same EAGLE rule on both nodes: drop-page finds a page less, bigram a token",
    )
