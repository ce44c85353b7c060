"""Runs the cases of a sweep, in turns with what they are compared with.

Guarantees: a case's repetitions take turns with those of the cases that share its nodes, and each turn begins with the
raw reading that it is a share of; a pull whose bytes were refused ends its row and makes it wrong, not the sweep.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from pdkv.cli.bench.cases import Case, by_setup
from pdkv.cli.bench.pair import Nodes, Pair
from pdkv.cli.bench.pulls import Pulled
from pdkv.cli.bench.rows import Row
from pdkv.cli.bench.workers import SinkProcess
from pdkv.cli.bench.yardsticks import Absent, Kind, Pages, Yardsticks, YardstickSettings, pieces
from pdkv.errors import DigestMismatch, RemoteError
from pdkv.geometry.page_layout import PlacementKind
from pdkv.ids import Int32Array
from pdkv.rpc.bench import GrpcBench

RAW_BYTES = 2 << 30
"""Most of a raw pool."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What all cases have in common."""

    nodes: Nodes
    repetitions: int
    baselines: tuple[Kind, ...] = ()
    """Beside the ceiling."""
    ceiling: bool = True
    raw_source: str = ""
    """HOST:PORT of a raw source on the sources' host; empty: it is started here."""
    link_gbit_per_s: float = 0.0


@dataclass
class Sweep:
    """One run; `rows` fill up meanwhile. As many sources and sinks as any case needs."""

    settings: SweepSettings
    sources: dict[str, GrpcBench]
    """By address."""
    sinks: Sequence[SinkProcess]
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Baseline to why this machine hasn't got it."""

    async def run(self, cases: Sequence[Case]) -> None:
        """Raises what building, connecting and pulling raise, but for bytes that were refused."""
        with ExitStack() as held:
            raw = None
            if self.settings.ceiling or self.settings.baselines:
                raw = self._raw("page_major", "page_major", self._raw_pages(cases))
                await asyncio.to_thread(held.enter_context, raw)
            for setup, those in by_setup(list(cases)):
                pair = Pair(self.settings.nodes, setup, self.sources, self.sinks)
                self.say(f"filling pools: {those[0]}")
                await pair.build(those)
                same = await self._of_these_placements(pair, those, raw, held)
                await self._in_turns(pair, those, raw, same)
                shares = await pair.huge_shares()
                for row in self.rows[-len(those) :]:
                    row.source_huge, row.sink_huge = shares
                await pair.close()

    async def _in_turns(
        self, pair: Pair, cases: Sequence[Case], raw: Yardsticks | None, same: Yardsticks | None
    ) -> None:
        """`same` moves the same pieces of pages as the pair."""
        settings, fmt = self.settings, self.settings.nodes.fmt
        rows = [Row(case, fmt.main_bytes, fmt.index_bytes, link_gbit_per_s=settings.link_gbit_per_s) for case in cases]
        self.rows += rows
        largest = max(cases, key=lambda case: case.pages)
        if not pair.setup.cold:
            await pair.repeat(largest)  # what is done once: UCX's caches, code that is loaded late
        readings: dict[tuple[str, Kind], list[float]] = defaultdict(list)
        for turn in range(settings.repetitions):
            ceiling = await self._ceiling(raw, largest)
            for row in rows:
                if row.failure:
                    continue
                self.say(f"{turn + 1} of {settings.repetitions}: {row.case}")
                try:
                    sample = await pair.repeat(row.case)
                except RemoteError as error:
                    if error.fields.get("kind") != DigestMismatch.__name__:
                        raise
                    row.failure = str(error)
                    continue
                row.samples.append(replace(sample, ceiling_gb_per_s=ceiling))
                row.lane = pair.lane
                for kind, rate in (await self._others(same, sample.pulled[0])).items():
                    readings[str(row.case), kind].append(rate)
                    row.baselines[kind.value] = statistics.median(readings[str(row.case), kind])

    # --- what it is compared with -------------------------------------------------------------------------------------

    def _raw(self, source: PlacementKind, sink: PlacementKind, pages: int) -> Yardsticks:
        settings = self.settings
        moved = pieces(settings.nodes.fmt, pages, sink, source)
        return Yardsticks(
            YardstickSettings(moved, pages, ucx_tls=settings.nodes.ucx_tls, source_at=settings.raw_source)
        )

    def _raw_pages(self, cases: Sequence[Case]) -> int:
        """Of a raw pool: all that a pull may name, or so many that more would tell nothing new."""
        most = max(RAW_BYTES // self.settings.nodes.fmt.page_bytes, 1)
        return min(most, max(max(case.source_pages, case.sink_pages) for case in cases))

    async def _of_these_placements(
        self, pair: Pair, cases: Sequence[Case], raw: Yardsticks | None, held: ExitStack
    ) -> Yardsticks | None:
        """On another host there is only the raw source that was started there."""
        if raw is None or not self.settings.baselines:
            return None
        setup = pair.setup
        if setup.source == setup.sink == "page_major":
            return raw
        if self.settings.raw_source:
            return None
        same = self._raw(setup.source, setup.sink, self._raw_pages(cases))
        await asyncio.to_thread(held.enter_context, same)
        return same

    async def _ceiling(self, raw: Yardsticks | None, largest: Case) -> float | None:
        """GB/s of one descriptor as long as the longest pull, or a whole raw pool."""
        if raw is None or not self.settings.ceiling:
            return None
        every = range(min(largest.pages, raw.settings.num_pages))
        reading = await asyncio.to_thread(raw.measure, Kind.NIXL_LARGEST, Pages.of(every, every))
        if isinstance(reading, Absent):
            self.absent[reading.kind] = reading.reason
            return None
        return reading.gb_per_s

    async def _others(self, raw: Yardsticks | None, pulled: Pulled) -> dict[Kind, float]:
        """GB/s of the same pages by other means; of as many of them as raw pools hold."""
        found: dict[Kind, float] = {}
        if raw is None:
            return found
        ids = Pages.of(*(_within(column, raw.settings.num_pages) for column in (pulled.local, pulled.remote)))
        for kind in self.settings.baselines:
            if kind in self.absent:
                continue
            reading = await asyncio.to_thread(raw.measure, kind, ids)
            if isinstance(reading, Absent):
                self.absent[kind] = reading.reason
            else:
                found[kind] = reading.gb_per_s
        return found


def _within(ids: Int32Array, pages: int) -> Int32Array:
    """Page ids in the same order, all below `pages`: of the first ones, as many as that, by rank if they are higher."""
    some = ids[:pages]
    if int(some.max()) < pages:
        return some
    ranks: Int32Array = np.argsort(np.argsort(some)).astype(np.int32)
    return ranks
