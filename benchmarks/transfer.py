"""How fast pages cross from a prefill to a decode process on one host, and what pdkv costs on top of the wire.

    python benchmarks/transfer.py [--quick] [--json FILE]

A pull is a request to a decode node, from asking its prefill node to the last page in the tree; both are processes of
their own, and everything that serves is in between: gRPC, leases, page-table rows, and digests unless they are switched
off. Yardsticks move the same page ids by other means, in two processes that import nothing of pdkv.

Guarantees: whatever makes a ratio took turns, one repetition each, and the ratio is the median of those of the turns;
after each pull the bytes were compared with the source's; raw NIXL counts as a yardstick only if it reached 0.9 of
`process_vm_readv` in the same turns. Needs Linux, and 13 GB of memory (`--quick`: 2 GB).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.cases import Case, Mode  # noqa: E402
from pdkv.cli.bench.pair import Nodes, Pair  # noqa: E402
from pdkv.cli.bench.pulls import SourceSettings  # noqa: E402
from pdkv.cli.bench.report import Check, Report, as_table  # noqa: E402
from pdkv.cli.bench.rows import Sample  # noqa: E402
from pdkv.cli.bench.workers import SinkProcess, Workers  # noqa: E402
from pdkv.cli.bench.yardsticks import COUNTS_FROM, Absent, Kind, Pages, Yardsticks, YardstickSettings, pieces  # noqa: E402
from pdkv.rpc.bench import GrpcBench  # noqa: E402
from pdkv.rpc.channels import Channels  # noqa: E402
from pdkv.rpc.client import ClientSettings  # noqa: E402
from pdkv.rpc.security import PlainText  # noqa: E402

HUGE_SHARE = 0.9
POOLS = 5
"""At once, of `Sizes.pages`: source and sink, raw source and raw sink, and what memcpy copies from."""
BESIDE_BYTES = 3 << 30
"""Taken by six processes, and left to the system."""
PLAIN, PROVED = "pull, no digests", "pull, digests"
STREAM_PLAIN, STREAM_PROVED = "streaming, no digests", "streaming, digests"


@dataclass(frozen=True)
class Sizes:
    model: str = "glm-5.3"
    pages: int = 512
    chunk_pages: int = 128
    """Of an announcement, where the source seals as it goes: 8,192 tokens, as engines chunk a long prompt."""
    layer_pages: int = 128
    """Where page-major and layer-major pools are there at once."""
    grpc_pages: int = 128
    """Of the reading by a gRPC stream, which is slow."""
    turns: int = 7
    short_turns: int = 5
    small_reads: int = 320
    idle_s: float = 6.0
    """Longer than a node lets pass until it probes its peer."""


QUICK = Sizes(pages=64, chunk_pages=16, layer_pages=32, grpc_pages=32, turns=3, short_turns=3, small_reads=96)


@dataclass
class Stand:
    """Processes, and what is measured on them."""

    sizes: Sizes
    sources: dict[str, GrpcBench]
    sinks: Sequence[SinkProcess]
    report: Report
    console: Console

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.sizes.model)
        self.page_bytes = self.nodes.fmt.page_bytes

    async def run(self) -> None:
        sizes = self.sizes
        base = Case(sizes.pages, digests=False, chunk_pages=sizes.chunk_pages)
        pair = Pair(self.nodes, base.setup, self.sources, self.sinks)
        one = replace(base, pages=1, digests=True)
        await pair.build([base, one])
        huge = dict(zip(("source", "sink"), await pair.huge_shares(), strict=True))
        self.report.figures["huge_pages"] = huge
        if min(huge.values()) < HUGE_SHARE:
            # copies over CMA take twice as long on small pages, and raw pools may have got others
            self.console.print(
                f"[yellow]pools are not on huge pages, as far as {huge}: nothing here is to be believed[/]"
            )
        await self._idle(pair)
        await self._small_reads(pair, one)
        first = (await self._pulled(pair, base)).pulled[0]
        ids = Pages.of(first.local, first.remote)
        await self._against_raw(pair, base, ids)
        await self._against_defaults(pair, base, ids)
        await pair.close()
        await self._placements()

    # --- one at a time ------------------------------------------------------------------------------------------------

    async def _idle(self, pair: Pair) -> None:
        before = [await pair.source_cpu_s(), await pair.sink_cpu_s(), time.monotonic()]
        await asyncio.sleep(self.sizes.idle_s)
        after = [await pair.source_cpu_s(), await pair.sink_cpu_s(), time.monotonic()]
        source_s, sink_s, wall_s = (b - a for a, b in zip(before, after, strict=True))
        self.report.figures["idle_cores"] = {"source": source_s / wall_s, "sink": sink_s / wall_s}
        self._check(
            "idle_cpu", max(source_s, sink_s) / wall_s, "<=", 0.02, "cores of a connected node, the worse of two"
        )

    async def _small_reads(self, pair: Pair, one: Case) -> None:
        """One after another, each of another prompt; the first repetition wakes what slept."""
        samples = [await self._pulled(pair, one) for _ in range(self.sizes.small_reads // one.series + 1)][1:]
        pulls = [sample.pulled[0] for sample in samples]
        asked_ms = [1e3 * s for pull in pulls for s in pull.each_s]
        each = one.series
        self.report.figures["small_read_ms"] = {
            "p50": statistics.median(asked_ms),
            "p99": statistics.quantiles(asked_ms, n=100)[98],
            **{name: 1e3 * statistics.median(p.stages_s[name] for p in pulls) for name in pulls[0].stages_s},
            "source_cpu": statistics.median(1e3 * s.source_cpu_s / each for s in samples),
            "sink_cpu": statistics.median(1e3 * p.cpu_s / each for p in pulls),
        }
        words = "one page, from asking prefill over gRPC to committed, digests on, p50"
        self._check("small_read_ms", statistics.median(asked_ms), "<=", 2.0, words)

    # --- in turns -----------------------------------------------------------------------------------------------------

    async def _against_raw(self, pair: Pair, base: Case, ids: Pages) -> None:
        streaming, rates = replace(base, mode=Mode.STREAMING), _Rates()
        short = Pages(ids.local[: self.sizes.grpc_pages], ids.remote[: self.sizes.grpc_pages])
        plans: list[tuple[str, Case]] = [
            (STREAM_PLAIN, streaming),
            (STREAM_PROVED, replace(streaming, digests=True)),
            (PLAIN, base),
            (PROVED, replace(base, digests=True)),
        ]
        pages = max(base.source_pages, base.sink_pages)
        async with self._raw(pieces(self.nodes.fmt, pages), pages) as raw:
            for _ in range(self.sizes.turns):
                for kind in (Kind.READV, Kind.NIXL_PAGES):
                    await self._read(raw, kind, ids, rates)
                for name, case in plans:
                    self._note(rates, name, await self._pulled(pair, case))
                await self._read(raw, Kind.MEMCPY, ids, rates)
                await self._read(raw, Kind.GRPC, short, rates)
        raw_counts = rates.ratio(Kind.NIXL_PAGES, Kind.READV)
        counted = raw_counts >= COUNTS_FROM
        self.report.figures["raw_nixl_of_process_vm_readv"] = raw_counts
        self.report.figures["one_host"] = rates.table(against=Kind.NIXL_PAGES)
        words = f"raw NIXL: same descriptors and settings, {raw_counts:.2f} of process_vm_readv"
        against_raw = rates.ratio(PLAIN, Kind.NIXL_PAGES) if counted else math.nan
        self._check("pull_vs_raw_nixl", against_raw, ">=", 0.97, words)
        words = "one thread, same pages, digests off"
        self._check("pull_vs_memcpy", rates.ratio(PLAIN, Kind.MEMCPY), ">=", 0.74, words)
        words = f"sealed, pulled and proved in chunks of {base.chunk_pages} pages, digests on / off"
        self._check("digest_cost", rates.ratio(STREAM_PROVED, STREAM_PLAIN), ">=", 0.80, words)
        words = f"digests on, against a stream of the same pages, {len(short.local)} of them"
        self._check("vs_grpc_stream", rates.ratio(PROVED, Kind.GRPC), ">=", 5.0, words)
        self.console.print(_shown(self.report.figures["one_host"]))

    async def _against_defaults(self, pair: Pair, base: Case, ids: Pages) -> None:
        """Raw NIXL with its progress thread, on memory and with descriptors as its examples have them."""
        pages, rates = max(base.source_pages, base.sink_pages), _Rates()
        async with self._raw(pieces(self.nodes.fmt, pages), pages, as_it_comes=True) as raw:
            for _ in range(self.sizes.short_turns):
                await self._read(raw, Kind.NIXL_PAGES, ids, rates)
                self._note(rates, PLAIN, await self._pulled(pair, base))
        self.report.figures["nixl_defaults_gb_per_s"] = rates.gb_per_s(Kind.NIXL_PAGES)
        words = "raw NIXL as it comes, digests off"
        self._check("pull_vs_nixl_defaults", rates.ratio(PLAIN, Kind.NIXL_PAGES), ">=", 3.0, words)

    async def _placements(self) -> None:
        """Two pairs at once."""
        page = Case(self.sizes.layer_pages, digests=False)
        layer = replace(page, source="layer_major", sink="layer_major")
        rates, pairs = _Rates(), []
        for case, address, sink in zip((page, layer), self.sources, self.sinks, strict=True):
            pairs.append(Pair(self.nodes, case.setup, {address: self.sources[address]}, [sink]))
            await pairs[-1].build([case])
        for turn in range(self.sizes.short_turns + 1):
            for pair, case in zip(pairs, (page, layer), strict=True):
                sample = await self._pulled(pair, case)
                if turn:
                    self._note(rates, case.sink, sample)
        for pair in pairs:
            await pair.close()
        self.report.figures["placements"] = rates.table(against="layer_major")
        words = f"{page.pages} scattered pages, both sides, digests off"
        self._check("page_vs_layer_major", rates.ratio("page_major", "layer_major"), ">=", 1.6, words)

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _pulled(self, pair: Pair, case: Case) -> Sample:
        sample = await pair.repeat(case)
        if sample.wrong:
            raise SystemExit(f"{sample.wrong} caches of pages hold other bytes than the source's")
        return sample

    def _note(self, rates: _Rates, name: str, sample: Sample) -> None:
        moved_gb = sample.pages * self.page_bytes / 1e9
        cpu_s = (sample.source_cpu_s, sum(p.cpu_s for p in sample.pulled))
        rates.add(name, moved_gb / sample.seconds, cpu_s[0] / moved_gb, cpu_s[1] / moved_gb)

    async def _read(self, raw: Yardsticks, kind: Kind, ids: Pages, rates: _Rates) -> None:
        reading = await asyncio.to_thread(raw.measure, kind, ids)
        if isinstance(reading, Absent):
            self.report.figures.setdefault("absent", {})[kind] = reading.reason
        else:
            rates.add(kind, reading.gb_per_s, *reading.cpu_s_per_gb)

    @asynccontextmanager
    async def _raw(self, moved: Any, pages: int, *, as_it_comes: bool = False) -> AsyncIterator[Yardsticks]:
        raw = Yardsticks(YardstickSettings(moved, pages, as_it_comes=as_it_comes))
        await asyncio.to_thread(raw.__enter__)
        try:
            yield raw
        finally:
            raw.__exit__()

    def _check(self, name: str, value: float, op: Any, target: float, note: str) -> None:
        self.report.checks.append(Check(name, value, op, target, self.report.command, note))
        self.console.print(f"{name} {value:.3g} ({op} {target:g})", highlight=False)


class _Rates:
    """GB/s and CPU seconds a GB (source, sink) of each way, turn by turn."""

    def __init__(self) -> None:
        self._turns: dict[str, list[tuple[float, float, float]]] = defaultdict(list)

    def add(self, name: str, gb_per_s: float, source_cpu: float, sink_cpu: float) -> None:
        self._turns[name].append((gb_per_s, source_cpu, sink_cpu))

    def gb_per_s(self, name: str) -> float:
        return statistics.median(rate for rate, _, _ in self._turns[name])

    def ratio(self, name: str, other: str) -> float:
        """Median of the turns' ratios; NaN if one of them was never measured."""
        turns = list(zip(self._turns.get(name, ()), self._turns.get(other, ()), strict=False))
        return statistics.median(a[0] / b[0] for a, b in turns) if turns else math.nan

    def table(self, *, against: str) -> list[dict[str, Any]]:
        return [
            {
                "way": str(name),
                "gb_per_s": self.gb_per_s(name),
                "ratio": self.ratio(name, against),
                "source_cpu_s_per_gb": statistics.median(source for _, source, _ in turns),
                "sink_cpu_s_per_gb": statistics.median(sink for _, _, sink in turns),
                "turns": len(turns),
            }
            for name, turns in self._turns.items()
        ]


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("way", "GB/s", "of raw NIXL", "CPU s/GB: source", "sink", box=SIMPLE_HEAD)
    for row in rows:
        figures = (row[name] for name in ("gb_per_s", "ratio", "source_cpu_s_per_gb", "sink_cpu_s_per_gb"))
        table.add_row(row["way"], *(f"{figure:.3f}" for figure in figures))
    return table


def require_memory(sizes: Sizes) -> None:
    """A machine that runs out of it swaps, or kills what it likes: raises `SystemExit` before that."""
    pools_bytes = POOLS * sizes.pages * Nodes(sizes.model).fmt.page_bytes
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if free_bytes < pools_bytes + BESIDE_BYTES:
        raise SystemExit(
            f"{(pools_bytes + BESIDE_BYTES) / 1e9:.1f} GB of memory needed, {free_bytes / 1e9:.1f} are free"
        )


def make_room() -> None:
    """Ask the system to move memory together, so that there are huge pages to be had: root may."""
    with suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1")


async def measure(sizes: Sizes, report: Report, console: Console) -> None:
    require_memory(sizes)
    make_room()
    async with Workers() as workers:
        channels = Channels(PlainText())
        try:
            named = [SourceSettings(f"source-{i}", 1 << 40) for i in range(2)]
            addresses = [await workers.source(settings, PlainText()) for settings in named]
            sinks = [await workers.sink(f"sink-{i}", PlainText()) for i in range(2)]
            sources = {address: GrpcBench(address, channels, ClientSettings()) for address in addresses}
            await Stand(sizes, sources, sinks, report, console).run()
        finally:
            await channels.close()


def main(arguments: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pages and turns: to see that it runs")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    sizes = sizes or (QUICK if options.quick else Sizes())
    command = "python benchmarks/transfer.py" + (" --quick" if options.quick else "")
    report, console, began = Report("transfer", command), Console(), time.monotonic()
    try:
        asyncio.run(measure(sizes, report, console))
    except KeyboardInterrupt:
        return 130
    report.elapsed_s = time.monotonic() - began
    console.print(as_table(report.checks))
    if options.json:
        report.write(options.json)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
