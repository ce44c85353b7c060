"""gRPC between simulated processes: calls and streams over links that delay, cut, drop, duplicate and reorder.

Guarantees: within one call messages arrive in order or not at all; whoever waits on a call that the network broke gets
`PeerLost` once keepalive notices, and the other side is cancelled, as gRPC does; a call has a deadline; what a service
raises arrives as an error of the same class with the same fields, anything else but a `PdkvError` breaks the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from pdkv.errors import ContractMismatch, DeadlineExceeded, PdkvError, PeerLost
from tests.simulation.world import Process, World

KEEPALIVE_S = 15.0
CALL_S = 5.0
CONNECT_S = 10.0
CLOSED = object()


@dataclass(slots=True)
class Link:
    """One direction between two nodes."""

    cut_until: float = 0.0
    slow_until: float = 0.0
    lose_leases_until: float = 0.0
    reorder_until: float = 0.0
    duplicate: int = 0
    """So many of the next calls are made twice."""
    drop: int = 0
    """So many of the next messages take their connection with them."""


class Network:
    """Who is at which address, and the links between them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.at: dict[str, tuple[Process, Any]] = {}
        """Address to the process that listens there and what it serves."""
        self.calls: dict[int, Call] = {}
        """Those that are not over on either side."""
        self.change: Callable[[str, str, Any], Any] = lambda sender, receiver, message: message
        """What becomes of a message on its way, for faults that garble."""
        self.heard: Callable[[str, Any], None] = lambda receiver, message: None
        """Told in the task that waited for a message of a stream."""
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, source: str, target: str) -> Link:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link()
        return link

    def listen(self, process: Process, service: Any) -> None:
        self.at[process.name] = (process, service)

    def hang_up(self, process: Process) -> None:
        """The process died: its kernel says so to the other ends, if the links are up."""
        found = self.at.get(process.name)
        if found is not None and found[0] is process:
            del self.at[process.name]
        for call in tuple(self.calls.values()):
            if process is call.client:
                call.client_gone()
            elif process is call.server:
                call.server_gone()

    def cut(self, a: str, b: str, seconds: float, *, both: bool = True) -> None:
        """Nothing gets from `a` to `b`, or either way. Whoever is in a call then hears of it by keepalive."""
        for source, target in ((a, b), (b, a)) if both else ((a, b),):
            link = self.link(source, target)
            link.cut_until = max(link.cut_until, self.world.now + seconds)
        if seconds >= KEEPALIVE_S:
            self.silence({a, b}, lambda call: {call.client.name, call.address} == {a, b})

    def stopped(self, name: str, seconds: float) -> None:
        """A process that answers no ping."""
        if seconds >= KEEPALIVE_S:
            self.silence({name}, lambda call: name in (call.client.name, call.address))

    def silence(self, names: set[str], concerned: Callable[[Call], bool]) -> None:
        for call in tuple(self.calls.values()):
            if concerned(call):
                self.world.after(KEEPALIVE_S + self.world.between(0, 0.5), call.broken)

    def delay(self, link: Link) -> float:
        """Until a message arrives that is sent now."""
        world = self.world
        now, seconds = world.now, world.between(0.0001, 0.0015)
        if now < link.slow_until:
            seconds += world.between(0.1, 1.5)
        if now < link.reorder_until:
            seconds += world.between(0.0, 0.3)
        return seconds if now >= link.cut_until else link.cut_until - now + seconds


class Inbox:
    """What has come for the one task that waits for it: a queue without the rest of `asyncio.Queue`."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


@dataclass(slots=True, eq=False)
class Call:
    """One call or stream, seen from both ends."""

    network: Network
    client: Process
    address: str
    method: str
    argument: Any
    timeout_s: float
    serial: int = 0
    server: Process | None = None
    task: Any = None
    """At the server."""
    inbox: Inbox = field(default_factory=Inbox)
    """At the client: replies, then an error or `CLOSED`."""
    client_open: bool = True
    server_open: bool = True
    _arrives: dict[bool, float] = field(default_factory=dict)
    """When the last message of a direction arrives: none overtakes it."""
    _lost: set[bool] = field(default_factory=set)
    """Directions in which nothing arrives any more."""

    @property
    def connects(self) -> bool:
        return self.method.endswith("connect")

    @property
    def streams(self) -> bool:
        return self.method in ("prefill", "generate")

    def start(self) -> None:
        network = self.network
        self.serial = network.world.next_serial()
        network.calls[self.serial] = self
        link = network.link(self.client.name, self.address)
        if link.duplicate:
            link.duplicate -= 1
            twin = Call(network, self.client, self.address, self.method, self.argument, self.timeout_s)
            twin.client_open = False
            twin.serial = network.world.next_serial()
            network.calls[twin.serial] = twin
            twin._send(twin._begin, to_server=True)
            network.world.after(network.world.between(0.05, 5.0), twin.cancel)
        lost = link.lose_leases_until > network.world.now and "lease" in self.method
        if not lost:
            self._send(self._begin, to_server=True)
        self.client.call_later(self.timeout_s, self._late)

    def cancel(self) -> None:
        """The client wants no more of it."""
        if self.client_open:
            self.client_open = False
        self._send(self._cancelled, to_server=True)

    def broken(self) -> None:
        """Keepalive has given the connection up, at both ends."""
        self._answer(PeerLost(f"{self.method} at {self.address}: keepalive watchdog timeout", address=self.address))
        self._cancelled()

    def client_gone(self) -> None:
        self.client_open = False
        self._send(self._cancelled, to_server=True)

    def server_gone(self) -> None:
        self.server_open = False
        self._send(self._reset, to_server=False)

    # --- the way of a message -------------------------------------------------------------------------------------

    def _send(self, arrive: Callable[..., None], *words: Any, to_server: bool) -> None:
        if to_server in self._lost:
            return
        network = self.network
        a, b = (self.client.name, self.address) if to_server else (self.address, self.client.name)
        link = network.link(a, b)
        wait_s = network.delay(link)
        if link.drop or wait_s > KEEPALIVE_S:
            # nothing after it gets through either, until both ends give the connection up
            link.drop = max(link.drop - 1, 0)
            self._lost.add(to_server)
            network.world.after(KEEPALIVE_S + network.world.between(0, 0.5), self.broken)
            return
        at = max(network.world.now + wait_s, self._arrives.get(to_server, 0.0))
        self._arrives[to_server] = at
        network.world.after(at - network.world.now, arrive, *words)

    def _reset(self) -> None:
        self._answer(PeerLost(f"{self.method} at {self.address}: connection reset", address=self.address))

    def _late(self) -> None:
        if self.client_open:
            kind = PeerLost if self.connects else DeadlineExceeded
            self._answer(kind(f"{self.method} at {self.address}: deadline exceeded", address=self.address))
            self._send(self._cancelled, to_server=True)

    def _answer(self, word: Any) -> None:
        """To the client."""
        if self.client_open and not self.client.dead:
            if word is CLOSED or isinstance(word, PdkvError) or not self.streams:
                self.client_open = False
            self.inbox.put(word)
        self._settle()

    def _settle(self) -> None:
        if not self.client_open and not self.server_open:
            self.network.calls.pop(self.serial, None)

    # --- at the server --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        found = self.network.at.get(self.address)
        if found is None:
            self.server_open = False
            if self.connects:  # waits until somebody listens
                self.server_open = True
                self.network.world.after(0.2, self._begin) if self.client_open else self._settle()
                return
            self._send(self._reset, to_server=False)
            return
        self.server, service = found
        if self.server_open:
            self.task = self.server.create_task(self._serve(service))
            self.task.add_done_callback(self._served)

    async def _serve(self, service: Any) -> None:
        """A task of the server's."""
        network = self.network
        method = attrgetter(self.method)(service)
        argument = network.change(self.client.name, self.address, self.argument)
        if self.streams:
            async with aclosing(method(argument)) as events:
                async for event in events:
                    reply = network.change(self.address, self.client.name, event)
                    self._send(self._answer, reply, to_server=False)
            return
        reply = await method(argument)
        self._send(self._answer, network.change(self.address, self.client.name, reply), to_server=False)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.server_open = False
        self._settle()
        if task.cancelled():
            error: BaseException | None = PeerLost(f"{self.method}: cancelled at {self.address}")
        else:
            error = task.exception()
        if error is None:
            if self.streams:
                self._send(self._answer, CLOSED, to_server=False)
        elif isinstance(error, PdkvError):
            self._send(self._answer, resent(error, self.address), to_server=False)
        elif self.server is not None and not self.server.dead:
            self.network.world.broken(f"{self.method} at {self.address} failed with {error!r}")

    def _cancelled(self) -> None:
        """The server hears that nobody listens any more."""
        if not self.server_open:
            return
        if self.server is None:
            self.server_open = False
            self._settle()
        elif self.task is not None:
            self.server.call_soon(self.task.cancel)
        else:
            self.server_open = False
            self._settle()


def resent(error: PdkvError, address: str) -> PdkvError:
    """As it arrives: words, fields and differences, nothing else."""
    kind = type(error)
    if issubclass(kind, ContractMismatch):
        copy: PdkvError = kind(error.differences)
    else:
        copy = kind.__new__(kind)
        PdkvError.__init__(copy, str(error))
    copy.fields = {"address": address, **error.fields}
    return copy


class Remote:
    """A service at an address, as a process calls it: `PrefillPeer`, or whoever generates."""

    part = ""
    """Of the service, which a call is for."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address

    async def connect(self, intro: Any) -> Any:
        return await self._unary(f"{self.part}connect", intro, CONNECT_S)

    async def locate(self, call: Any) -> int:
        return int(await self._unary("source.locate", call, CALL_S))

    async def lend(self, call: Any) -> Any:
        return await self._unary("source.lend", call, CALL_S)

    async def renew_lease(self, call: Any) -> float:
        return float(await self._unary("renew_lease", call, CALL_S))

    async def release_lease(self, call: Any) -> None:
        await self._unary(f"{self.part}release_lease", call, CALL_S)

    def prefill(self, request: Any) -> AsyncGenerator[Any, None]:
        return self._stream("prefill", request, request.remaining_s)

    def generate(self, request: Any) -> AsyncGenerator[Any, None]:
        return self._stream("generate", request, request.remaining_s)

    async def _unary(self, method: str, argument: Any, timeout_s: float) -> Any:
        call = Call(self._network, self._client, self._address, method, argument, timeout_s)
        call.start()
        try:
            reply = await call.inbox.get()
            if isinstance(reply, PdkvError):
                raise reply
            return reply
        finally:
            if call.client_open:
                call.cancel()

    async def _stream(self, method: str, argument: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        call = Call(self._network, self._client, self._address, method, argument, timeout_s)
        call.start()
        try:
            while (event := await call.inbox.get()) is not CLOSED:
                if isinstance(event, PdkvError):
                    raise event
                self._network.heard(self._client.name, event)
                yield event
        finally:
            if call.client_open:
                call.cancel()


class RemoteSource(Remote):
    """`SourcePeer`, of whatever role the node is."""

    part = "source."


class Directory:
    """`node.ports.PrefillDirectory`, or that of sources, and the router's."""

    def __init__(self, network: Network, client: Process, kind: type[Remote] = Remote) -> None:
        self._network = network
        self._client = client
        self._kind = kind

    def peer(self, address: str) -> Any:
        return self._kind(self._network, self._client, address)

    decode = peer

    def drop(self, address: str) -> None:
        """Calls have no connection here that could be a bad one."""
