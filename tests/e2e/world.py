"""A small fleet of real processes, one loop to talk with them, and one process to compare with."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.demo.reference import Reference
from pdkv.config import PrefillConfig
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateDone, GenerateRequest, NodeStatus, Sampling
from pdkv.node.ports import DecodeService
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from tests.waiting import DEADLINE_S, until

T = TypeVar("T")
CHUNK = 512
GREEDY = Sampling(max_tokens=8)
COMMON = {"model": "tiny", "threads": 1, "insecure": True, "no_touch_pool": True}
"""Many pools at once, of which little is used."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    done: GenerateDone | None = None
    """None as long as the stream runs, and if it was cut."""

    @property
    def whole(self) -> GenerateDone:
        assert self.done is not None
        return self.done


class World:
    """Prefill, decode and router, started together; more nodes by `start`.

    They are forked, which takes a tenth of what a start takes; the nodes of `test_mtls` are started as a user does.
    """

    prefill: NodeProcess
    decode: NodeProcess
    router: NodeProcess

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._fleet = Nursery()
        self._names = iter(range(1_000_000))
        self._routers: set[str] = set()
        self.nodes: GrpcDirectory
        self.reference = Reference(PrefillConfig(model="tiny", chunk_tokens=CHUNK, threads=1))

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """In the loop that owns the processes and channels."""
        return self._runner.run(asyncio.wait_for(body, 4 * DEADLINE_S))

    async def open(self) -> None:
        self.nodes = GrpcDirectory(PlainText())
        await self._fleet.__aenter__()
        address = free_address()
        self.prefill, self.decode = await asyncio.gather(
            self.start("prefill", "p0", bind=address), self.start("decode", "d0", prefill_addresses=address)
        )
        self.router = await self.start_router("r0", self.prefill, self.decode)
        await self.until_up(self.router)

    async def close(self) -> None:
        await self.nodes.close()
        self.reference.close()
        await self._fleet.__aexit__(None, None, None)

    async def start(self, role: str, name: str, **flags: str | int | bool) -> NodeProcess:
        """A node like the others but for `flags`."""
        chunk = {"chunk_tokens": CHUNK} if role == "prefill" else {}
        return await self._fleet.start(role, name, {**COMMON, **chunk, **flags})

    async def start_router(
        self, name: str, prefill: NodeProcess | str, decode: NodeProcess | str, **flags: str
    ) -> NodeProcess:
        """Over one node each, or over addresses with commas."""
        known = {"prefill_addresses": prefill, "decode_addresses": decode}
        addresses = {flag: of if isinstance(of, str) else of.address for flag, of in known.items()}
        router = await self._fleet.start("router", name, {**addresses, "insecure": True, **flags})
        self._routers.add(router.address)
        return router

    async def until_up(self, router: NodeProcess) -> None:
        """Until it knows all of its nodes as ready: a decode node is so once it has met a prefill node."""
        status = self.nodes.router(router.address).status
        await until(status, lambda s: {*s.prefill.values(), *s.decode.values()} == {"up"}, "the router's nodes are up")

    def request(self, seed: int, length: int, prefill: NodeProcess | None = None, **more: Any) -> GenerateRequest:
        """A prompt that only its seed has, for the prefill node `prefill` (`self.prefill` unless given)."""
        return GenerateRequest(
            request_id=RequestId(f"r-{next(self._names)}"),
            tokens=text_tokens(9000 + seed, length),
            prefill_address=(prefill or self.prefill).address,
            **{"sampling": GREEDY, "want_logits": True, **more},
        )

    def service(self, node: NodeProcess) -> DecodeService:
        is_router = node.address in self._routers
        return self.nodes.router(node.address) if is_router else self.nodes.decode(node.address)

    async def ask(
        self,
        request: GenerateRequest,
        node: NodeProcess | None = None,
        after_first: Callable[[], Awaitable[object]] | None = None,
    ) -> Answer:
        """From `self.decode` unless another node is named. Raises as the stream does."""
        answer = Answer()
        async with aclosing(self.service(node or self.decode).generate(request)) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    answer.done = event
                    continue
                answer.tokens.append(event.token)
                answer.logits_digests.append(event.logits_digest)
                if len(answer.tokens) == 1 and after_first is not None:
                    await after_first()
        return answer

    async def alone(self, tokens: UInt32Array, sampling: Sampling = GREEDY) -> MonolithAnswer:
        """What one process answers."""
        return await self.reference.ask(np.ascontiguousarray(tokens), sampling)

    async def decode_status(self) -> NodeStatus:
        return await self.nodes.decode(self.decode.address).status()

    async def prefill_status(self, node: NodeProcess | None = None) -> NodeStatus:
        return await self.nodes.peer((node or self.prefill).address).status()


def free_address() -> str:
    """Of a port that nobody listens on now: for a node that others must know before it serves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def at_rest(status: NodeStatus) -> bool:
    """Nothing runs, and no page belongs to a request: each is free or ordinary cache."""
    pages = status.pages
    held = pages["reserved"] + pages["private"] + pages["quarantined"] + status.requests + status.leases
    return held == 0 and pages["free"] + pages["cached"] == pages["total"]
