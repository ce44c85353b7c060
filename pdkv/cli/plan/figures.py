"""Every figure of a plan, from the options.

Guarantees: all come from `pdkv.geometry`; text, JSON and plot are made from the one `Plan`, so they can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdkv.cli.plan.options import DEFAULT_ROW, PlanOptions
from pdkv.errors import ConfigError
from pdkv.fields import parse_bytes
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry import traffic, workspaces
from pdkv.geometry.fleet import GPUS, Gpu, GpuMemory, Layout, RankPool, find_gpu
from pdkv.geometry.model_config import index_heads, load_config, max_positions, model_shape, weight_shape
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS, PageFormat, page_format
from pdkv.geometry.what_if import Setup, Variant, dcp_only, fit_of, variants, what_fits

CONTEXTS = (8_192, 131_072, 524_288, 1_048_576)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One prompt: whole pages, their bytes, the time to ship all of them, and whether it fits."""

    tokens: int
    pages: int
    """Of the whole context, as they travel."""
    bytes: ledger.GroupBytes
    seconds: float
    fit: ledger.PoolFit | None
    """With output and draft tokens, in pages of a rank; None when no memory was given."""
    would_fit: tuple[str, ...]
    """Single changes that make it fit, if it doesn't."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory beside the pages, for the longest of the contexts."""

    topk_buffer_bytes: int
    table_row_per_page_bytes: int
    table_row_per_token_bytes: int
    """What the same tables would be with an entry a token."""
    prefill_scores_bytes: int
    decode_scores_bytes: int
    decode_rows: int
    prefill: workspaces.LogitsPlan | None
    """None where the card isn't known: the budget is a share of its memory."""
    decode: workspaces.LogitsPlan | None


@dataclass(frozen=True, slots=True)
class IndexTraffic:
    """Index-K of one request of the longest context."""

    written_per_chunk_bytes: int
    read_per_step_bytes: int
    read_over_prefill_bytes: int
    written_per_step_bytes: int
    """One token, and the drafts with it."""
    seconds: float
    """On the link, alone."""
    score_flops_per_pair: int
    """All full layers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the command prints."""

    model: str
    setup: Setup
    fmt: PageFormat
    options: PlanOptions
    positions: int
    pool: RankPool | None
    contexts: tuple[ContextPlan, ...]
    buffers: Buffers
    index: IndexTraffic
    what_if: tuple[Variant, ...]
    hit: traffic.HitSaving | None
    tail: ledger.TailWaste | None

    @property
    def fits(self) -> bool:
        return all(c.fit is None or c.fit.fits for c in self.contexts)

    @property
    def longest(self) -> ContextPlan:
        return max(self.contexts, key=lambda c: c.tokens)


def make_plan(options: PlanOptions) -> Plan:
    """Raises `ConfigError` naming the option, or the field of the model's config."""
    if options.model is None:
        raise ConfigError("model", None, "a preset or path: a plan is of a model")
    config = load_config(options.model)
    shape = model_shape(config, draft_layers=options.draft_layers)
    ledger.require_not_negative(output_tokens=options.output_tokens, draft_tokens=options.draft_tokens)
    main_row = options.main_row or DEFAULT_ROW
    fmt = page_format(shape, main_row=main_row, rollback_tokens=options.draft_tokens)
    positions = max_positions(config)
    tokens = _contexts(options, positions)
    memory = _memory(options, config, max(tokens))
    setup = Setup(shape, main_row, _layout(options), memory, options.draft_tokens)
    ledger.require_positive(requests=options.requests)
    page = ledger.page_group_bytes(fmt)
    short, hit = options.short_requests, options.hit
    return Plan(
        model=options.model,
        setup=setup,
        fmt=fmt,
        options=options,
        positions=positions,
        pool=setup.pool(),
        contexts=tuple(_context(n, setup, fmt, options) for n in tokens),
        buffers=_buffers(setup, options, max(tokens)),
        index=_index(setup, fmt, options, (max(tokens), index_heads(config))),
        what_if=variants(setup),
        hit=None
        if hit is None
        else traffic.hit_saving(
            hit,
            max(tokens),
            page=page,
            page_tokens=fmt.page_tokens,
            read_bytes=ledger.index_page_bytes(shape),
            chunk_tokens=options.chunk_tokens,
        ),
        tail=None if short is None else ledger.tail_waste(short, fmt.page_tokens, page.total),
    )


def find_card(text: str) -> Gpu:
    """A card by name, or by its memory. Raises `ConfigError`."""
    if text.lower() in GPUS or not text[:1].isdigit():
        return find_gpu(text)
    return Gpu(text, parse_bytes(text, "gpu"), 0)


def _contexts(options: PlanOptions, positions: int) -> tuple[int, ...]:
    """Without any given: the usual ones that the model was made for, and its longest."""
    tokens = tuple(options.context or sorted({n for n in CONTEXTS if n < positions} | {min(positions, CONTEXTS[-1])}))
    if min(tokens) < 1:
        raise ConfigError("context", min(tokens), "an integer of at least 1")
    return tokens


def _layout(o: PlanOptions) -> Layout:
    if o.gpu is None or o.memory is not None:
        return dcp_only(o.dcp)
    dp, pp = 1 if o.dp is None else o.dp, 1 if o.pp is None else o.pp
    ledger.require_positive(dp=dp, pp=pp)
    tp = o.tp if o.tp is not None else max((o.gpus or 1) // (dp * pp), 1)
    gpus = o.gpus if o.gpus is not None else tp * dp * pp
    return Layout(gpus=gpus, tp=tp, dp=dp, ep=tp * dp if o.ep is None else o.ep, dcp=o.dcp, pp=pp)


def _memory(o: PlanOptions, config: dict[str, object], longest: int) -> GpuMemory | int | None:
    if o.memory is not None:
        return parse_bytes(o.memory, "memory")
    if o.gpu is None:
        return None
    given: dict[str, Any] = {
        "weight_dtype": o.weights,
        "mem_fraction_static": o.mem_fraction_static,
        "reserve_bytes": None if o.reserve is None else parse_bytes(o.reserve, "reserve"),
    }
    return GpuMemory(
        gpu=find_card(o.gpu),
        weights=weight_shape(config),
        **{name: value for name, value in given.items() if value is not None},
        batched_tokens=o.chunk_tokens,
        requests=o.requests,
        longest_tokens=longest + o.output_tokens + o.draft_tokens,
        table_groups=o.groups,
        rollback_tokens=o.draft_tokens,
    )


def _context(tokens: int, setup: Setup, fmt: PageFormat, o: PlanOptions) -> ContextPlan:
    pages = ledger.request_pages(tokens, page_tokens=fmt.page_tokens)
    size = ledger.page_group_bytes(fmt).times(pages)
    needed = tokens + o.output_tokens + o.draft_tokens
    return ContextPlan(
        tokens=tokens,
        pages=pages,
        bytes=size,
        seconds=traffic.link_seconds(size.total, o.gbps),
        fit=fit_of(setup, needed),
        would_fit=what_fits(setup, needed),
    )


def _buffers(setup: Setup, o: PlanOptions, longest: int) -> Buffers:
    shape, memory = setup.shape, setup.memory
    needed = longest + o.output_tokens + o.draft_tokens
    page_tokens = INDEX_PAGE_ROWS * shape.index_kpool * setup.layout.dcp
    rows, cols = workspaces.query_rows(o.requests, o.draft_tokens), -(-longest // shape.index_kpool)
    prefill = decode = None
    if isinstance(memory, GpuMemory):
        budget = workspaces.logits_budget_bytes(memory.gpu.memory_bytes, memory.mem_fraction_static)
        prefill = workspaces.logits_plan(o.chunk_tokens, cols, budget)
        decode = workspaces.logits_plan(rows, cols, budget)
    return Buffers(
        topk_buffer_bytes=workspaces.topk_buffer_bytes(o.chunk_tokens, shape.index_topk),
        table_row_per_page_bytes=workspaces.page_table_bytes(
            needed, page_tokens=page_tokens, requests=o.requests, groups=o.groups
        ),
        table_row_per_token_bytes=workspaces.page_table_bytes(needed, requests=o.requests, groups=o.groups),
        prefill_scores_bytes=workspaces.logits_bytes(o.chunk_tokens, cols),
        decode_scores_bytes=workspaces.logits_bytes(rows, cols),
        decode_rows=rows,
        prefill=prefill,
        decode=decode,
    )


def _index(setup: Setup, fmt: PageFormat, o: PlanOptions, facts: tuple[int, int]) -> IndexTraffic:
    """`facts`: tokens of the longest context, and heads of the indexer."""
    longest, heads = facts

    def index_bytes(tokens: int) -> int:
        return tokens * ledger.index_page_bytes(setup.shape) // fmt.page_tokens

    return IndexTraffic(
        written_per_chunk_bytes=index_bytes(min(o.chunk_tokens, longest)),
        read_per_step_bytes=index_bytes(longest),
        read_over_prefill_bytes=index_bytes(traffic.index_reads(longest, o.chunk_tokens, 1)),
        written_per_step_bytes=index_bytes(1 + o.draft_tokens),
        seconds=traffic.link_seconds(index_bytes(longest), o.gbps),
        score_flops_per_pair=traffic.score_flops(heads, setup.shape.index_head_dim) * len(setup.shape.full_layers),
    )
