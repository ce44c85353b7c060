"""Sources and sinks of one process: real servers, real reads, no processes to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from pdkv.cli.bench.pulls import SourceSettings
from pdkv.cli.bench.sink import Sink
from pdkv.cli.bench.source import Source
from pdkv.cli.bench.workers import SinkProcess
from pdkv.rpc.bench import BenchPrompt, GrpcBench, SourceNode
from pdkv.rpc.channels import Channels
from pdkv.rpc.client import ClientSettings
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint

LIMIT_S = 60.0
PROMPT = BenchPrompt(1, 6)
NODE = SourceNode("tiny", 10, "page_major", 128)


@dataclass
class Stand:
    """`sinks` has the methods of processes, and is none."""

    sources: list[Source]
    benches: dict[str, GrpcBench]
    sinks: list[SinkProcess]

    @property
    def address(self) -> str:
        """Of the first source."""
        return next(iter(self.benches))

    @property
    def bench(self) -> GrpcBench:
        return self.benches[self.address]


@asynccontextmanager
async def stand(sources: int = 1, sinks: int = 1) -> AsyncIterator[Stand]:
    async with AsyncExitStack() as held:
        channels = Channels(PlainText())
        held.push_async_callback(channels.close)
        made = Stand([], {}, [])
        for number in range(sources):
            source = Source(SourceSettings(f"source-{number}", 64 << 20))
            server = GrpcServer(Endpoint("127.0.0.1:0"), Services(prefill=source, bench=source), PlainText())
            address = await server.start()
            held.push_async_callback(source.close)
            held.push_async_callback(server.stop, 0.0)
            made.sources.append(source)
            made.benches[address] = GrpcBench(address, channels, ClientSettings())
        for _ in range(sinks):
            sink = Sink(PlainText())
            held.push_async_callback(sink.close)
            made.sinks.append(cast(SinkProcess, sink))
        yield made


def play(scenario: Callable[[Stand], Awaitable[None]], **counts: Any) -> None:
    """A hang ends as an error."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), stand(**counts) as made:
            await scenario(made)

    asyncio.run(main())
