"""GPUs, how a model is laid over them, and what a rank has left for pages.

Guarantees: the budget is of the tightest rank, since a page takes the same number on every stage and every rank of a
group; a pipeline stage starts at a layer with an indexer of its own, because a selection doesn't travel between stages.
Integers only; a weight or workspace that doesn't fit shows as 0 bytes for pages, never as a negative number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import GroupBytes, require_not_negative, require_positive, slot_page_bytes, usable_pages
from pdkv.geometry.model_config import ModelShape, WeightShape
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS
from pdkv.geometry.weights import Part, Ranks, stage_matrices, weight_bytes
from pdkv.geometry.workspaces import page_table_bytes, topk_buffer_bytes

MIB = 1 << 20
WAYS = ("tp", "dp", "ep", "dcp", "pp")
"""Fields of a `Layout` beside its number of cards, in the order in which they are said."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card: its memory as nvidia-smi counts it, and the peak rate of that memory."""

    name: str
    memory_bytes: int
    bytes_per_s: int


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # Memory: "MiB" of nvidia-smi on such cards (H100: also modal-labs/modal-client pull request 2797). The card's
        # nominal GB is more: 141 GB of an H200 are 143,771 MiB = 150.75 * 10^9 bytes, of which 0.9 GB are the driver's.
        # Rates: NVIDIA's data sheets; B200: 7,680 bits x 3,996 MHz x 2, pytorch/ao pull request 4002.
        Gpu("h100", 81_559 * MIB, 3_350 * 10**9),
        Gpu("h20", 97_871 * MIB, 4_000 * 10**9),
        Gpu("h200", 143_771 * MIB, 4_800 * 10**9),
        Gpu("b200", 183_359 * MIB, 7_672 * 10**9),
        Gpu("gb200", 189_471 * MIB, 8_000 * 10**9),
        Gpu("b300", 275_040 * MIB, 7_750 * 10**9),
    )
}


def find_gpu(name: str) -> Gpu:
    """Raises `ConfigError` for a card that isn't in `GPUS`."""
    if name.lower() not in GPUS:
        raise ConfigError("gpu", name, f"{', '.join(GPUS)}, or its memory such as 141GiB")
    return GPUS[name.lower()]


@dataclass(frozen=True, slots=True)
class Layout:
    """gpus = tp * dp * pp. Raises `ConfigError` naming the field for a layout that can't be."""

    gpus: int = 1
    tp: int = 1
    """Ranks that share one attention, and one pool's page numbers."""
    dp: int = 1
    """Attentions beside each other, each with requests and a pool of its own."""
    ep: int = 1
    """Ranks over which whole experts are spread; tp * dp / ep ranks share an expert."""
    dcp: int = 1
    """Of the tp ranks, how many hold different main rows of a context. The others hold copies."""
    pp: int = 1

    def __post_init__(self) -> None:
        require_positive(gpus=self.gpus, tp=self.tp, dp=self.dp, ep=self.ep, dcp=self.dcp, pp=self.pp)
        if self.tp * self.dp * self.pp != self.gpus:
            raise ConfigError("gpus", self.gpus, f"tp x dp x pp = {self.tp} x {self.dp} x {self.pp}")
        if self.tp % self.dcp:
            raise ConfigError("dcp", self.dcp, f"a divisor of tp, {self.tp}")
        if self.tp * self.dp % self.ep:
            raise ConfigError("ep", self.ep, f"a divisor of tp x dp, {self.tp * self.dp}")

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.tp, self.ep, self.tp * self.dp // self.ep)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a rank has and what stands beside its pages."""

    gpu: Gpu
    weights: WeightShape
    weight_dtype: str = "fp8"
    mem_fraction_static: float = 0.9
    """Share of the card for weights, pages and fixed buffers; the rest is for activations and index scores."""
    reserve_bytes: int = 0
    """Static memory for anything else: copies that the engine makes of weights, for example."""
    batched_tokens: int = 32_768
    """Tokens of the largest step: sizes the top-k buffer."""
    requests: int = 32
    """Requests that have a page table."""
    longest_tokens: int = 1_048_576
    """Tokens that a page table can hold."""
    table_groups: int = 1
    """Page tables a request."""
    rollback_tokens: int = 0
    """Drafts that a step can take back: a pooled index keeps their keys."""

    @property
    def static_bytes(self) -> int:
        return int(Fraction(str(self.mem_fraction_static)) * self.gpu.memory_bytes)


@dataclass(frozen=True, slots=True)
class RankPool:
    """Pages of a rank. `page` are a page's bytes there; it serves `page_tokens` tokens of context."""

    page: GroupBytes
    page_tokens: int
    available_bytes: int
    usable_pages: int
    budget: RankBudget | None
    """None where the pool's memory was given as such."""

    @property
    def tokens(self) -> int:
        return self.usable_pages * self.page_tokens


@dataclass(frozen=True, slots=True)
class RankBudget:
    """The memory of the tightest rank; what the three leave of `static_bytes` is for pages."""

    layers: range
    """Of its pipeline stage."""
    total_bytes: int
    static_bytes: int
    weights: dict[Part, int]
    topk_buffer_bytes: int
    page_table_bytes: int
    reserve_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def left_bytes(self) -> int:
        """For pages; below 0 by how much the rest alone is too large."""
        fixed = self.topk_buffer_bytes + self.page_table_bytes + self.reserve_bytes
        return self.static_bytes - self.weight_bytes - fixed


def stages(shape: ModelShape, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage: even, but for moving each border to the nearest full layer.

    Raises `ConfigError` if that leaves a stage without a layer.
    """
    require_positive(pp=pp)
    full = shape.full_layers
    borders = [min(full, key=lambda layer: (abs(layer - i * shape.num_layers / pp), layer)) for i in range(pp)]
    borders.append(shape.num_layers)
    if any(start >= stop for start, stop in pairwise(borders)):
        raise ConfigError("pp", pp, f"stages that each start at a full layer; there are {len(full)}")
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def stage_shape(shape: ModelShape, stage: range) -> ModelShape:
    """The caches of one stage as a model of its own; draft layers are the last stage's."""
    last = stage.stop == shape.num_layers
    return replace(
        shape,
        num_layers=len(stage),
        indexer_types=shape.indexer_types[stage.start : stage.stop],
        draft_layers=shape.draft_layers if last else 0,
    )


def given_pool(
    shape: ModelShape, main_row: str, dcp: int, available_bytes: int, *, rollback_tokens: int = 0
) -> RankPool:
    """Pool of a rank with `available_bytes` for pages and the write sink, all layers on it."""
    page = slot_page_bytes(shape, main_row=main_row, dcp=dcp, rollback_tokens=rollback_tokens)
    tokens = INDEX_PAGE_ROWS * shape.index_kpool * dcp
    return RankPool(page, tokens, available_bytes, usable_pages(available_bytes, page.total), None)


def rank_pool(shape: ModelShape, main_row: str, layout: Layout, memory: GpuMemory) -> RankPool:
    """Pool of the tightest rank. Raises `ConfigError` naming the field."""
    require_not_negative(reserve_bytes=memory.reserve_bytes)
    if memory.weights.heads % layout.tp:
        raise ConfigError("tp", layout.tp, f"a divisor of the {memory.weights.heads} attention heads")
    if not 0 < memory.mem_fraction_static <= 1:
        raise ConfigError("mem_fraction_static", memory.mem_fraction_static, "above 0, at most 1")
    made = [_stage_pool(shape, main_row, layout, memory, layers) for layers in stages(shape, layout.pp)]
    return min(made, key=lambda pool: (pool.usable_pages, pool.budget.left_bytes if pool.budget else 0))


def _stage_pool(shape: ModelShape, main_row: str, layout: Layout, memory: GpuMemory, layers: range) -> RankPool:
    page_tokens = INDEX_PAGE_ROWS * shape.index_kpool * layout.dcp
    budget = RankBudget(
        layers=layers,
        total_bytes=memory.gpu.memory_bytes,
        static_bytes=memory.static_bytes,
        weights=dict(_stage_weights(shape, memory.weights, layers, memory.weight_dtype, layout.ranks)),
        topk_buffer_bytes=topk_buffer_bytes(memory.batched_tokens, shape.index_topk),
        page_table_bytes=page_table_bytes(
            memory.longest_tokens, page_tokens=page_tokens, requests=memory.requests, groups=memory.table_groups
        ),
        reserve_bytes=memory.reserve_bytes,
    )
    pool = given_pool(
        stage_shape(shape, layers),
        main_row,
        layout.dcp,
        max(budget.left_bytes, 0),
        rollback_tokens=memory.rollback_tokens,
    )
    return replace(pool, budget=budget)


@lru_cache(maxsize=64)
def _stage_weights(
    shape: ModelShape, weights: WeightShape, layers: range, dtype: str, ranks: Ranks
) -> tuple[tuple[Part, int], ...]:
    """Kept, because a table of variants asks again and again for what only few of them change."""
    return tuple(weight_bytes(stage_matrices(shape, weights, layers), dtype, ranks).items())
