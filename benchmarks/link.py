"""What nodes make of links of a known rate: all of it, for little CPU, in fair shares, and of two links twice that.

    python benchmarks/link.py [--only line,rails,short,incast] [--json FILE]

Prefill nodes stand at one end of links that `tc tbf` shapes, decode nodes at the other; both are serving processes with
an engine that computes nothing, and read over TCP, digests and all. A rate is bytes of pages by the time in which a
request had a read running; a link's own rate is one TCP stream of iperf3 in the same direction, in turns with it.

Guarantees: each pull is of pages that decode had none of and that prefill has in its cache (it was asked for by another
decode node before), but for the long one that others pass; ratios are medians of turns. Needs Linux, root, iproute2 and
iperf3, and 16 GB of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from benchmarks.netns import NotPossible, TwoSpaces  # noqa: E402
from benchmarks.nodes import Asker, Node, node  # noqa: E402
from pdkv.cli.bench.report import Check, Report, as_table  # noqa: E402
from pdkv.geometry.model_config import load_config, model_shape  # noqa: E402
from pdkv.geometry.page_layout import page_format  # noqa: E402
from pdkv.node.messages import Shipment  # noqa: E402

MODEL = "glm-5.3"
TURNS = 3
IPERF_S = 1.5
LINE_PAGES = {1000: 48, 2000: 96, 4000: 192}
"""By rate, Mbit/s: 1.4 s of the link each."""
RAIL_PAGES = 96
SHORT_PAGES, SHORT_PULLS = 4, 60
LONG_PAGES = 16_384
LAYERS = 10
"""Of the model that 16,384 pages fit into memory of: 7 GB on either side."""
INCAST_PAGES, INCAST_SOURCES = 48, 4
LIMIT_S = 120.0


@dataclass
class Stand:
    report: Report
    console: Console
    command: str

    def check(self, name: str, value: float, op: Any, target: float, note: str) -> None:
        self.report.checks.append(Check(name, value, op, target, self.command, note))
        self.console.print(f"{name} {value:.3g} ({op} {target:g})", highlight=False)


@dataclass
class Fleet:
    """Nodes at both ends of the links."""

    spaces: TwoSpaces
    asker: Asker
    page_bytes: int
    held: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def prefill(self, name: str, pages: int, **flags: Any) -> Node:
        address = self.spaces.links[0].far_address
        made = node(self.spaces.far.prefix, "prefill", name, bind=f"{address}:0", pool_pages=pages, **flags)
        return await self.held.enter_async_context(made)

    async def decode(self, name: str, pages: int, **flags: Any) -> Node:
        link = self.spaces.links[0]
        allowed = {"bind": f"{link.near_address}:0", "prefill_allow": f"{link.far_address}:*"}
        made = node(self.spaces.near.prefix, "decode", name, pool_pages=pages, **allowed, **flags)
        return await self.held.enter_async_context(made)

    def gbit_per_s(self, shipment: Shipment) -> float:
        return shipment.pages_shipped * self.page_bytes * 8 / 1e9 / shipment.transfer_s


@asynccontextmanager
async def fleet(model: str = MODEL, **links: int) -> AsyncIterator[Fleet]:
    fmt = page_format(model_shape(load_config(model)))
    with TwoSpaces(near_here=True, **links) as spaces:
        made = Fleet(spaces, Asker(fmt.page_tokens), fmt.page_bytes)
        try:
            async with made.held:
                yield made
        finally:
            await made.asker.close()


async def line(stand: Stand, mbit: int) -> None:
    """One pull after the other, in turns with iperf3."""
    pages = LINE_PAGES[mbit]
    async with fleet(mbit=mbit) as made:
        flags = {"model": MODEL}
        prefill = await made.prefill("p0", pages + 8, chunk_tokens=64 * pages, **flags)
        warming, decode = await made.decode("w0", pages + 8, **flags), await made.decode("d0", pages + 8, **flags)
        await made.asker.ask(decode, prefill, made.asker.prompt(1))
        ratios, cores = [], []
        for _ in range(TURNS):
            prompt = made.asker.prompt(pages)
            await made.asker.ask(warming, prefill, prompt)
            raw = await asyncio.to_thread(made.spaces.iperf3, seconds=IPERF_S)
            began_s, cpu_s = time.monotonic(), [each.cpu_s() for each in (prefill, decode)]
            shipment = await made.asker.ask(decode, prefill, prompt)
            wall_s = time.monotonic() - began_s
            cores.append(max((b.cpu_s() - a) / wall_s for a, b in zip(cpu_s, (prefill, decode), strict=True)))
            ratios.append(made.gbit_per_s(shipment) / raw)
            stand.console.print(f"  {made.gbit_per_s(shipment):.3f} Gbit/s, iperf3 {raw:.3f}", highlight=False)
    stand.report.figures[f"line_{mbit}"] = {"of_iperf3": ratios, "cores": cores, "pages": pages}
    name = f"{mbit // 1000}g"
    stand.check(f"line_rate_{name}", statistics.median(ratios), ">=", 0.98, f"iperf3 over the same {mbit} Mbit/s")
    if mbit == 2000:
        words = "cores of the busier process, from the request to its first token"
        stand.check("line_cpu_2g", statistics.median(cores), "<=", 0.25, words)


async def rails(stand: Stand) -> None:
    """The same nodes with one rail and with two, a link each."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    async with fleet(mbit=1000, links=2) as made:
        flags = {"model": MODEL}
        devices = {
            count: (
                ",".join(link.far_device for link in made.spaces.links[:count]),
                ",".join(link.near_device for link in made.spaces.links[:count]),
            )
            for count in rates
        }
        pairs = {}
        for count, (far, near) in devices.items():
            prefill = await made.prefill(f"p{count}", RAIL_PAGES + 8, chunk_tokens=64 * RAIL_PAGES, rails=far, **flags)
            warming = await made.decode(f"w{count}", RAIL_PAGES + 8, rails=near, **flags)
            decode = await made.decode(f"d{count}", RAIL_PAGES + 8, rails=near, **flags)
            pairs[count] = (prefill, warming, decode)
        for _ in range(TURNS):
            for count, (prefill, warming, decode) in pairs.items():
                prompt = made.asker.prompt(RAIL_PAGES)
                await made.asker.ask(warming, prefill, prompt)
                rates[count].append(made.gbit_per_s(await made.asker.ask(decode, prefill, prompt)))
    stand.report.figures["rails_gbit_per_s"] = rates
    value = statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True))
    stand.check("two_rails", value, ">=", 1.9, "two links of 1000 Mbit/s, one agent each / one of them")


async def short(stand: Stand) -> None:
    """Short pulls by themselves, and then beside a long one, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(_cut(Path(folder), LAYERS))
        async with fleet(model, mbit=2000) as made:
            flags = {"model": model, "read_deadline_s": LIMIT_S}
            room = LONG_PAGES + SHORT_PAGES * SHORT_PULLS * 2 + 64
            prefill = await made.prefill("p0", room, chunk_tokens=8192, **flags)
            decode = await made.decode("d0", room, peer_pages_share=1.0, **flags)
            await made.asker.ask(decode, prefill, made.asker.prompt(SHORT_PAGES))
            alone = [await _short(made, decode, prefill) for _ in range(SHORT_PULLS)]
            long = asyncio.create_task(made.asker.ask(decode, prefill, made.asker.prompt(LONG_PAGES)))
            await _computed(made, prefill)
            beside: list[float] = []
            while not long.done() and len(beside) < SHORT_PULLS:
                beside.append(await _short(made, decode, prefill))
            over = long.done()
            whole = await long
    tails = [statistics.quantiles(pulls, n=100, method="inclusive")[98] for pulls in (alone, beside)]
    stand.report.figures["short_beside_long"] = {
        "alone_s": alone,
        "beside_s": beside,
        "p99_ms": [1e3 * tail for tail in tails],
        "p50_ms": [1e3 * statistics.median(pulls) for pulls in (alone, beside)],
        "long_gbit_per_s": made.gbit_per_s(whole),
        "long_ended_first": over,
    }
    enough = len(beside) >= SHORT_PULLS // 2
    words = f"p99 of {len(beside)} pulls of {SHORT_PAGES} pages beside one of {LONG_PAGES:,} / alone, 2000 Mbit/s"
    stand.check("short_beside_long", tails[1] / tails[0] if enough else math.nan, "<=", 3.0, words)


async def _short(made: Fleet, decode: Node, prefill: Node) -> float:
    return (await made.asker.ask(decode, prefill, made.asker.prompt(SHORT_PAGES))).transfer_s


async def _computed(made: Fleet, prefill: Node) -> None:
    """The long prompt: what is left of it is its pull."""
    async with asyncio.timeout(LIMIT_S):
        while (await made.asker.prefill_status(prefill)).pages["cached"] < LONG_PAGES:
            await asyncio.sleep(0.05)


def _cut(folder: Path, layers: int) -> Path:
    """The config of a model with fewer layers."""
    config = dict(load_config(MODEL))
    config["num_hidden_layers"] = layers
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


async def incast(stand: Stand) -> None:
    """Equal pulls from four sources behind one link, at once, into one decode node."""
    ratios = []
    async with fleet(mbit=2000) as made:
        flags = {"model": MODEL}
        sources = [
            await made.prefill(f"p{i}", INCAST_PAGES + 8, chunk_tokens=64 * INCAST_PAGES, **flags)
            for i in range(INCAST_SOURCES)
        ]
        room = INCAST_SOURCES * INCAST_PAGES + 64
        warming, decode = [await made.decode(name, room, **flags) for name in ("w0", "d0")]
        for turn in range(TURNS + 1):
            prompts = [made.asker.prompt(INCAST_PAGES if turn else 1) for _ in sources]
            for source, prompt in zip(sources, prompts, strict=True):
                await made.asker.ask(warming, source, prompt)
            pulls = [made.asker.ask(decode, source, prompt) for source, prompt in zip(sources, prompts, strict=True)]
            took_s = [shipment.transfer_s for shipment in await asyncio.gather(*pulls)]
            if turn:
                ratios.append(max(took_s) / min(took_s))
    stand.report.figures["incast_slowest_over_fastest"] = ratios
    words = f"{INCAST_SOURCES} pulls of {INCAST_PAGES} pages from as many sources, 2000 Mbit/s"
    stand.check("incast", statistics.median(ratios), "<=", 1.25, words)


PARTS: dict[str, tuple[str, ...]] = {
    "line": ("line_rate_1g", "line_rate_2g", "line_rate_4g", "line_cpu_2g"),
    "rails": ("two_rails",),
    "short": ("short_beside_long",),
    "incast": ("incast",),
}


async def measure(stand: Stand, parts: Sequence[str]) -> None:
    if "line" in parts:
        for mbit in LINE_PAGES:
            await line(stand, mbit)
    for name, run in (("rails", rails), ("short", short), ("incast", incast)):
        if name in parts:
            await run(stand)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between (default: all)")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not of {', '.join(PARTS)}")
    command_line = "python benchmarks/link.py" + (f" --only {options.only}" if len(parts) < len(PARTS) else "")
    report, console, began = Report("link", command_line), Console(), time.monotonic()
    stand = Stand(report, console, command_line)
    try:
        asyncio.run(measure(stand, parts))
    except NotPossible as error:
        measured = {check.name for check in report.checks}
        for name in (name for part in parts for name in PARTS[part] if name not in measured):
            report.checks.append(Check(name, math.nan, ">=", 0.0, command_line, str(error)))
    except KeyboardInterrupt:
        return 130
    report.elapsed_s = time.monotonic() - began
    console.print(as_table(report.checks))
    if options.json:
        report.write(options.json)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
