"""Runs the cases of a sweep: builds what each needs, takes turns with what it is compared with, checks the bytes.

Guarantees: a case's repetitions take turns with those of the cases that share its nodes, and each turn begins with the
raw reading that it is a share of; after each repetition, and outside of its time, digests of the pulled pages are
computed on both sides and compared, whether or not the nodes had done so; nothing runs while a pull is timed but that
pull.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from pdkv.cli.bench.cases import Case, Mode, Setup, by_setup
from pdkv.cli.bench.rows import Row, Sample
from pdkv.cli.bench.sink import Opened, Pulled, SinkNode, Wish
from pdkv.cli.bench.workers import SinkProcess
from pdkv.cli.bench.yardsticks import Absent, Kind, Pages, Yardsticks, YardstickSettings, pieces
from pdkv.errors import DigestMismatch, RemoteError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, page_format
from pdkv.rpc.bench import BenchPrompt, GrpcBench, Preparation, SourceNode
from pdkv.transfer.descriptors import Piece

SEED = 1
"""Of the first source's prompt; the others' follow."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What all cases have in common."""

    model: str
    repetitions: int
    baselines: tuple[Kind, ...] = ()
    """Beside the ceiling."""
    ceiling: bool = True
    raw_source: str = ""
    """HOST:PORT of a raw source on the sources' host; empty: it is started here."""
    ucx_tls: str = ""
    net_devices: str = ""
    link_gbit_per_s: float = 0.0
    sink_id: str = "sink"
    damaged_pages: int = 0
    """Of each pull, changed after it arrived: to show that it is found."""


@dataclass(frozen=True, slots=True)
class Side:
    """The sources, by address, and as many sinks as any case needs."""

    sources: dict[str, GrpcBench]
    sinks: Sequence[SinkProcess]


@dataclass
class Sweep:
    """One run; `rows` fill up meanwhile."""

    settings: SweepSettings
    side: Side
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Baseline to why this machine hasn't got it."""

    async def run(self, cases: Sequence[Case]) -> None:
        """Raises what building, connecting and pulling raise, but for bytes that were refused: these end a row."""
        fmt = page_format(model_shape(load_config(self.settings.model)))
        pages = max(max(case.source_pages, case.sink_pages) for case in cases)
        with ExitStack() as held:
            raw = None
            if self.settings.ceiling or self.settings.baselines:
                raw = Yardsticks(self.raw_settings(pieces(fmt, pages), pages))
                await asyncio.to_thread(held.enter_context, raw)
            for setup, those in by_setup(list(cases)):
                await _Round(self, setup, those, fmt, raw).run()

    def raw_settings(self, moved: tuple[Piece, ...], pages: int) -> YardstickSettings:
        return YardstickSettings(moved, pages, ucx_tls=self.settings.ucx_tls, source_at=self.settings.raw_source)


class _Round:
    """The cases of one setup."""

    def __init__(
        self, sweep: Sweep, setup: Setup, cases: Sequence[Case], fmt: PageFormat, raw: Yardsticks | None
    ) -> None:
        self._sweep = sweep
        self._settings = sweep.settings
        self._setup = setup
        self._fmt = fmt
        self._raw = raw
        self._addresses = tuple(sweep.side.sources)[: setup.sources]
        self._benches = [sweep.side.sources[address] for address in self._addresses]
        self._sinks = sweep.side.sinks[: setup.sinks]
        self._rows = [
            Row(case, fmt.main_bytes, fmt.index_bytes, "", link_gbit_per_s=sweep.settings.link_gbit_per_s)
            for case in cases
        ]
        self._readings: dict[tuple[str, Kind], list[float]] = defaultdict(list)
        self._prepared: dict[GrpcBench, Preparation] = {}

    async def run(self) -> None:
        sweep, setup = self._sweep, self._setup
        largest = max((row.case for row in self._rows), key=lambda case: case.sink_pages)
        sweep.say(f"filling {setup.source} pools of {largest.source_pages:,} pages")
        node = SourceNode(
            self._settings.model,
            max(row.case.source_pages for row in self._rows),
            setup.source,
            setup.chunk_pages * self._fmt.page_tokens,
        )
        await asyncio.gather(*(bench.build(node) for bench in self._benches))
        if not setup.cold:
            await self._opened(touched=True)
        sweep.rows += self._rows
        if not setup.cold:
            await self._repeat(largest)  # what is done once: caches of UCX, code that is loaded late
        with ExitStack() as held:
            same_pages = await self._of_these_placements(held)
            for turn in range(self._settings.repetitions):
                ceiling = await self._ceiling(largest)
                for row in self._rows:
                    if not row.failure:
                        sweep.say(f"{turn + 1} of {self._settings.repetitions}: {row.case}")
                        await self._measured(row, same_pages, ceiling)
        for sink in self._sinks:
            await sink.close()

    async def _measured(self, row: Row, raw: Yardsticks | None, ceiling: float | None) -> None:
        try:
            sample = await self._repeat(row.case)
        except RemoteError as error:
            if error.fields.get("kind") != DigestMismatch.__name__:
                raise
            row.failure = str(error)
            return
        row.samples.append(replace(sample, ceiling_gb_per_s=ceiling))
        row.lane = "+".join(sorted({lane for opened in self._last_opened for lane in opened.lanes}))
        await self._compared(row, raw, sample.pulled[0])

    # --- one repetition -----------------------------------------------------------------------------------------------

    async def _repeat(self, case: Case) -> Sample:
        prompts = [(address, BenchPrompt(SEED + i, case.pages)) for i, address in enumerate(self._addresses)]
        for bench, (_, prompt) in zip(self._benches, prompts, strict=True):
            await self._prepare(bench, prompt, case)
        cold = case.mode is Mode.COLD
        connect_s = await self._opened(touched=False) if cold else []
        wish = Wish(
            tuple(prompts),
            case.hit_pages,
            case.scattered,
            case.digests,
            zeroed=not cold,
            damaged_pages=self._settings.damaged_pages,
        )
        await asyncio.gather(*(sink.ready(wish) for sink in self._sinks))
        before_s = [(await bench.usage()).cpu_s for bench in self._benches]
        pulled = await asyncio.gather(*(sink.pull(wish) for sink in self._sinks))
        used_s = [(await bench.usage()).cpu_s - b for bench, b in zip(self._benches, before_s, strict=True)]
        wrong = await self._wrong([prompt for _, prompt in prompts])
        return Sample(pulled, sum(used_s), None, wrong, connect_s)

    async def _prepare(self, bench: GrpcBench, prompt: BenchPrompt, case: Case) -> None:
        """A prompt that is cached is found again by the next pull: only what changes is made anew."""
        wanted = Preparation(prompt, case.mode is not Mode.STREAMING, case.scattered, case.digests)
        # how pages were digested when they were sealed matters to a source only while it seals
        key = replace(wanted, digests=True) if wanted.cached else wanted
        if not wanted.cached or self._prepared.get(bench) != key:
            await bench.prepare(replace(wanted, digests=True) if wanted.cached else wanted)
            self._prepared[bench] = key

    async def _opened(self, *, touched: bool) -> list[float]:
        """New sinks; seconds that each connection took."""
        setup, settings = self._setup, self._settings
        node = SinkNode(
            settings.model,
            max(row.case.sink_pages for row in self._rows),
            setup.sink,
            setup.read_pages,
            touched,
            ucx_tls=settings.ucx_tls,
            net_devices=settings.net_devices,
        )
        names = [settings.sink_id] if setup.sinks == 1 else [f"{settings.sink_id}-{i}" for i in range(setup.sinks)]
        nodes = [replace(node, node_id=name) for name in names]
        self._last_opened: list[Opened] = await asyncio.gather(
            *(sink.open(node, self._addresses) for sink, node in zip(self._sinks, nodes, strict=True))
        )
        return [seconds for opened in self._last_opened for seconds in opened.connect_s]

    async def _wrong(self, prompts: Sequence[BenchPrompt]) -> int:
        """Caches of pages that differ between a source and a sink."""
        wrong = 0
        for bench, prompt in zip(self._benches, prompts, strict=True):
            due, *have = await asyncio.gather(bench.digests(prompt), *(sink.digests(prompt) for sink in self._sinks))
            wrong += sum(int((found != due).sum()) for found in have)
        return wrong

    # --- what it is compared with -------------------------------------------------------------------------------------

    async def _of_these_placements(self, held: ExitStack) -> Yardsticks | None:
        """What moves the same pieces of pages; on another host there is only the one that was started there."""
        raw, setup = self._raw, self._setup
        if raw is None or not self._settings.baselines:
            return None
        moved = pieces(self._fmt, raw.settings.num_pages, setup.sink, setup.source)
        if moved == raw.settings.pieces or self._settings.raw_source:
            return raw if moved == raw.settings.pieces else None
        pages = max(max(row.case.source_pages, row.case.sink_pages) for row in self._rows)
        moved = pieces(self._fmt, pages, setup.sink, setup.source)
        same = Yardsticks(self._sweep.raw_settings(moved, pages))
        await asyncio.to_thread(held.enter_context, same)
        return same

    async def _ceiling(self, largest: Case) -> float | None:
        """GB/s of one descriptor as long as the longest pull."""
        if self._raw is None or not self._settings.ceiling:
            return None
        every = range(largest.pages)
        reading = await asyncio.to_thread(self._raw.measure, Kind.NIXL_LARGEST, Pages.of(every, every))
        if isinstance(reading, Absent):
            self._sweep.absent[reading.kind] = reading.reason
            return None
        return reading.gb_per_s

    async def _compared(self, row: Row, raw: Yardsticks | None, pulled: Pulled) -> None:
        """The same pages, by other means."""
        if raw is None:
            return
        ids = Pages.of(pulled.local, pulled.remote)
        for kind in self._settings.baselines:
            if kind in self._sweep.absent:
                continue
            reading = await asyncio.to_thread(raw.measure, kind, ids)
            if isinstance(reading, Absent):
                self._sweep.absent[kind] = reading.reason
                continue
            rates = self._readings[str(row.case), kind]
            rates.append(reading.gb_per_s)
            row.baselines[kind.value] = statistics.median(rates)
