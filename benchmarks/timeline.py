"""Where the time of a small pull goes: every step of one page's way, on both sides, on one clock.

    python benchmarks/timeline.py [--pages 1] [--model glm-5.3] [--repetitions 8] [--json FILE]

The pulls are those of `small_read_ms` in transfer.py (one page, in turns, digests on). The functions that serve are
wrapped on both sides, in processes that are otherwise as there; a row is when a step began, and how long it took, both
medians over the pulls, from the moment the request is made up. What lies between two rows is what no step claims: the
event loops, gRPC and its threads, and the way from one thread or process to another. Wrapping costs about a microsecond
a step.

Guarantees: a profile, with no target. Both processes read CLOCK_MONOTONIC, which is one clock on one host.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import inspect
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.cases import Case  # noqa: E402
from pdkv.cli.bench.pair import Nodes, Pair  # noqa: E402
from pdkv.cli.bench.pulls import SourceSettings  # noqa: E402
from pdkv.cli.bench.report import Report  # noqa: E402
from pdkv.cli.bench.sink import Sink  # noqa: E402
from pdkv.cli.bench.workers import Workers  # noqa: E402
from pdkv.rpc.bench import GrpcBench  # noqa: E402
from pdkv.rpc.channels import Channels  # noqa: E402
from pdkv.rpc.client import ClientSettings  # noqa: E402
from pdkv.rpc.security import PlainText, Security  # noqa: E402

Step = tuple[str, str, str]
"""Module, what stands in it (dots for a method), and what the row says."""
FIRST = "the request is made up"
LAST = "committed"
SINK: tuple[Step, ...] = (
    ("pdkv.node.pull", "Pull._request", FIRST),
    ("pdkv.rpc.convert.prefill", "prefill_request_to_pb", "and becomes a message"),
    ("pdkv.rpc.convert.prefill", "prefill_event_from_pb", "an event was a message"),
    ("pdkv.node.intake", "Intake.announce", "announced pages are checked"),
    ("pdkv.transfer.engine", "TransferEngine.read", "the read is given to the transfer thread"),
    ("pdkv.transfer.core", "TransferCore.read", "transfer thread: taken"),
    ("pdkv.transfer.agents", "ReadingAgent.post", "transfer thread: posted (over CMA: copied), then table rows"),
    ("pdkv.transfer.tasks", "OrderTask._answer", "transfer thread: rows compared, answered"),
    ("pdkv.node.intake", "Intake._hold_back", "the loop has the outcome"),
    ("pdkv.kvcache.verifier", "Verifier.verify", "digest thread: proved"),
    ("pdkv.kvcache.manager", "CacheManager.commit", LAST),
)
SOURCE: tuple[Step, ...] = (
    ("pdkv.rpc.interceptors", "CallInterceptor.intercept_service", "prefill: the call is there"),
    ("pdkv.rpc.interceptors", "_parsed", "prefill: its message is parsed"),
    ("pdkv.rpc.convert.prefill", "prefill_request_from_pb", "prefill: checked and converted"),
    ("pdkv.node.prefill", "plan_prompt", "prefill: hashed"),
    ("pdkv.kvcache.manager", "CacheManager.reserve", "prefill: matched, locked, reserved"),
    ("pdkv.node.source", "Source.grant", "prefill: lease granted"),
    ("pdkv.node.prefill", "_announced", "prefill: cached pages announced"),
    ("pdkv.rpc.convert.prefill", "prefill_event_to_pb", "prefill: first event becomes a message"),
    ("pdkv.rpc.server", "_write", "prefill: written"),
)
Marks = list[tuple[str, float, float]]
"""What began, when, and when it ended."""


def watch(steps: Sequence[Step], marks: Marks) -> None:
    """Wrap them in this process."""
    for module, path, words in steps:
        *owner, name = path.split(".")
        holder = functools.reduce(getattr, owner, importlib.import_module(module))
        setattr(holder, name, _timed(getattr(holder, name), words, marks))


def _timed(run: Callable[..., Any], words: str, marks: Marks) -> Callable[..., Any]:
    @functools.wraps(run)
    def timed(*given: Any, **named: Any) -> Any:
        began_s = time.monotonic()
        try:
            return run(*given, **named)
        finally:
            marks.append((words, began_s, time.monotonic()))

    @functools.wraps(run)
    async def awaited(*given: Any, **named: Any) -> Any:
        began_s = time.monotonic()
        try:
            return await run(*given, **named)
        finally:
            marks.append((words, began_s, time.monotonic()))

    return awaited if inspect.iscoroutinefunction(run) else timed


async def serve(pipe: Connection, settings: SourceSettings, security: Security) -> None:
    """A source that answers a word with what it has marked since the last one."""
    from pdkv.cli.bench.source import Source
    from pdkv.rpc.server import GrpcServer, Services
    from pdkv.rpc.transport import Endpoint

    marks: Marks = []
    watch(SOURCE, marks)
    source = Source(settings)
    server = GrpcServer(Endpoint("127.0.0.1:0"), Services(prefill=source, bench=source), security)
    pipe.send(("", await server.start()))
    try:
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(("", list(marks)))
            marks.clear()
    except EOFError:
        await server.stop(0.0)
        await source.close()


def lined_up(marks: Marks) -> list[tuple[str, float, float]]:
    """Rows (what, ms from the request, ms that it took), medians over the pulls, up to the commit."""
    found: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    zero_s, seen = 0.0, Counter[str]()
    for words, began_s, ended_s in sorted(marks, key=lambda mark: mark[1]):
        if words == FIRST:
            zero_s, seen = began_s, Counter()
        if not zero_s:
            continue
        found[words, seen[words]].append((began_s - zero_s, ended_s - began_s))
        seen[words] += 1
        if words == LAST:
            zero_s = 0.0
    pulls = len(found[FIRST, 0])
    rows = [
        (words, *(1e3 * statistics.median(column) for column in zip(*times, strict=True)))
        for (words, _), times in found.items()
        if len(times) > pulls / 2
    ]
    return sorted(rows, key=lambda row: row[1])


async def measure(model: str, pages: int, repetitions: int) -> tuple[list[tuple[str, float, float]], float]:
    """The rows, and the median pull, ms."""
    marks: Marks = []
    each_s: list[float] = []
    watch(SINK, marks)
    async with Workers() as workers:
        source = await workers.start("source", serve, SourceSettings("source", 1 << 40), PlainText())
        address, channels, sink = str(await source.heard()), Channels(PlainText()), Sink(PlainText())
        case = Case(pages, digests=True)
        bench = GrpcBench(address, channels, ClientSettings())
        pair = Pair(Nodes(model), case.setup, {address: bench}, [sink])
        await pair.build([case])
        await pair.repeat(case)
        for repetition in range(repetitions + 1):
            if repetition == 1:  # the first one wakes what slept
                marks.clear()
                each_s.clear()
                await source.ask("marks")
            each_s += (await pair.repeat(case)).pulled[0].each_s
        rows = lined_up(marks + await source.ask("marks"))
        await pair.close()
        await channels.close()
    return rows, 1e3 * statistics.median(each_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--model", default="glm-5.3")
    parser.add_argument("--repetitions", type=int, default=8, help="of 32 pulls each, if they are of one page")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    report, began_s = Report("timeline", "python benchmarks/timeline.py"), time.monotonic()
    rows, whole_ms = asyncio.run(measure(options.model, options.pages, options.repetitions))
    table = Table("ms", "takes", "", box=SIMPLE_HEAD)
    for words, at_ms, took_ms in rows:
        table.add_row(f"{at_ms:.2f}", f"{took_ms:.2f}", words)
    Console().print(table)
    Console().print(f"{whole_ms:.2f} ms from asking to committed", highlight=False)
    report.figures = {"rows": [dict(zip(("what", "at_ms", "takes_ms"), row, strict=True)) for row in rows]}
    report.figures["whole_ms"] = whole_ms
    report.elapsed_s = time.monotonic() - began_s
    if options.json:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
