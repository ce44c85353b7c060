"""Decode context parallelism: which bytes of which rank of one group are which bytes of which rank of another.

Guarantees: pure; a plan moves every row that a target rank must hold, from one source rank that holds it, to its place,
once, and nothing else (a test simulates it byte by byte); groups may differ in TP size, DCP size and interleave.

Within a group of `tp` ranks every `dcp` consecutive ones share the main rows of a context; the tp / dcp blocks of them
are replicas. Token t's main row is on the ranks whose shard is `t // interleave % dcp`. So it is in SGLang (interleave
1: "rank r owns position p when p mod dcp = r", docs/advanced_features/dcp) and in vLLM (`cp_kv_cache_interleave_size`,
1 by default; its NIXL connector wants the block size, which keeps whole pages together: pull requests 26696, 50611).
Index-K, its pending keys and draft main rows are replicated: every rank has those of all tokens.

A rank's page therefore covers `dcp` pages of context, consecutive ones: page_tokens main rows a layer, and dcp index
pages, one after the other, each with its keys and then its scales. Pages of context (their hashes, and the contract)
are the same whatever the sharding. The slot number is the main pool's: with `size` slots and the sink page there are
(size + page) * dcp index slots, the sink's included, so (size + page) * dcp - page beside an index sink page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group, PageFormat, Segment

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the ranks of one group share the main rows. Raises `ConfigError` unless dcp divides tp."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    """Consecutive tokens that one shard takes before the next does."""

    def __post_init__(self) -> None:
        for field, value in (("tp", self.tp), ("dcp", self.dcp), ("interleave", self.interleave)):
            if value < 1:
                raise ConfigError(field, value, "an integer of at least 1")
        if self.tp % self.dcp:
            raise ConfigError("dcp", self.dcp, f"a divisor of tp, {self.tp}: it shards rows over TP ranks")

    def shard(self, rank: int) -> int:
        """Which of the dcp shares a rank holds."""
        return rank % self.dcp

    def owner(self, tokens: Int64Array) -> Int64Array:
        """int64 [n]: the shard that has each token's main row."""
        return tokens // self.interleave % self.dcp

    def slot(self, tokens: Int64Array) -> Int64Array:
        """int64 [n]: each token's place among the rows of its shard, counted from the context's first token."""
        return tokens // (self.interleave * self.dcp) * self.interleave + tokens % self.interleave

    def pages(self, tokens: int, page_tokens: int) -> int:
        """Pages that a context of `tokens` takes on each rank."""
        return -(-tokens // (page_tokens * self.dcp))


@dataclass(frozen=True, slots=True)
class Move:
    """`count` runs of `length` bytes of one segment. Run i is at `offset + i * stride` of the segment's bytes in a
    page, on either side. Pages are those of one span, counted from its first."""

    segment: str
    source_page: int
    source_offset: int
    source_stride: int
    target_page: int
    target_offset: int
    target_stride: int
    length: int
    count: int


@dataclass(frozen=True)
class ShardPlan:
    """Moves of one span of a context; the next span is the same, `source_pages` and `target_pages` further on.

    Of a context that ends within a span, moves from or to pages that it doesn't have fall away: what a target page
    then doesn't get holds no token, and is zero.
    """

    span_pages: int
    """Pages of context in a span."""
    source_pages: int
    """Pages of each source rank in a span."""
    target_pages: int
    moves: dict[tuple[int, int], tuple[Move, ...]]
    """By (source rank, target rank); a pair that has nothing to do with each other is not there."""


def replicated(segment: Segment) -> bool:
    """Whether every rank holds it for all tokens: index-K, pending keys, and all of a draft layer."""
    return segment.group is Group.INDEX or segment.name.startswith("draft_")


def rank_segments(fmt: PageFormat, sharding: Sharding) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the segments of a rank's page, in order; `fmt` is the page of context."""
    return tuple((s.name, s.length * (sharding.dcp if replicated(s) else 1)) for s in fmt.segments)


def require_plannable(page_tokens: int, sharding: Sharding) -> None:
    """Raises `ConfigError` if a shard's run of tokens could cross a page's end."""
    if page_tokens % sharding.interleave:
        raise ConfigError("interleave", sharding.interleave, f"a divisor of the page's {page_tokens} tokens")


@lru_cache(64)
def plan_shards(fmt: PageFormat, source: Sharding, target: Sharding) -> ShardPlan:
    """How all ranks of `target` get their pages from the ranks of `source`; `fmt` is the page of context.

    Of source ranks that hold the same, those in the place of the target rank are taken, so that targets spread over
    them. Raises `ConfigError` as `require_plannable`.
    """
    require_plannable(fmt.page_tokens, source)
    require_plannable(fmt.page_tokens, target)
    span = lcm(source.dcp, target.dcp)
    tokens = np.arange(span * fmt.page_tokens)
    row_of = {s.name: fmt.main_row.row_bytes for s in fmt.segments if not replicated(s)}
    whole = {s.name: s.length for s in fmt.segments if replicated(s)}
    pages = np.arange(span)
    copies = tuple(_runs(pages, pages, (source.dcp, target.dcp)))
    moves: dict[tuple[int, int], list[Move]] = {}
    for rank in range(target.tp):
        mine = target.owner(tokens) == target.shard(rank)
        for shard in range(source.dcp):
            wanted = tokens[mine & (source.owner(tokens) == shard)]
            runs = tuple(_runs(source.slot(wanted), target.slot(wanted), (fmt.page_tokens, fmt.page_tokens)))
            if runs:
                moves.setdefault((_holder(source, shard, rank), rank), []).extend(_moves(runs, row_of))
        moves.setdefault((rank % source.tp, rank), []).extend(_moves(copies, whole))
    made = {pair: tuple(found) for pair, found in moves.items()}
    return ShardPlan(span, span // source.dcp, span // target.dcp, made)


def _holder(source: Sharding, shard: int, target_rank: int) -> int:
    replicas = source.tp // source.dcp
    return shard + source.dcp * (target_rank // source.dcp % replicas)


@dataclass(slots=True)
class _Run:
    """In rows: `count` runs of `length` rows, in one page on either side."""

    source: tuple[int, int]
    target: tuple[int, int]
    length: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    def take(self, other: _Run) -> bool:
        """Make `other` the next of these runs, if it is one."""
        if (self.source[0], self.target[0], self.length) != (other.source[0], other.target[0], other.length):
            return False
        strides = other.source[1] - self.source[1], other.target[1] - self.target[1]
        if self.count == 1:
            self.source_stride, self.target_stride = strides
        elif strides != (self.source_stride * self.count, self.target_stride * self.count):
            return False
        self.count += 1
        return True


def _runs(source: Int64Array, target: Int64Array, page_rows: tuple[int, int]) -> Iterator[_Run]:
    """Row `source[i]` goes to row `target[i]`; rows rise on both sides, and stand `page_rows` to a page."""
    if not source.size:
        return
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    breaks |= (source[1:] % page_rows[0] == 0) | (target[1:] % page_rows[1] == 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, source.size))
    open_run: _Run | None = None
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        run = _Run(divmod(int(source[start]), page_rows[0]), divmod(int(target[start]), page_rows[1]), length)
        if open_run is not None and open_run.take(run):
            continue
        if open_run is not None:
            yield open_run
        open_run = run
    if open_run is not None:
        yield open_run


def _moves(runs: tuple[_Run, ...], row_bytes: dict[str, int]) -> Iterator[Move]:
    for name, size in row_bytes.items():
        for run in runs:
            yield Move(
                segment=name,
                source_page=run.source[0],
                source_offset=run.source[1] * size,
                source_stride=run.source_stride * size,
                target_page=run.target[0],
                target_offset=run.target[1] * size,
                target_stride=run.target_stride * size,
                length=run.length * size,
                count=run.count,
            )
