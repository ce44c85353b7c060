"""What tracing costs a request, in CPU of each process.

    python benchmarks/tracing.py [--rounds N] [--requests N]

Three fleets of a router, a decode and a prefill node (synthetic engine, tiny model): one without tracing, one that
keeps every trace, one that keeps one in a hundred. They take turns, a block of requests each; a collector in this
process takes the spans. CPU is that of a whole process with all its threads, so what delivers spans is in it, and so is
polling for as long as a block lasts, which is the same for all.

Guarantees: each prompt is new, so every request is pulled; figures are medians of the rounds, in which each fleet has
one block.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpc  # noqa: E402
import numpy as np  # noqa: E402
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.demo.fleet import Fleet, NodeProcess  # noqa: E402
from pdkv.ids import RequestId  # noqa: E402
from pdkv.node.messages import GenerateRequest, Sampling  # noqa: E402
from pdkv.rpc.client import GrpcDirectory  # noqa: E402
from pdkv.rpc.security import PlainText  # noqa: E402

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 8
FLEETS: dict[str, dict[str, str]] = {
    "without": {},
    "all kept": {"trace_ratio": "1"},
    "1 in 100": {"trace_ratio": "0.01"},
}
ROLES = ("router", "decode", "prefill")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts spans."""

    spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        self.spans += sum(len(scope.spans) for of in request.resource_spans for scope in of.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Any:
    """The collector and its endpoint."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@dataclass
class Group:
    """A fleet, and what each block of requests cost its processes."""

    nodes: dict[str, NodeProcess]
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    """By role, a request."""

    async def block(self, directory: GrpcDirectory, prompts: np.ndarray[Any, Any]) -> None:
        before = {role: cpu_s(node.pid) for role, node in self.nodes.items()}
        for i, tokens in enumerate(prompts):
            request = GenerateRequest(RequestId(f"b{i}"), tokens, Sampling(max_tokens=OUTPUT_TOKENS))
            async with aclosing(directory.router(self.nodes["router"].address).generate(request)) as events:
                async for _ in events:
                    pass
        for role, node in self.nodes.items():
            self.cpu_ms[role].append(1000 * (cpu_s(node.pid) - before[role]) / len(prompts))


def cpu_s(pid: int) -> float:
    """Of a process with all its threads."""
    words = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def start(fleet: Fleet, name: str, flags: dict[str, str]) -> Group:
    """All three at once: addresses are chosen beforehand."""
    at = {role: f"127.0.0.1:{port}" for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True)}
    node = {"model": "tiny", "engine": "synthetic", "threads": 1, "pool_pages": 256, "no_touch_pool": True}
    own: dict[str, dict[str, str | int | bool]] = {
        "prefill": {**node, "chunk_tokens": 512},
        "decode": {**node, "prefill_addresses": at["prefill"]},
        "router": {"prefill_addresses": at["prefill"], "decode_addresses": at["decode"]},
    }
    common = {"insecure": True, **flags}
    made = await asyncio.gather(
        *(fleet.start(role, f"{role}-{name}", {**own[role], **common, "bind": at[role]}) for role in ROLES)
    )
    return Group(dict(zip(ROLES, made, strict=True)))


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in held]
    finally:
        for server in held:
            server.close()


async def measure(rounds: int, requests: int, endpoint: str) -> dict[str, Group]:
    random = np.random.default_rng(0)
    async with Fleet() as fleet:
        started = await asyncio.gather(
            *(
                start(fleet, str(i), {**flags, "trace_endpoint": endpoint} if flags else {})
                for i, flags in enumerate(FLEETS.values())
            )
        )
        groups = dict(zip(FLEETS, started, strict=True))
        directory = GrpcDirectory(PlainText())
        try:
            for turn in range(rounds + 1):
                order = list(groups.values()) if turn % 2 else list(groups.values())[::-1]
                for group in order:
                    prompts = random.integers(0, 256, (requests, PROMPT_TOKENS), np.uint32)
                    await group.block(directory, prompts)
        finally:
            await directory.close()
    for group in groups.values():
        for blocks in group.cpu_ms.values():
            del blocks[0]  # warms up
    return groups


def shown(groups: dict[str, Group]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"CPU ms a request of {PROMPT_TOKENS} tokens; and beyond that without tracing")
    table.add_column("")
    for role in ROLES:
        table.add_column(role, justify="right")
    base = {role: median(groups["without"].cpu_ms[role]) for role in ROLES}
    for name, group in groups.items():
        found = {role: median(group.cpu_ms[role]) for role in ROLES}
        more = {role: f" ({found[role] - base[role]:+.2f})" if name != "without" else "" for role in ROLES}
        table.add_row(name, *(f"{found[role]:.2f}{more[role]}" for role in ROLES))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each fleet")
    parser.add_argument("--requests", type=int, default=100, help="of a block")
    options = parser.parse_args(arguments)
    console = Console()
    with collecting() as (collector, endpoint):
        groups = asyncio.run(measure(options.rounds, options.requests, endpoint))
        console.print(shown(groups))
        console.print(f"{collector.spans} spans were delivered")
    return 0 if collector.spans else 1


if __name__ == "__main__":
    raise SystemExit(main())
