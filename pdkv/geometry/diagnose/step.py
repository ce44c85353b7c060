"""Decode steps that grow with the context: which read of which cache accounts for it.

Guarantees: a read is named only if the memory's rate turns the growth into its bytes a token, within a factor of 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import token_bytes
from pdkv.geometry.diagnose.finding import TOLERANCE, Finding, Number, fine, require_counts, wrong
from pdkv.geometry.model_config import ModelShape

STEP = "step time grows with the context, whatever the batch"
DENSE_ENGINES = ("reference",)
"""Engines, by their name in the contract, that attend to the whole context and mask what was not selected: their steps
grow with main KV, and should."""


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
    engine: str = ""
    """Name of what computed the steps, if known."""


def diagnose_step(shape: ModelShape, main_row: str, facts: StepFacts) -> Finding:
    """Which read accounts for the growth: index-K (as designed), all of main KV (not sparse), or neither."""
    require_counts(facts)
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
        return fine(STEP, numbers, f"the step is the same within {TOLERANCE - 1:.0%} over the whole range of contexts")
    layers = len(shape.full_layers)
    # a kernel reaches a third of the memory's rate, or better
    if seen <= 3 * token.index:
        why = (
            f"index-K explains it: each of {layers} full layers scores every token of each request in each step; "
            f"top-k bounds what attention reads ({shape.index_topk} rows), not what the indexer reads"
        )
        model = "fewer full layers (indexer_types) or kpool: both are the model's"
        return wrong(STEP, numbers, why, model, "MTP: the tokens that a step accepts share its read; requests don't")
    if seen >= token.total / 3 and facts.engine in DENSE_ENGINES:
        return fine(
            STEP,
            numbers | {"engine": facts.engine},
            f"the {facts.engine} engine is dense by design: it reads and decodes all rows of main KV for each token "
            "and masks what the indexer didn't select; it is for correctness, a sparse kernel's steps grow less",
        )
    if seen > 3 * token.total:
        why = (
            f"{seen:,.0f} B a token are more than all rows of both caches: it isn't a read but work on every token, "
            "attention over the whole context or a copy of it in another form"
        )
        dense = f"see that index_topk {shape.index_topk} and a sparse kernel are in force"
        return wrong(STEP, numbers, why, dense, "see that memory_bytes_per_s is the rate of the memory with the pages")
    if seen >= token.total / 3:
        why = "main KV explains it: attention reads all rows and not the selected ones, so sparse attention is off"
        return wrong(STEP, numbers, why, f"see that index_topk {shape.index_topk} and a sparse kernel are in force")
    why = f"{seen:,.0f} B a token is more than index-K and less than main KV: no read of either cache explains it"
    return wrong(
        STEP,
        numbers,
        why,
        "a page table with a row a token is 64 times one with a row a page: is it built or copied in each step?",
        "scores and top-k over columns padded to the longest context cost as much for a short one",
    )
