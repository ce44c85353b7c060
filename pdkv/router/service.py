"""The router: picks a pair of nodes for a request and passes the token stream on.

Guarantees: a request that a pair refuses, or can't be reached for, *before its first token* goes to another pair, each
at most once and within the request's remaining time; after the first token nothing is asked twice; closing the
stream closes the one behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from pdkv.errors import (
    AccountMismatch,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Draining,
    LaneRefused,
    NeverFits,
    PdkvError,
    PeerLost,
    ProtocolError,
    WrongIncarnation,
)
from pdkv.node.flow import Idle
from pdkv.node.messages import GenerateEvent, GenerateRequest, RouterStatus
from pdkv.node.ports import DecodeService
from pdkv.router.policy import Pair, RoundRobin
from pdkv.router.registry import Registry

log = logging.getLogger(__name__)

DOWN = (PeerLost, Draining, LaneRefused)
"""The node itself can't serve now: pass it over for later requests too."""
REROUTED = (*DOWN, CapacityError, ContractMismatch, WrongIncarnation)
"""Another pair may serve the request. Not what the request itself is wrong about, and not what failed on the way."""
FINAL = (NeverFits, AccountMismatch)
"""Not rerouted though their parent class is: the one holds on every node, the other came after prefill's end."""


class DecodeDirectory(Protocol):
    """Turns an address into a decode node; the connection is made on first use."""

    def decode(self, address: str) -> DecodeService: ...


class Router:
    """Has `generate` and `status`, as a decode node does."""

    def __init__(self, registry: Registry, nodes: DecodeDirectory) -> None:
        self._registry = registry
        self._policy = RoundRobin(registry)
        self._nodes = nodes
        self._requests = 0
        self._idle = Idle(lambda: self._requests)
        self.draining = False

    def status(self) -> RouterStatus:
        return self._registry.status(self._requests)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """The stream of the first pair that takes the request. Raises the last refusal if none does, and
        `ProtocolError` if the request names a prefill node: that is the router's to choose."""
        if request.prefill_address:
            raise ProtocolError("prefill_address is the router's to set", field="prefill_address")
        if self.draining:
            raise Draining("this router is draining")
        self._requests += 1
        try:
            async with aclosing(self._routed(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._requests -= 1
            self._idle.changed()

    async def drain(self) -> None:
        """Take no new requests; return when the running ones have ended."""
        self.draining = True
        await self._idle.wait()

    async def _routed(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + request.remaining_s
        refusals = _Refusals()
        while pair := self._policy.pick(refusals.cover):
            remaining_s = ends_s - loop.time()
            if remaining_s <= 0:
                words = f"no pair of nodes took request {request.request_id} within {request.remaining_s:.3g} s"
                raise DeadlineExceeded(words, request=request.request_id, last=refusals.last)
            asked = dataclasses.replace(request, prefill_address=pair.prefill, remaining_s=remaining_s)
            started = False
            try:
                async with aclosing(self._nodes.decode(pair.decode).generate(asked)) as events:
                    async for event in events:
                        if not started:
                            started = True
                            self._registry.mark_up(pair.prefill)
                            self._registry.mark_up(pair.decode)
                        yield event
                return
            except REROUTED as error:
                if started or isinstance(error, FINAL):
                    raise
                self._refuse(pair, error, refusals)
        raise refusals.last

    def _refuse(self, pair: Pair, error: PdkvError, refusals: _Refusals) -> None:
        log.warning("%s with %s: %s: %s; trying another pair", pair.decode, pair.prefill, error.kind, error)
        culprit = error.fields.get("address", pair.decode)
        if isinstance(error, DOWN) and culprit in (pair.prefill, pair.decode):
            refusals.nodes.add(culprit)
            self._registry.mark_down(culprit, f"{error.kind}: {error}")
        refusals.pairs.add(pair)
        refusals.last = error


@dataclass(slots=True)
class _Refusals:
    """What one request was refused by."""

    pairs: set[Pair] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    last: PdkvError = field(default_factory=lambda: PeerLost("no pair of nodes was tried"))

    def cover(self, pair: Pair) -> bool:
        return pair in self.pairs or pair.prefill in self.nodes or pair.decode in self.nodes
