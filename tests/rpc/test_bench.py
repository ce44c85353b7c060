"""A source of a benchmark over gRPC: what is asked arrives as it was meant, or is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from pdkv.errors import BoundsError, ConfigError, ProtocolError, RemoteError
from pdkv.ids import UInt64Array
from pdkv.rpc.bench import BenchPrompt, GrpcBench, Preparation, SourceNode, Usage
from pdkv.rpc.channels import Channels
from pdkv.rpc.client import ClientSettings
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import Services
from tests.rpc.fakes import FakePrefill, run
from tests.rpc.tls import served

NODE = SourceNode("glm-5.3", 512, "layer_major", 2048)
PROMPT = BenchPrompt(2**64 - 1, 3)


class FakeSource:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.rows = 3

    async def build(self, node: SourceNode) -> float:
        self.told.append(node)
        if node.model == "none":
            raise ConfigError("model", node.model, "a preset or a path")
        return 0.75

    async def prepare(self, preparation: Preparation) -> None:
        self.told.append(preparation)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        self.told.append(prompt)
        return np.arange(2 * self.rows, dtype=np.uint64).reshape(self.rows, 2) + np.uint64(2**63)

    def usage(self) -> Usage:
        return Usage(1.25, 1 << 40)


@asynccontextmanager
async def called(services: Services) -> AsyncIterator[GrpcBench]:
    async with served(PlainText(), services) as server:
        channels = Channels(PlainText())
        try:
            yield GrpcBench(server.address, channels, ClientSettings())
        finally:
            await channels.close()


def test_what_is_asked_arrives_as_it_was_meant() -> None:
    async def body() -> None:
        source = FakeSource()
        async with called(Services(bench=source)) as bench:
            preparation = Preparation(PROMPT, cached=True, scattered=False, digests=True, count=3)
            assert await bench.build(NODE) == 0.75
            await bench.prepare(preparation)
            found = await bench.digests(PROMPT)
            assert source.told == [NODE, preparation, PROMPT]
            assert found.tolist() == (await source.digests(PROMPT)).tolist()
            assert await bench.usage() == source.usage()

    run(body)


@pytest.mark.parametrize(
    ("node", "field"),
    [
        (SourceNode("tiny", 1, "page_major", 64), "pool_pages"),
        (SourceNode("tiny", 1 << 25, "page_major", 64), "pool_pages"),
        (SourceNode("tiny", 8, "page_major", 0), "chunk_tokens"),
        (SourceNode("", 8, "page_major", 64), "model"),
        (SourceNode("tiny", 8, "sideways", 64), "placement"),  # type: ignore[arg-type]
    ],
)
def test_values_out_of_bounds_are_refused(node: SourceNode, field: str) -> None:
    async def body() -> None:
        source = FakeSource()
        async with called(Services(bench=source)) as bench:
            with pytest.raises((BoundsError, ProtocolError), match=field):
                await bench.build(node)
            assert not source.told

    run(body)


def test_a_prompt_without_pages_is_refused_and_an_error_comes_through() -> None:
    async def body() -> None:
        source = FakeSource()
        async with called(Services(bench=source)) as bench:
            with pytest.raises(BoundsError, match="pages of the prompt"):
                await bench.digests(BenchPrompt(1, 0))
            with pytest.raises(ConfigError, match="model"):
                await bench.build(SourceNode("none", 8, "page_major", 64))

    run(body)


def test_digests_of_another_number_of_pages_are_refused() -> None:
    async def body() -> None:
        source = FakeSource()
        source.rows = 2
        async with called(Services(bench=source)) as bench:
            with pytest.raises(ProtocolError, match="digests"):
                await bench.digests(PROMPT)

    run(body)


def test_a_serving_node_has_no_such_service() -> None:
    async def body() -> None:
        async with called(Services(prefill=FakePrefill())) as bench:
            with pytest.raises(RemoteError, match="UNIMPLEMENTED"):
                await bench.usage()

    run(body)
