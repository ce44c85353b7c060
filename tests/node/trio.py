"""Two prefill nodes and a decode node, hooks at every stage of a request, and wires that break or go quiet."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pdkv.contract import ContractFacts
from pdkv.errors import PdkvError, PeerLost, RemoteError
from pdkv.ids import LeaseId, PageHash, RequestId
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import settle
from pdkv.node.messages import FailurePolicy, GenerateDone, LeaseCall, NodeIntro, PrefillEvent, PrefillRequest
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.stages import Stage
from pdkv.transfer.backends.base import AgentName, End, Side
from pdkv.transfer.backends.loopback import LoopbackBackend, LoopbackNet
from tests.node.scene import Gate, alone, gated, held, request, run, until
from tests.node.toy import CHUNK, OneByOne, Pair, make_parts

T = TypeVar("T")
LENGTH = 300
"""Three chunks: pages 0 and 1, pages 2 and 3, and the tail."""
HASTY = DecodeSettings(silence_s=0.5)
"""For tests that stop a node, and wait until it is given up."""


class StoppableNet(LoopbackNet):
    """Reads from a process that was stopped don't end until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: set[str] = set()
        self.posted = threading.Event()

    def backend(self, name: AgentName) -> LoopbackBackend:
        super().backend(name)
        return _StoppableBackend(self, name)


class _StoppableBackend(LoopbackBackend):
    _net: StoppableNet

    def post(self, local: Side, remote: Side) -> Any:
        try:
            return super().post(local, remote)
        finally:
            self._net.posted.set()

    def poll(self, read: Any) -> End | None:
        return None if read.source in self._net.stopped else super().poll(read)


class Wire:
    """The prefill node at an address: a `PrefillPeer` that can die or be stopped, like its process."""

    def __init__(self, node: PrefillNode, net: StoppableNet) -> None:
        self.node = node
        self.asked: list[PrefillRequest] = []
        self._net = net
        self._name = str(node.parts.name)
        self._dead = False
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._changed = asyncio.Event()
        self.left = asyncio.Event()
        """Somebody has stopped waiting for an answer."""

    def die(self) -> None:
        self._dead = True
        self._net.kill(self._name)
        self._changed.set()

    def stop(self) -> None:
        self._net.stopped.add(self._name)
        self._goes_on.clear()
        self._changed.set()

    def go_on(self) -> None:
        self._net.stopped.discard(self._name)
        self._goes_on.set()

    def lose_leases(self) -> None:
        for lease in self.node.source.leases.expire(math.inf):
            self.node.source.let_go(LeaseId(lease.lease_id))

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        return await self._through(self.node.connect(intro))

    async def renew_lease(self, call: LeaseCall) -> float:
        return await self._through(self.node.renew_lease(call))

    async def release_lease(self, call: LeaseCall) -> None:
        await self._through(self.node.release_lease(call))

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        self.asked.append(request)
        async with aclosing(self.node.prefill(request)) as events:
            while (event := await self._through(anext(events, None))) is not None:
                yield event

    async def _through(self, call: Awaitable[T]) -> T:
        """The answer, unless the process dies or stops first; what is no error of ours comes as over a real wire."""
        answer = asyncio.ensure_future(call)
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            while not (answer.done() and self._goes_on.is_set()) and not self._dead:
                self._changed.clear()
                await asyncio.wait({answer, changed}, return_when=asyncio.FIRST_COMPLETED)
                await self._goes_on.wait()
            if self._dead:
                raise PeerLost("connection reset")
            return answer.result()
        except asyncio.CancelledError:
            self.left.set()
            raise
        except PdkvError:
            raise
        except Exception as error:
            raise RemoteError(f"INTERNAL: {error}", code="INTERNAL") from error
        finally:
            for waiting in (answer, changed):
                waiting.cancel()
                await settle(waiting)


@dataclass
class Trio:
    pair: Pair
    """The decode node, and the first prefill node."""
    wires: list[Wire]
    """At addresses "p0" and "p1"."""
    net: StoppableNet
    seen: Counter[Stage] = field(default_factory=Counter)
    at: dict[Stage, Callable[[], object]] = field(default_factory=dict)
    """Done once, when the stage is reached."""
    gates: list[Gate] = field(default_factory=list)
    committed: set[PageHash] = field(default_factory=set)
    reread: list[PageHash] = field(default_factory=list)
    """Pages that were read although they had been committed."""

    @property
    def decode(self) -> DecodeNode:
        return self.pair.decode

    def hook(self, stage: Stage, request: RequestId) -> None:
        self.seen[stage] += 1
        if stage in self.at:
            self.at.pop(stage)()

    def on(self, stage: Stage, do: Callable[[], object]) -> None:
        """`do` it when the first node's request comes to that stage, and is still under way."""
        if stage in (Stage.COMPUTING, Stage.SEALED, Stage.DONE):  # prefill is quick: decode has to have heard of it
            self.at[Stage.ACCEPTED] = lambda: self.at.update({stage: do})
        elif stage in (Stage.RENEWED, Stage.READING, Stage.ARRIVED, Stage.COMMITTED):  # the rest is still to come
            gate = gated(self.wires[0].node.parts.engine, "forward", at=2)
            self.at[stage] = lambda: self._then(do, gate)
            self.gates.append(gate)
        else:
            self.at[stage] = do

    def _then(self, do: Callable[[], object], gate: Gate) -> None:
        try:
            do()
        finally:
            gate.open()

    async def rested(self) -> None:
        """Every page of all three is free or cache, once all reads have ended and the stopped go on."""
        for gate in self.gates:
            gate.open()
        for wire in self.wires:
            wire.go_on()
        await until(lambda: not self.decode.links._dialling)
        await asyncio.gather(*self.decode.farewells)
        nodes: list[Any] = [self.decode, *(wire.node for wire in self.wires)]
        await until(lambda: all(not node.status().requests for node in nodes))
        for wire in self.wires:
            wire.lose_leases()  # of a node that died before it could be told
        await until(lambda: all(not held(node) for node in nodes))
        for node in nodes:
            manager = node.parts.manager
            manager.check()
            assert (len(manager.reservations), len(manager.leased), len(manager.held_back)) == (0, 0, 0)
        queue = self.decode.queue
        assert (len(queue), len(queue.shares), len(self.decode.farewells)) == (0, 0, 0)
        assert not self.reread


def _watch_reads(trio: Trio) -> None:
    """Note which pages are committed, and whether one of them is read again."""
    parts = trio.decode.parts
    commit, read = parts.manager.commit, parts.transfer.read

    def committing(verified: Any) -> Any:
        standing = commit(verified)
        trio.committed |= set(verified.hashes)
        return standing

    def reading(order: Any) -> Any:
        trio.reread += set(order.hashes) & trio.committed
        return read(order)

    parts.manager.commit = committing  # type: ignore[method-assign]
    parts.transfer.read = reading  # type: ignore[method-assign]


def play(
    scenario: Callable[[Trio], Awaitable[None]],
    *,
    pages: int = 64,
    settings: DecodeSettings | None = None,
    **facts: Any,
) -> None:
    """A scenario of three nodes in a loop of its own; `facts` are the contract's of all of them."""
    made: list[Trio] = []
    net = StoppableNet()
    contract = ContractFacts(**{"weights_id": "toy", **facts})

    def hook(stage: Stage, request: RequestId) -> None:
        made[0].hook(stage, request)

    def prefill(name: str) -> PrefillNode:
        return PrefillNode(
            replace(make_parts(name, contract, net), at=hook), PrefillSettings(chunk_tokens=CHUNK, lease_ttl_s=2.0)
        )

    directory = OneByOne({})
    parts = replace(make_parts("d0", contract, net, pages=pages), at=hook)
    settings = settings or DecodeSettings()
    settings = replace(settings, recompute_chunk_tokens=CHUNK, prefill_allow=("*",))
    nodes = [prefill("p0"), prefill("p1")]
    pair = Pair(nodes[0], DecodeNode(parts, directory, settings), net, directory)

    async def main(_: Pair) -> None:
        trio = Trio(pair, [Wire(node, net) for node in nodes], net)
        made.append(trio)
        directory.peers.update({"p0": trio.wires[0], "p1": trio.wires[1]})
        _watch_reads(trio)
        await scenario(trio)

    try:
        run(main, pair)
    finally:
        nodes[1].parts.close()


# --- a request that may be failed, and what may come of it ------------------------------------------------------------


def fallible(policy: FailurePolicy | None, **more: Any) -> Any:
    return request(LENGTH, prefill_address="p0", prefill_alternates=("p1",), on_failure=policy, **more)


async def ended(asking: asyncio.Task[Any]) -> Any:
    """Tokens and `GenerateDone`, or the error."""
    await asyncio.wait([asking])
    if asking.cancelled():
        return None
    return asking.exception() or asking.result()


async def saved(trio: Trio, outcome: Any, policy: FailurePolicy) -> None:
    """It came to its end with right tokens, in the way that the policy says."""
    assert not isinstance(outcome, BaseException), repr(outcome)
    tokens, done = outcome
    assert tuple(tokens) == alone(trio.pair, fallible(policy))
    assert isinstance(done, GenerateDone)
    if policy is FailurePolicy.RETRY:
        assert (done.retries, done.recomputed_tokens) == (1, 0)
        assert [len(wire.asked) for wire in trio.wires] == [1, 1]
    else:
        assert done.retries == 0
        assert done.recomputed_tokens > 0
        assert trio.seen[Stage.RECOMPUTING] == -(-done.recomputed_tokens // 128)
        assert not trio.wires[1].asked


def changed_events(wire: Wire, change: Callable[[Any], Any]) -> None:
    prefill = wire.prefill

    async def changing(asked: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        async with aclosing(prefill(asked)) as events:
            async for event in events:
                yield change(event)

    wire.prefill = changing  # type: ignore[method-assign]
