"""What it costs a request to be routed by prefix: CPU at the router and at the nodes, and the time that it waits.

    python benchmarks/routing_cost.py [--nodes 2,8] [--tokens 100,100000] [--rounds 60] [--json FILE]

The router's own `Asking` in this process, over gRPC to nodes in another one, each with a real tree that has half of
each prompt. In turns with it, as yardsticks of this machine at this minute: one call to one node that asks for nothing
(`call`), and the hashes of the prompt's pages alone (`hashes`).

Guarantees: CPU is of whole processes, so what gRPC's threads take is in it; medians, and the 95th percentile beside
the wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.routing import DECODE, LIFE, contract  # noqa: E402
from pdkv.cli.bench.report import Report, stamp  # noqa: E402
from pdkv.ids import NodeId, PageHashes, PeerName, RequestId  # noqa: E402
from pdkv.kvcache.radix_tree import RadixTree  # noqa: E402
from pdkv.node.messages import GenerateRequest, NodeStatus  # noqa: E402
from pdkv.node.prompt import plan_prompt  # noqa: E402
from pdkv.node.routing import Estimate, EstimateCall  # noqa: E402
from pdkv.router.asking import Asking  # noqa: E402
from pdkv.router.registry import Registry  # noqa: E402
from pdkv.rpc.client import GrpcDirectory  # noqa: E402
from pdkv.rpc.security import PlainText  # noqa: E402
from pdkv.rpc.server import GrpcServer, PrefillServicer, Services  # noqa: E402
from pdkv.rpc.transport import Endpoint  # noqa: E402

NOTHING = EstimateCall(PageHashes())
WARM = 5


def prompt_tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(count).integers(0, 1 << 16, count).astype(np.uint32)


def asked(count: int) -> GenerateRequest:
    return GenerateRequest(RequestId("r"), prompt_tokens(count))


class Tree:
    """A node that can say what it has; nothing else is asked of it."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self._name = PeerName(NodeId(name), LIFE)
        self._tree = RadixTree(1 + sum(count // 64 for count in tokens))
        first = 1
        for count in tokens:
            hashes = plan_prompt(prompt_tokens(count), asked(count).namespace, contract()).hashes
            half = hashes.part(0, len(hashes) // 2)
            self._tree.insert(half, np.arange(first, first + len(half), dtype=np.int32))
            first += len(half)

    def estimate(self, call: EstimateCall) -> Estimate:
        return Estimate(self._name, self._tree.match(call.hashes).pages.size, 0, 1000)


async def serve(nodes: int, tokens: Sequence[int]) -> None:
    """Says its addresses, then the CPU seconds of this process for each line that comes in."""
    logging.disable(logging.WARNING)
    servers = []
    for i in range(nodes):
        node: PrefillServicer = Tree(f"p{i}", tokens)  # type: ignore[assignment]
        servers.append(GrpcServer(Endpoint("127.0.0.1:0"), Services(prefill=node), PlainText()))  # type: ignore[arg-type]
    print(json.dumps([await server.start() for server in servers]), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)
    for server in servers:
        await server.stop(0)


@asynccontextmanager
async def served(nodes: int, tokens: Sequence[int]) -> AsyncGenerator[tuple[list[str], Callable[[], Awaitable[float]]]]:
    """Addresses of nodes in a process of their own, and a look at that process's CPU seconds."""
    words = [sys.executable, __file__, "--serve", str(nodes), "--tokens", ",".join(map(str, tokens))]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    to, back = child.stdin, child.stdout
    if to is None or back is None:
        raise RuntimeError("a child without pipes")

    async def cpu_s() -> float:
        to.write(b"\n")
        return float(await back.readline())

    try:
        yield json.loads(await back.readline()), cpu_s
    finally:
        to.close()
        await child.wait()


@dataclass(slots=True)
class Rows:
    """Of one kind of thing, a number a round."""

    wait_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    def figures(self) -> Figures:
        ordered = sorted(self.wait_s)
        middle = (1e3 * statistics.median(column) for column in (self.wait_s, self.own_s, self.theirs_s))
        wait, own, theirs = middle
        return Figures(wait, 1e3 * ordered[int(0.95 * (len(ordered) - 1))], own, theirs)


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds."""

    wait_ms: float
    wait_p95_ms: float
    router_cpu_ms: float
    nodes_cpu_ms: float
    """Of all nodes together."""


async def measure(nodes: int, tokens: Sequence[int], rounds: int) -> dict[int, dict[str, Figures]]:
    async with served(nodes, tokens) as (addresses, cpu_s):
        directory = GrpcDirectory(PlainText())
        registry = Registry(addresses, [DECODE])
        for at, node in enumerate(registry):
            name = PeerName(NodeId(f"p{at}"), LIFE)
            registry.learn(node, NodeStatus(name, node.role, {"total": 1000}, 0, 0, "", {}, contract()))
        asking = Asking(registry, directory, limit_s=60.0)
        found: dict[int, dict[str, Figures]] = {}
        try:
            for count in tokens:
                ways = ways_of(asked(count), asking, directory, addresses)
                found[count] = await in_turns(ways, cpu_s, rounds)
        finally:
            await directory.close()
    return found


def ways_of(
    request: GenerateRequest, asking: Asking, directory: GrpcDirectory, addresses: Sequence[str]
) -> dict[str, Callable[[], Awaitable[None]]]:
    promise = contract()

    async def ask() -> None:
        weights = await asking.weights(request)
        if len(weights.cached) != len(addresses):
            raise RuntimeError(f"{len(weights.cached)} of {len(addresses)} nodes have answered")

    async def call() -> None:
        await directory.peer(addresses[0]).estimate(NOTHING)

    async def hashes() -> None:
        plan_prompt(request.tokens, request.namespace, promise)

    return {"ask": ask, "call": call, "hashes": hashes}


async def in_turns(
    ways: Mapping[str, Callable[[], Awaitable[None]]], cpu_s: Callable[[], Awaitable[float]], rounds: int
) -> dict[str, Figures]:
    rows = {name: Rows() for name in ways}
    for turn in range(WARM + rounds):
        for name, way in ways.items():
            theirs, own, began = await cpu_s(), time.process_time(), time.perf_counter()
            await way()
            wait, spent = time.perf_counter() - began, time.process_time() - own
            row = rows[name]
            if turn >= WARM:
                row.wait_s.append(wait)
                row.own_s.append(spent)
                row.theirs_s.append(await cpu_s() - theirs)
    return {name: row.figures() for name, row in rows.items()}


def show(found: dict[int, dict[int, dict[str, Figures]]]) -> Table:
    names = ("wait, ms", "p95", "router CPU, ms", "nodes' CPU, ms")
    table = Table("nodes", "tokens", "what", *names, box=SIMPLE_HEAD)
    for nodes, prompts in found.items():
        for tokens, ways in prompts.items():
            for at, (way, f) in enumerate(ways.items(), 1):
                cells = (f"{value:.2f}" for value in asdict(f).values())
                table.add_row(f"{nodes}", f"{tokens:,}", way, *cells, end_section=at == len(ways))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,8", help="that are asked, with commas")
    parser.add_argument("--tokens", default="100,100000", help="of prompts, with commas")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [*map(int, options.tokens.split(","))]
    if options.serve:
        asyncio.run(serve(options.serve, tokens))
        return 0
    console, began = Console(), time.monotonic()
    command = f"python benchmarks/routing_cost.py --nodes {options.nodes} --tokens {options.tokens}"
    found = {n: asyncio.run(measure(n, tokens, options.rounds)) for n in map(int, options.nodes.split(","))}
    report = Report("routing_cost", command, elapsed_s=time.monotonic() - began)
    report.figures["nodes"] = {
        n: {t: {way: asdict(f) for way, f in ways.items()} for t, ways in of.items()} for n, of in found.items()
    }
    console.print(f"{command}: {report.elapsed_s:.0f} s, load {stamp()['load_1m']}", soft_wrap=True)
    console.print(show(found))
    if options.json:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
