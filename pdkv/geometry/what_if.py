"""The same deployment with one thing changed: bytes a token, tokens of the pool, and what would make a request fit.

Guarantees: a variant goes through the very functions that the plan itself goes through, so the two can't disagree; a
variant that a layout or model can't have is left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import GroupBytes, PoolFit, pool_fit, request_pages, token_bytes
from pdkv.geometry.fleet import GPUS, WAYS, GpuMemory, Layout, RankPool, given_pool, rank_pool
from pdkv.geometry.model_config import FULL, SHARED, ModelShape
from pdkv.geometry.row_format import MAIN_ROWS
from pdkv.geometry.weights import WEIGHT_DTYPES

KPOOLS = (2, 4, 16)
DCPS = (2, 4, 8)
GROWTH = (2, 4, 8, 16, 32, 64, 128, 256)
"""Times as many cards as a deployment has: the smallest one at which a request fits is named."""
MOST_LAYOUTS = 3
"""That are named."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a plan is about. `memory`: of the pool in bytes, a GPU's, or None if only bytes a token are asked for."""

    shape: ModelShape
    main_row: str = "fp8_ds_mla"
    layout: Layout = field(default_factory=Layout)
    memory: GpuMemory | int | None = None
    rollback_tokens: int = 0
    """Of a pool whose memory is given; a GPU's has its own."""

    @property
    def slot_bytes(self) -> GroupBytes:
        """Of a local slot, which serves dcp tokens of context; all layers, whatever stage they are on."""
        return token_bytes(self.shape, main_row=self.main_row, dcp=self.layout.dcp)

    def pool(self) -> RankPool | None:
        """Of a rank; None without memory. Raises `ConfigError` naming the field."""
        if self.memory is None:
            return None
        if isinstance(self.memory, int):
            return given_pool(
                self.shape, self.main_row, self.layout.dcp, self.memory, rollback_tokens=self.rollback_tokens
            )
        return rank_pool(self.shape, self.main_row, self.layout, self.memory)


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    bytes_per_slot: GroupBytes
    """Of a local slot."""
    dcp: int
    """Tokens of context that a slot serves."""
    pool_tokens: int | None
    """Of one rank's pool; None without memory."""
    ratio: float
    """Tokens in the same memory against the plan; without memory, what the bytes a token of context say."""


def variants(setup: Setup) -> tuple[Variant, ...]:
    """The plan itself, and then what each change of model, format or layout would do to it. Raises `ConfigError` if
    the plan itself can't be."""
    made = [_measured("as planned", setup, setup)]
    for name, changed in _changes(setup):
        with suppress(ConfigError):
            made.append(_measured(name, changed, setup))
    return tuple(made)


def fit_of(setup: Setup, request_tokens: int) -> PoolFit | None:
    """Whether a request of so many tokens (prompt, output, drafts) fits into a pool of its own. None without memory."""
    pool = setup.pool()
    if pool is None:
        return None
    needed = request_pages(request_tokens, page_tokens=pool.page_tokens)
    fit = pool_fit(pool.available_bytes, pool.page.total, needed)
    if pool.budget and pool.budget.left_bytes < 0:
        fit = replace(fit, missing_bytes=fit.missing_bytes - pool.budget.left_bytes)
    return fit


def what_fits(setup: Setup, request_tokens: int) -> tuple[str, ...]:
    """Changes after which the request fits, cheapest first; empty if it fits as it is, or if none of them helps.

    Looks at what an operator can set: DCP, row format, drafting, the static share, weights, cards. Not at the model.
    Each is one change, but for more cards: there it is the layout of the fewest with which the request fits, with as
    much DCP as that takes.
    """
    if _fits(setup, request_tokens):
        return ()
    helping = []
    for name, made in _remedies(setup):
        with suppress(ConfigError):
            helping += [name] if _fits(made, request_tokens) else []
    larger = [_layout_words(setup.layout, layout) for layout in _larger(setup, request_tokens)]
    return (*helping, *larger, *_larger_cards(setup, request_tokens))


def _fits(setup: Setup, request_tokens: int) -> bool:
    fit = fit_of(setup, request_tokens)
    return fit is None or fit.fits


def _measured(name: str, setup: Setup, base: Setup) -> Variant:
    pool, base_pool = setup.pool(), base.pool()
    if pool is not None and base_pool is not None and base_pool.tokens:
        ratio = pool.tokens / base_pool.tokens
    else:
        slot, base_slot = setup.slot_bytes.total, base.slot_bytes.total
        ratio = (base_slot / base.layout.dcp) / (slot / setup.layout.dcp)
    return Variant(name, setup.slot_bytes, setup.layout.dcp, pool.tokens if pool else None, ratio)


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    shape = setup.shape
    for step, words in ((2, "half of the"), (1, "all")):
        types = tuple(FULL if i % step == 0 else SHARED for i in range(shape.num_layers))
        if types.count(FULL) > len(shape.full_layers):
            name = f"{words} layers full ({types.count(FULL)})"
            yield name, replace(setup, shape=replace(shape, indexer_types=types))
    for kpool in KPOOLS:
        if kpool != shape.index_kpool:
            yield f"kpool {kpool}", replace(setup, shape=replace(shape, index_kpool=kpool))
    yield from _dcps(setup)
    draft = shape.draft_layers + 1
    yield f"{draft} MTP layer{'s' * (draft > 1)}", replace(setup, shape=replace(shape, draft_layers=draft))
    if shape.draft_layers:
        yield "no MTP layer", replace(setup, shape=replace(shape, draft_layers=0))
    yield from _rows(setup)


def _dcps(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Where the memory was given as such, the layout beside DCP is nobody's business here."""
    for dcp in DCPS:
        if dcp == setup.layout.dcp:
            continue
        with suppress(ConfigError):
            layout = replace(setup.layout, dcp=dcp) if isinstance(setup.memory, GpuMemory) else dcp_only(dcp)
            yield f"dcp {dcp}", replace(setup, layout=layout)


def dcp_only(dcp: int) -> Layout:
    """The smallest layout with this DCP. Raises `ConfigError` for less than 1."""
    return Layout(gpus=dcp, tp=dcp, dcp=dcp)


def _rows(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for row in MAIN_ROWS.values():
        if row.name != setup.main_row:
            yield f"row {row.row_bytes} ({row.name})", replace(setup, main_row=row.name)


def _remedies(setup: Setup) -> Iterator[tuple[str, Setup]]:
    yield from ((name, made) for name, made in _dcps(setup) if made.layout.dcp > setup.layout.dcp)
    here = MAIN_ROWS[setup.main_row].row_bytes
    yield from ((name, made) for name, made in _rows(setup) if MAIN_ROWS[made.main_row].row_bytes < here)
    if setup.shape.draft_layers:
        yield "no MTP layer", replace(setup, shape=replace(setup.shape, draft_layers=0))
    memory = setup.memory
    if not isinstance(memory, GpuMemory):
        return
    if memory.mem_fraction_static < 0.95:
        yield "mem fraction static 0.95", replace(setup, memory=replace(memory, mem_fraction_static=0.95))
    smallest = WEIGHT_DTYPES[0]
    if memory.weight_dtype != smallest:
        yield f"weights {smallest}", replace(setup, memory=replace(memory, weight_dtype=smallest))


def _larger_cards(setup: Setup, request_tokens: int) -> Iterator[str]:
    """As many cards of another kind."""
    memory = setup.memory
    if not isinstance(memory, GpuMemory):
        return
    for gpu in GPUS.values():
        if gpu.memory_bytes > memory.gpu.memory_bytes:
            with suppress(ConfigError):
                if _fits(replace(setup, memory=replace(memory, gpu=gpu)), request_tokens):
                    yield gpu.name


def _larger(setup: Setup, request_tokens: int) -> tuple[Layout, ...]:
    """Layouts of the fewest cards of this kind that hold the request; each has grown in one way, or if no such one
    holds it in several: then those with the largest tp are named."""
    if not isinstance(setup.memory, GpuMemory):
        return ()
    for factor in GROWTH:
        one_way, several = _grown(setup.layout, factor)
        for ways in (one_way, several):
            if found := [fits for way in ways if (fits := _with_dcp(setup, way, request_tokens)) is not None]:
                return tuple(found[:MOST_LAYOUTS])
    return ()


def _grown(layout: Layout, factor: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(tp, dp, pp) of `factor` times the cards: one of them larger, and two or three of them."""
    powers = [1 << i for i in range(factor.bit_length())]
    ways = [(tp, dp, factor // (tp * dp)) for tp in powers for dp in powers if tp * dp <= factor]
    made = {way: (layout.tp * way[0], layout.dp * way[1], layout.pp * way[2]) for way in reversed(ways)}
    alone = [size for way, size in made.items() if max(way) == factor]
    return alone, [size for way, size in made.items() if max(way) < factor]


def _with_dcp(setup: Setup, size: tuple[int, int, int], request_tokens: int) -> Layout | None:
    """The layout of (tp, dp, pp) with the least DCP that holds the request."""
    old, (tp, dp, pp) = setup.layout, size
    experts = old.ep * (tp * dp) // (old.tp * old.dp)
    for dcp in (old.dcp, *(n for n in DCPS if n > old.dcp)):
        with suppress(ConfigError):
            layout = Layout(gpus=tp * dp * pp, tp=tp, dp=dp, ep=experts, dcp=dcp, pp=pp)
            made = replace(setup, layout=layout)
            if _fits(made, request_tokens):
                return layout
            pool = made.pool()
            if pool is not None and not pool.usable_pages:
                return None  # the weights are the same with any DCP
    return None


def _layout_words(old: Layout, new: Layout) -> str:
    changed = [f"{way} {getattr(new, way)}" for way in WAYS if getattr(new, way) != getattr(old, way)]
    return f"gpus {new.gpus} with {', '.join(changed)}"
