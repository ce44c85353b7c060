"""The threads of a node, on virtual time: the engine's, the digests' and the one that owns the agent.

Guarantees: what a thread does takes a drawn time and happens at its beginning or its end; one step at a time, first
come, first served; a stopped process's threads stand still too, a dead one's do nothing any more. The code that runs
is the product's: `node.flow.Worker` and `transfer.core.TransferCore`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import xxhash

from pdkv.errors import PdkvError, TransferError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import PeerName
from pdkv.node.flow import Worker
from pdkv.transfer.agents import ReadingAgent
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.core import TransferCore
from pdkv.transfer.engine import LATE_S
from pdkv.transfer.failover import LOOKS_PER_STALL
from pdkv.transfer.orders import PeerOffer, Probe, ReadOrder, ReadOutcome, TransferSettings, TransferStatus
from pdkv.transfer.tasks import Ticket, held_back
from tests.simulation.fabric import Fabric, SimulatedBackend, Watch
from tests.simulation.world import Handle, Process


def when_running(process: Process, action: Callable[[], None]) -> None:
    """Do it now, or when the process goes on; never if it is dead."""
    if process.dead:
        return
    wait_s = process.stopped_until - process.world.now
    if wait_s > 0:
        process.world.after(wait_s + 1e-9, when_running, process, action)
    else:
        action()


class Answer(Future[Any]):
    """A future without a lock: nobody waits for it in a thread."""

    def __init__(self) -> None:
        self._condition: Any = _NO_LOCK
        self._state = "PENDING"
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def done(self) -> bool:
        return self._state in _DONE


class _NoLock(type(threading.RLock())):  # type: ignore[misc]
    """For a `Condition` that nobody waits for. Entered in C, which a class of our own would not be."""

    def notify_all(self) -> None:
        return None


_NO_LOCK = _NoLock()
_DONE = ("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED")


@dataclass(slots=True, eq=False)
class _Work:
    """A step that a thread is to run."""

    step: Callable[[], Any]
    future: Future[Any] = field(default_factory=Answer)
    ran: bool = False
    result: Any = None
    error: Exception | None = None

    def run(self) -> None:
        self.ran = True
        try:
            self.result = self.step()
        except Exception as error:
            self.error = error


class _Executor:
    """What a `Worker` needs of a thread pool."""

    def __init__(self, process: Process, usual_s: float) -> None:
        self.process = process
        self.usual_s = usual_s
        self.slow_until = 0.0
        self._queue: deque[_Work] = deque()
        self._busy = False

    def submit(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        work = _Work(partial(step, *args, **kwargs))
        self._queue.append(work)
        if not self._busy:
            self._next()
        return work.future

    def shutdown(self, **_: Any) -> None:
        self._queue.clear()

    def _next(self) -> None:
        world, self._busy = self.process.world, False
        while self._queue and not self._busy:
            work = self._queue.popleft()
            if not work.future.set_running_or_notify_cancel():
                continue
            self._busy = True
            longer = 20.0 if self.slow_until > world.now else 1.0
            took_s = world.between(0.0, 2.0 * self.usual_s * longer)
            if world.chance(0.5):
                work.run()
            world.after(took_s, when_running, self.process, partial(self._over, work))

    def _over(self, work: _Work) -> None:
        if not work.ran:
            work.run()
        if work.error is None:
            work.future.set_result(work.result)
        else:
            work.future.set_exception(work.error)
        self._next()


class SimulatedWorker(Worker):
    """`node.flow.Worker` without a thread; `usual_s`: how long a step takes on the average."""

    def __init__(self, process: Process, usual_s: float) -> None:
        self.executor = _Executor(process, usual_s)
        self._pool = self.executor  # type: ignore[assignment]


class SimulatedTransfer:
    """`node.ports.Transfer` over the product's core: it steps when commands come, reads end or deadlines pass."""

    def __init__(
        self,
        fabric: Fabric,
        process: Process,
        watch: Watch,
        name: PeerName,
        pool: PoolMap,
        settings: TransferSettings,
        *,
        rails: int = 1,
    ) -> None:
        self.process = process
        self.settings = settings
        self.closed = False
        self.checked: Callable[[ReadOrder, ReadOutcome], None] = lambda order, outcome: None
        """Told of every read's outcome."""
        self._name = name
        self._due: Handle | None = None
        self._missed_s = 0.0

        def agent(rail: int, name: AgentName) -> SimulatedBackend:
            backend = SimulatedBackend(fabric, process, name, rail)
            backend.watch, backend.moved = watch, self._soon
            return backend

        self.core = TransferCore({f"rail{i}": partial(agent, i) for i in range(rails)}, name, pool, settings)

    # --- the port -------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> bytes:
        return self.core.metadata

    @property
    def metadata_checksum(self) -> int:
        return xxhash.xxh3_64_intdigest(self.core.metadata)

    @property
    def backend_name(self) -> str:
        return self.core.backend_name

    def add_peer(self, peer: PeerName, metadata: bytes, checksum: int, pool: PoolMap) -> Future[None]:
        ticket: Ticket[None] = Ticket(Answer(), self.process.time())
        offer = PeerOffer(metadata, checksum, pool)
        return self._submit(lambda: self.core.add_peer(peer, offer, ticket), ticket.future, self.settings.connect_s)

    def remove_peer(self, peer: PeerName) -> Future[None]:
        ticket: Ticket[None] = Ticket(Answer(), self.process.time())
        return self._submit(lambda: self.core.remove_peer(peer, ticket), ticket.future)

    def read(self, order: ReadOrder) -> Future[ReadOutcome]:
        ticket: Ticket[ReadOutcome] = Ticket(Answer(), self.process.time())
        ticket.future.add_done_callback(
            lambda future: None if future.exception() else self.checked(order, future.result())
        )
        return self._submit(lambda: self.core.read(order, ticket), ticket.future, order.deadline_s)

    def cancel(self, read: Future[ReadOutcome]) -> None:
        self._submit(lambda: self.core.cancel(read), Answer())

    def probe(self, peer: PeerName) -> Future[Probe]:
        ticket: Ticket[Probe] = Ticket(Answer(), self.process.time())
        return self._submit(lambda: self.core.probe(peer, ticket), ticket.future, self.settings.probe_s)

    def expect_reads(self, *, peers_may: bool) -> None:
        """Nobody sleeps here."""

    def lane(self, peer: PeerName) -> str:
        known = self.core.peers.get(peer)
        return "unknown" if known is None else known.lane.name

    def copies(self, peer: PeerName) -> bool:
        known = self.core.peers.get(peer)
        return known is not None and known.lane.copied

    def status(self) -> TransferStatus:
        return self.core.status(self.process.time())

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.core.close("the transfer engine was closed")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _submit(self, action: Callable[[], None], future: Future[Any], wait_s: float = 0.0) -> Future[Any]:
        future.set_running_or_notify_cancel()
        world = self.process.world
        world.after(world.between(0.0, 0.0004), when_running, self.process, lambda: self._command(action, future))
        if wait_s:
            late = self.process.call_later(wait_s, self._soon)
            future.add_done_callback(lambda _: late.cancel())
        return future

    def _looks(self) -> None:
        """As the product's thread does: what was missed by standing still is nobody else's fault."""
        late_s, self._missed_s = self.process.missed_s - self._missed_s, self.process.missed_s
        if late_s > LATE_S:
            self.core.postpone(late_s)

    def _command(self, action: Callable[[], None], future: Future[Any]) -> None:
        if self.closed:
            future.set_exception(TransferError(f"the transfer engine of {self._name} is closed"))
            return
        self._looks()
        try:
            action()
        except PdkvError as error:
            future.set_exception(error)
        self._step()

    def _soon(self, from_s: float = 0.0, within_s: float = 0.0004) -> None:
        """The next step is in `from_s` at the earliest, and `within_s` after that at the latest."""
        world = self.process.world
        wait_s = max(from_s, 0.0) + world.between(0.0, within_s)
        if self.closed or (self._due is not None and self._due.when() <= world.now + wait_s):
            return
        if self._due is not None:
            self._due.cancel()
        self._due = world.after(wait_s, when_running, self.process, self._step)

    def _step(self) -> None:
        self._due = None
        if not self.closed:
            self._looks()
            self.core.serve()
            while self.core.step(self.process.time()) and self.core._changed:
                pass  # nothing ends by itself between two steps at one time
            # fences, lines and deadlines that were postponed have no timer of their own
            if self.core.busy and (self._missed_s or held_back(self.core._unsettled, 0.0)):
                self._soon(within_s=self.settings.fence_after_s / 4)
            if any(_may_go(rail.readers._retired) for rail in self.core._rails):
                self._soon()
            if (look_s := self._next_look_s()) < math.inf:
                self._soon(look_s, self.settings.line_stall_s / LOOKS_PER_STALL)

    def _next_look_s(self) -> float:
        """Until `Failover` may do something that no end of a read calls for; inf if it won't."""
        stall_s, now, look_s = self.settings.line_stall_s, self.process.time(), math.inf
        for peer in self.core.peers.values():
            if len(peer.lines) == 1 or peer.lost:
                continue
            for line in peer.lines:
                if line.down:
                    look_s = look_s if line.running else min(look_s, line.retry_s)
                elif line.running:
                    # others show that it is the line, or are asked
                    stalled_s = line.quiet_s + stall_s
                    if stalled_s > now or any(o.moved_s > now - stall_s / 2 for o in peer.up if o is not line):
                        look_s = min(look_s, stalled_s)
                    for other in peer.lines:
                        if not (other.running or other.down):
                            look_s = min(look_s, max(line.quiet_s + stall_s / 2, other.moved_s + stall_s / 4))
        return max(look_s, self.core._failover._look_s) - now


def _may_go(fenced_off: ReadingAgent | None) -> bool:
    """The next step destroys it, as `Rotation.finish` does."""
    return fenced_off is not None and all(run.stranded or run.task.failure for run in fenced_off.running)
