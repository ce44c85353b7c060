"""A node of its own process, whose pages are tiny, and which tells the process that started it what it spent.

Guarantees: it is assembled and serves as any other node does, from `cli.assemble` to its gRPC server and NIXL agents;
only its pages have rows of 4 bytes in place of a model's, so that a million tokens are 8 MiB of bytes and 16,384 pages,
and its engine is the synthetic one. It ends when it is told to, or with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np

from pdkv.adapters.synthetic.engine import SyntheticModel, synthetic_model
from pdkv.cli.assemble import parts_of
from pdkv.cli.bench.control_memory import MemoryWatch
from pdkv.cli.bench.control_probe import Probe, Span
from pdkv.cli.serve import die_with
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig
from pdkv.errors import PeerLost, ProtocolError
from pdkv.geometry.page_layout import Group, PageFormat, Segment
from pdkv.geometry.row_format import IndexFormat, RowFormat, RowPart
from pdkv.ids import PageHashes, RequestId
from pdkv.kvcache.manager import CacheManager
from pdkv.machine.heap import keep_freed
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import together
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.stages import Stage
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint

PAGE_TOKENS = 64
VOCABULARY = 154_880
"""GLM-5.3's: as many logits are looked at after each chunk."""
Role = Literal["prefill", "decode"]
MEASURE = "measure"
MEMORY = "memory"
END = "end"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    role: Role
    pages: int
    """That a request can get."""
    chunk_tokens: int
    token_us: float
    """Of the engine, which sleeps most of it: long enough that a chunk's pages are on their way before the next."""
    scattered: bool = False
    """No two free pages are neighbours: every second page is held for good."""
    memory: bool = False
    """Its memory is watched, at every stage; its parts are not timed, as their times would be in it."""


class Moment(NamedTuple):
    """A stage that a request has reached, on this machine's monotonic clock."""

    stage: Stage
    request: RequestId
    at_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Since the process began, and, of spans and moments, since it was asked last."""

    at_s: float
    cpu_s: float
    """Of all threads, those that gRPC and UCX started included."""
    threads_s: dict[str, float]
    """CPU of those that Python knows, by name."""
    spans: list[Span]
    moments: list[Moment]


def tiny_pages() -> PageFormat:
    """One layer, 4 + 4 bytes a token: pages of 512 bytes."""
    main = RowFormat("tiny", (RowPart("latent", 4, "e4m3"),), "none", "halves")
    index = IndexFormat("tiny", key_bytes=3, scale_bytes=1)
    main_bytes, index_bytes = PAGE_TOKENS * main.row_bytes, PAGE_TOKENS * index.row_bytes
    segments = (
        Segment("main.0", Group.MAIN, 0, main_bytes, 0),
        Segment("index.0", Group.INDEX, 0, index_bytes, main_bytes),
    )
    return PageFormat(PAGE_TOKENS, segments, main, index, PAGE_TOKENS)


def run_node(spec: NodeSpec, pipe: Connection, parent: int) -> None:
    """The whole life of the process: sends its address, then a `Spent` for a `MEASURE`, a `Held` for a `MEMORY`."""
    die_with(parent)
    logging.basicConfig(level="ERROR", format=f"{spec.role}: %(message)s")
    keep_freed()  # as every serving process
    probe = Probe()
    if not spec.memory:
        probe.attach()
    asyncio.run(_life(spec, pipe, probe))


async def received(pipe: Connection) -> Any:
    """What the other process says next. Raises `PeerLost` if it has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise PeerLost("the other process of the benchmark has ended") from error


async def _life(spec: NodeSpec, pipe: Connection, probe: Probe) -> None:
    moments: list[Moment] = []
    watch = MemoryWatch()

    def note(stage: Stage, request: RequestId) -> None:
        moments.append(Moment(stage, request, time.monotonic()))

    def look(stage: Stage, request: RequestId) -> None:
        watch.look()

    parts = replace(_parts(spec), at=look if spec.memory else note)
    directory = GrpcDirectory(PlainText())
    try:
        if spec.scattered:
            _scatter(parts.manager)
        node = _node(spec, parts, directory)
        services = Services(prefill=node) if isinstance(node, PrefillNode) else Services(decode=node)
        server = GrpcServer(Endpoint("127.0.0.1:0"), services, PlainText())
        pipe.send(await server.start())
        async with together() as group:
            runs = [node.keeper.run, *([node.watch_leases] if isinstance(node, PrefillNode) else [])]
            beside = [group.create_task(run()) for run in runs]
            while (asked := await received(pipe)) in (MEASURE, MEMORY):
                if isinstance(node, DecodeNode) and node.farewells:
                    await asyncio.wait(node.farewells)
                if asked == MEMORY:
                    pipe.send(watch.taken())
                    continue
                told = moments.copy()
                moments.clear()
                pipe.send(_spent(probe, told))
            for task in beside:
                task.cancel()
        if asked != END:
            raise ProtocolError(f"a benchmark's node was asked for {asked!r}")
        await server.stop(0.0)
    finally:
        await directory.close()
        parts.close()


def _parts(spec: NodeSpec) -> NodeParts:
    held = 2 * spec.pages if spec.scattered else spec.pages
    cls: type[NodeConfig] = PrefillConfig if spec.role == "prefill" else DecodeConfig
    config = cls(
        node_id=spec.role,
        engine="synthetic",
        synthetic_token_us=spec.token_us,
        pool_pages=held + 1,
        insecure=True,
    )
    model = synthetic_model("tiny")
    shape = replace(model.shape, num_layers=1, indexer_types=("full",), vocab_size=VOCABULARY)
    return parts_of(config, SyntheticModel(shape, model.seed), tiny_pages())


def _node(spec: NodeSpec, parts: NodeParts, directory: GrpcDirectory) -> PrefillNode | DecodeNode:
    if spec.role == "prefill":
        return PrefillNode(parts, PrefillSettings(spec.chunk_tokens))
    settings = DecodeSettings(prefill_allow=("127.0.0.1:*",), queue_limit=1024, peer_pages_share=1.0)
    return DecodeNode(parts, directory, settings)


def _scatter(manager: CacheManager) -> None:
    """Leave every second page free: the others are held back for good."""
    everything = manager.reserve(PageHashes(), manager.allocator.free_count, max_hit_pages=0)
    second = np.arange(len(everything.pages)) % 2 == 0
    manager.quarantine(everything, everything.pages.where(second), "no two free pages are to be neighbours")
    manager.end(everything)


def _spent(probe: Probe, moments: list[Moment]) -> Spent:
    threads = {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }
    return Spent(time.monotonic(), time.process_time(), threads, probe.taken(), moments)
