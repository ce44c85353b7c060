"""Pages all at once, or late: what a decode node with a small pool makes of long prompts either way.

    python benchmarks/reservation.py [--quick] [--pools 130,200,400] [--requests 24] [--json FILE]

One prefill node, and for each size of the pool two decode nodes that differ in `--reserve` alone, processes of their
own on this host; a synthetic engine that takes for each token the time that a device would. The same requests come to
both, at the same moments, in turns: prompts of 32 to 96 pages, answers that may have 24 pages more and mostly end
earlier, at a stop token. TTFT is from asking to the first token, the wait in the queue included; *running* are requests
on the node that don't wait in its queue.

Guarantees: no prompt is in any cache; every request came to its end, with the same tokens both ways; figures are
medians over the repetitions, and nothing here has a target. What a machine that is too busy makes fail, a deadline or a
peer that went silent, ends it with one line that says so and exit code 1: nothing is tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.report import Report, stamp  # noqa: E402
from pdkv.cli.demo.fleet import Fleet  # noqa: E402
from pdkv.errors import DeadlineExceeded, PeerLost  # noqa: E402
from pdkv.ids import RequestId, UInt32Array  # noqa: E402
from pdkv.node.flow import deadline  # noqa: E402
from pdkv.node.messages import GenerateRequest, Namespace, Sampling, Token  # noqa: E402
from pdkv.node.ports import DecodeService  # noqa: E402
from pdkv.rpc.client import GrpcDirectory  # noqa: E402
from pdkv.rpc.security import PlainText  # noqa: E402

WAYS = ("all", "late")
PAGE_TOKENS = 64
VOCABULARY = 257
PROMPT_PAGES = (32, 96)
ANSWER_PAGES = 24
STOP_TOKENS = 3
"""Of the vocabulary: an answer has 86 tokens on the average, of the 1,536 that it may have."""
CHUNK_PAGES = 8
WINDOW_PAGES = 16
PREFILL_TOKEN_US = 40.0
DECODE_TOKEN_US = 1500.0
INTERVAL_S = 0.1
"""Between two requests, on the average: more than either way serves, so a queue forms."""
POOLS = (130, 200, 400)
"""Pages: of one request and a bit, of two, of five."""
LIMIT_S = 300.0
LOOK_S = 0.02


@dataclass(frozen=True)
class Ask:
    at_s: float
    tokens: UInt32Array
    sampling: Sampling


@dataclass(frozen=True)
class Figures:
    """Of one run."""

    requests_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    end_p50_s: float
    """From asking to the last token."""
    pause_p99_s: float
    """Of the longest one that a request had between two tokens."""
    running_mean: float
    running_most: float


def asks(seed: int, count: int, interval_s: float = INTERVAL_S) -> list[Ask]:
    """The same for a seed; no two share a page."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(interval_s, count))
    stop = tuple(int(token) for token in rng.choice(VOCABULARY, STOP_TOKENS, replace=False))
    sampling = Sampling(max_tokens=ANSWER_PAGES * PAGE_TOKENS, stop_tokens=stop)
    return [
        Ask(float(at), rng.integers(0, VOCABULARY, int(pages) * PAGE_TOKENS - 7).astype(np.uint32), sampling)
        for at, pages in zip(at_s, rng.integers(*PROMPT_PAGES, count, endpoint=True), strict=True)
    ]


@dataclass
class Heard:
    """When the tokens of one request came."""

    asked_s: float
    tokens: list[int]
    times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.asked_s

    @property
    def pause_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


async def ask(node: DecodeService, name: str, what: Ask, prefill: str, began_s: float) -> Heard:
    await asyncio.sleep(max(began_s + what.at_s - time.monotonic(), 0.0))
    # the same tokens, but in nobody's cache: the name makes other hashes of them
    request = GenerateRequest(
        RequestId(name),
        what.tokens,
        what.sampling,
        namespace=Namespace(extra_key=name),
        prefill_address=prefill,
        remaining_s=LIMIT_S,
    )
    heard = Heard(time.monotonic(), [], [])
    async with aclosing(node.generate(request)) as events:
        async for event in events:
            if isinstance(event, Token):
                heard.tokens.append(event.token)
                heard.times_s.append(time.monotonic())
    return heard


async def run(node: DecodeService, name: str, what: Sequence[Ask], prefill: str) -> tuple[Figures, list[list[int]]]:
    """One run, and what was answered."""
    running: list[int] = []

    async def look() -> None:
        while True:
            status = await node.status()
            running.append(status.requests - status.queued)
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    began_s = time.monotonic()
    try:
        async with deadline(LIMIT_S, "a run"):
            heard = await asyncio.gather(
                *(ask(node, f"{name}-{i}", each, prefill, began_s) for i, each in enumerate(what))
            )
    finally:
        looking.cancel()
    ttft_s = [each.ttft_s for each in heard]
    figures = Figures(
        requests_per_s=len(what) / (max(each.times_s[-1] for each in heard) - heard[0].asked_s),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        end_p50_s=float(np.percentile([each.times_s[-1] - each.asked_s for each in heard], 50)),
        pause_p99_s=float(np.percentile([each.pause_s for each in heard], 99)),
        running_mean=statistics.mean(running),
        running_most=max(running),
    )
    return figures, [each.tokens for each in heard]


async def compare(fleet: Fleet, prefill: str, pool: int, seeds: Sequence[int], count: int) -> dict[str, list[Figures]]:
    """Runs of both ways in turns, the first one another each time. Raises `SystemExit` if they answer otherwise."""
    common = {"model": "tiny", "engine": "synthetic", "threads": 1, "insecure": True, "log_level": "error"}
    own = {"pool_pages": pool + 1, "synthetic_token_us": DECODE_TOKEN_US, "peer_pages_share": 1.0, "queue_limit": 999}
    late = {"reserve": "late", "reserve_window_pages": WINDOW_PAGES}
    directory = GrpcDirectory(PlainText())
    processes = {
        way: await fleet.start("decode", f"{way}-{pool}", {**common, **own, **(late if way == "late" else {})})
        for way in WAYS
    }
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    try:
        nodes = {way: directory.decode(process.address) for way, process in processes.items()}
        for way in WAYS:
            await run(nodes[way], "warm", asks(seeds[0] + 10_000, 2), prefill)
        for number, seed in enumerate(seeds):
            said = {}
            for way in WAYS[:: 1 if number % 2 else -1]:
                figures, said[way] = await run(nodes[way], f"{way}-{seed}", asks(seed, count), prefill)
                found[way].append(figures)
            if said["all"] != said["late"]:
                raise SystemExit(f"pool of {pool} pages, seed {seed}: the two ways gave other answers")
    finally:
        await directory.close()
        for process in processes.values():
            await process.stop()
    return found


def median(figures: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(each, field.name) for each in figures) for field in fields(Figures)))


def over(late: Figures, all_at_once: Figures) -> Figures:
    """Each figure of one run as a part of the other's."""
    names = [field.name for field in fields(Figures)]
    return Figures(*(getattr(late, name) / max(getattr(all_at_once, name), 1e-9) for name in names))


def summary(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Medians, and the median of the ratios of two runs with the same requests."""
    ratios = [over(late, whole) for late, whole in zip(runs["late"], runs["all"], strict=True)]
    return {**{way: median(figures) for way, figures in runs.items()}, "late / all": median(ratios)}


def show(pools: Mapping[int, Mapping[str, Figures]]) -> Table:
    names = ("req/s", "TTFT p50", "p99, s", "end p50", "pause p99", "running", "most")
    table = Table("pool", "reserve", *names)
    for pool, ways in pools.items():
        for at, (way, figures) in enumerate(ways.items(), 1):
            numbers = (f"{number:.3g}" for number in asdict(figures).values())
            table.add_row(f"{pool}", way, *numbers, end_section=at == len(ways))
    return table


async def measure(pools: Sequence[int], repetitions: int, count: int) -> dict[int, dict[str, Figures]]:
    flags = {"model": "tiny", "engine": "synthetic", "threads": 1, "insecure": True, "log_level": "error"}
    room = {"pool_pages": 4096, "no_touch_pool": True, "chunk_tokens": CHUNK_PAGES * PAGE_TOKENS}
    found = {}
    for at, pool in enumerate(pools):
        seeds = [1000 * (at + 1) + i for i in range(repetitions)]
        async with Fleet() as fleet:
            prefill = await fleet.start("prefill", "p", {**flags, **room, "synthetic_token_us": PREFILL_TOKEN_US})
            runs = await compare(fleet, prefill.address, pool, seeds, count)
        found[pool] = summary(runs)
    return found


def too_busy(error: DeadlineExceeded | PeerLost) -> str:
    """In one line."""
    what, load, cores = " ".join(str(error).split()), os.getloadavg()[0], len(os.sched_getaffinity(0))
    why = f"this machine was too busy (load {load:.1f} on {cores} cores), or a node has ended"
    return f"nothing measured: {error.kind}: {what}: {why}"


def sizes(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each pool once")
    parser.add_argument("--pools", default=POOLS, type=sizes, help="pages of each decode node's, with commas")
    parser.add_argument("--requests", type=int, default=24, help="of a run (default 24)")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    pools = ",".join(map(str, options.pools))
    command_line = f"python benchmarks/reservation.py --pools {pools} --requests {options.requests}"
    report = Report("reservation", command_line + " --quick" * options.quick)
    console, began = Console(), time.monotonic()
    try:
        found = asyncio.run(measure(options.pools, 1 if options.quick else 3, options.requests))
    except (DeadlineExceeded, PeerLost) as error:
        raise SystemExit(too_busy(error)) from error
    report.figures["pools"] = {pool: {way: asdict(f) for way, f in ways.items()} for pool, ways in found.items()}
    report.elapsed_s = time.monotonic() - began
    console.print(f"load {stamp()['load_1m']}, {report.elapsed_s:.0f} s; medians")
    console.print(show(found))
    if options.json:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
