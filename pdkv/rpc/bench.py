"""What a benchmark asks of the source that it reads from, served and called.

Guarantees: only values within bounds reach the source; no serving node has this service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
import numpy as np

from pdkv.geometry.page_layout import PlacementKind
from pdkv.ids import UInt64Array
from pdkv.rpc.channels import Channels
from pdkv.rpc.client import Client, ClientSettings
from pdkv.rpc.convert import checks
from pdkv.v1 import bench_pb2, bench_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PLACEMENTS: tuple[PlacementKind, ...] = ("page_major", "layer_major")
MAX_POOL_PAGES = 1 << 24


@dataclass(frozen=True, slots=True)
class SourceNode:
    """The prefill node that a source is to be."""

    model: str
    pool_pages: int
    """With the write sink."""
    placement: PlacementKind
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Tokens that follow from the seed: `pages` full pages, and one token more."""

    seed: int
    pages: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a source's node is to be like before a pull."""

    prompt: BenchPrompt
    cached: bool
    scattered: bool
    """Page ids in random order, of this prompt's pages and those of later ones."""
    digests: bool
    """Pages are digested when they are sealed."""
    count: int = 1
    """So many prompts, of seeds one after another."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole process."""

    cpu_s: float
    resident_bytes: int


class BenchService(Protocol):
    """`pdkv.cli.bench.source.Source`, as served."""

    async def build(self, node: SourceNode) -> float: ...
    async def prepare(self, preparation: Preparation) -> None: ...
    async def digests(self, prompt: BenchPrompt) -> UInt64Array: ...
    def usage(self) -> Usage: ...


class BenchServicer(bench_pb2_grpc.BenchServicer):
    def __init__(self, source: BenchService) -> None:
        self._source = source

    async def Build(self, request: bench_pb2.BenchNode, context: Context) -> bench_pb2.BenchBuilt:
        checks.within("pool_pages", request.pool_pages, 2, MAX_POOL_PAGES)
        checks.within("chunk_tokens", request.chunk_tokens, 1, checks.MAX_TOKENS)
        placement = next(p for p in PLACEMENTS if p == checks.one_of("placement", request.placement, PLACEMENTS))
        model = checks.name("model", request.model)
        node = SourceNode(model, request.pool_pages, placement, request.chunk_tokens)
        return bench_pb2.BenchBuilt(huge_share=await self._source.build(node))

    async def Prepare(self, request: bench_pb2.BenchPreparation, context: Context) -> bench_pb2.BenchReply:
        prompt = _prompt(request.prompt)
        checks.within("count of prompts", request.count, 1, checks.MAX_ENTRIES)
        await self._source.prepare(
            Preparation(prompt, request.cached, request.scattered, request.digests, request.count)
        )
        return bench_pb2.BenchReply()

    async def Digests(self, request: bench_pb2.BenchPrompt, context: Context) -> bench_pb2.BenchDigests:
        digests = await self._source.digests(_prompt(request))
        return bench_pb2.BenchDigests(digests=digests.ravel().tolist())

    async def Usage(self, request: bench_pb2.BenchUsageRequest, context: Context) -> bench_pb2.BenchUsage:
        usage = self._source.usage()
        return bench_pb2.BenchUsage(cpu_s=usage.cpu_s, resident_bytes=usage.resident_bytes)


class GrpcBench(Client):
    """A source, called."""

    _service = bench_pb2_grpc.BenchStub

    def __init__(self, address: str, channels: Channels, settings: ClientSettings) -> None:
        super().__init__(address, channels, settings)

    async def build(self, node: SourceNode) -> float:
        """How much of the pool is on huge pages, 0 to 1. Raises what building the node raises, `PeerLost`."""
        request = bench_pb2.BenchNode(
            model=node.model, pool_pages=node.pool_pages, placement=node.placement, chunk_tokens=node.chunk_tokens
        )
        reply = await self._told("Build", request)
        checks.within("huge_share", reply.huge_share, 0.0, 1.0)
        return float(reply.huge_share)

    async def prepare(self, preparation: Preparation) -> None:
        request = bench_pb2.BenchPreparation(
            prompt=_prompt_to_pb(preparation.prompt),
            cached=preparation.cached,
            scattered=preparation.scattered,
            digests=preparation.digests,
            count=preparation.count,
        )
        await self._told("Prepare", request)

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        """uint64 [pages, 2]."""
        reply = await self._told("Digests", _prompt_to_pb(prompt))
        return checks.column("digests", reply.digests, np.uint64, 2 * prompt.pages).reshape(-1, 2)

    async def usage(self) -> Usage:
        reply = await self._told("Usage", bench_pb2.BenchUsageRequest())
        return Usage(reply.cpu_s, int(reply.resident_bytes))

    async def _told(self, call: str, request: checks.Message) -> Any:
        async with self._call(call, request) as stub:
            return await getattr(stub, call)(request, timeout=checks.BENCH_DEADLINE_S)


def _prompt(message: bench_pb2.BenchPrompt) -> BenchPrompt:
    checks.within("pages of the prompt", message.pages, 1, checks.MAX_PAGES)
    return BenchPrompt(message.seed, message.pages)


def _prompt_to_pb(prompt: BenchPrompt) -> bench_pb2.BenchPrompt:
    return bench_pb2.BenchPrompt(seed=prompt.seed, pages=prompt.pages)
