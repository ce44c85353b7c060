"""The transfer engine: one thread that owns the node's agents, and the calls that any thread may make to it.

Guarantees: an agent is made, used and destroyed in that thread; every call answers through its future, also when the
thread ends; a new command wakes the thread at once; the thread polls without a pause while bytes move, and sleeps
between polls when none do, at most `idle_s`, so that peers can connect and be served; after `close` nothing lands.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import xxhash

from pdkv.errors import PdkvError, TransferError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import PeerName
from pdkv.transfer.backends.base import UNKNOWN_LANE, BackendFactory, Lane
from pdkv.transfer.core import TransferCore
from pdkv.transfer.orders import (
    Flow,
    PeerOffer,
    Probe,
    ReadOrder,
    ReadOutcome,
    ReadStatus,
    TransferSettings,
    TransferStatus,
)
from pdkv.transfer.rails import RailFactories
from pdkv.transfer.tasks import Ticket

__all__ = [
    "Flow",
    "Probe",
    "ReadOrder",
    "ReadOutcome",
    "ReadStatus",
    "TransferEngine",
    "TransferSettings",
    "TransferStatus",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSED = "the transfer engine was closed"
SPIN_S = 0.0001
"""Polled without a pause for so long after something moved."""
FLOWING_S = 0.05
"""Bytes that flowed so lately flow on: over TCP they wait for room in the socket, which is there again after 2 ms of a
link of 2 Gbit/s, and nobody tells."""
MORE_S = 0.0001
"""A step that moved bytes for so long: a quarter of a megabyte and more."""
FIRST_SLEEP_S = 0.00005
LATE_S = 0.5
"""A step that begins so late is that of a process which stood still: nobody else is to blame for that time."""
WORK_S = 0.00005
"""Polling that took the thread more CPU time than this moved bytes. An idle poll takes 2 µs; after a long sleep 40, and
over 80 where others used the caches meanwhile, so such a one says nothing until the next has said the same."""


class _Pace:
    """How long to sleep between two steps.

    Not at all just after an own read was posted or ended, then twice as long each time. Bytes that only flow, here or
    to a peer, can wait for `reading_s` in the socket, unless a step had so many to move that there may be more at once:
    polled without a pause they took twice the CPU, at the same rate. When no own read is left there is nothing to wait
    for but peers that read, and a command wakes the thread at once.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._flowed_at = self._moved_at = -math.inf
        self._sleep_s = self._rested_s = 0.0
        self._more = False

    def flowed(self, now: float, work_s: float) -> None:
        """To serve took the thread so much CPU time: it moved bytes to a peer, or came cold from a long sleep."""
        self._more = work_s > MORE_S
        if self._rested_s <= self._settings.reading_s:
            self._flowed_at = now
        self._sleep_s = self._settings.reading_s / 2

    def came(self, work_s: float) -> None:
        """A step for own reads that run took so much: bytes came."""
        self._more |= work_s > MORE_S
        self._sleep_s = self._settings.reading_s / 2

    def moved(self, now: float) -> None:
        """Something did that own reads wait for."""
        self._moved_at, self._sleep_s = now, 0.0

    def ended(self) -> None:
        """No own read is left."""
        self._moved_at, self._sleep_s = -math.inf, self._settings.idle_s

    def rest(self, now: float, *, reading: bool) -> float:
        """Seconds until the next step; `reading`: own reads run, or peers may read from here."""
        more, self._more = self._more, False
        if more or now - self._moved_at < SPIN_S:
            self._rested_s = 0.0
            return 0.0
        busy = reading or now - self._flowed_at < FLOWING_S
        most = self._settings.reading_s if busy else self._settings.idle_s
        self._rested_s = self._sleep_s = min(max(2 * self._sleep_s, FIRST_SLEEP_S), most)
        return self._rested_s


class TransferEngine:
    """Reads pages of peers into this node's pool, and serves this node's pages to them.

    Raises what the backend raises if the agent that serves can't be made or the pool can't be registered.
    """

    def __init__(
        self,
        rails: BackendFactory | RailFactories,
        name: PeerName,
        pool: PoolMap,
        *,
        settings: TransferSettings | None = None,
    ) -> None:
        self._name = name
        self._settings = settings or TransferSettings()
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ended = False
        self._stopping = False
        self._lending = False
        self._in_hand: Future[Any] | None = None
        self._end: Future[None] = Future()
        started: Future[TransferCore] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(rails, pool, started), name=f"transfer {name.node}", daemon=True
        )
        self._thread.start()
        self._core = started.result()
        # an agent that is alive when the interpreter ends takes the process down
        atexit.register(self.close)

    @property
    def metadata(self) -> bytes:
        """Of the agent that serves, for `add_peer` on the other side."""
        return self._core.metadata

    @property
    def metadata_checksum(self) -> int:
        """xxh3_64 of `metadata`."""
        return xxhash.xxh3_64_intdigest(self._core.metadata)

    @property
    def backend_name(self) -> str:
        return self._core.backend_name

    def add_peer(self, peer: PeerName, metadata: bytes, checksum: int, pool: PoolMap) -> Future[None]:
        """Make a peer readable; done when a scratch read from it has ended well and its lane is known.

        Idempotent for equal metadata. The future raises `ProtocolError` (damaged metadata, or another agent's),
        `ContractMismatch` (naming segments), `BoundsError` (addresses outside its registered memory), `PeerLost`,
        `DeadlineExceeded` (no answer within `connect_s`), `LaneRefused` (RDMA required).
        """
        ticket: Ticket[None] = Ticket()
        offer = PeerOffer(metadata, checksum, pool)
        return self._submit(lambda: self._core.add_peer(peer, offer, ticket), ticket.future)

    def remove_peer(self, peer: PeerName) -> Future[None]:
        """No new read at once; done when its last read has settled. Unknown peers are removed already."""
        ticket: Ticket[None] = Ticket()
        return self._submit(lambda: self._core.remove_peer(peer, ticket), ticket.future)

    def read(self, order: ReadOrder) -> Future[ReadOutcome]:
        """However a read ends, its future has a result; it raises only for what was never posted.

        That is `PeerLost` for a peer that is not connected, `BoundsError` for pages outside a pool, and
        `TransferError` when the engine is closed.
        """
        ticket: Ticket[ReadOutcome] = Ticket()
        return self._submit(lambda: self._core.read(order, ticket), ticket.future)

    def cancel(self, read: Future[ReadOutcome]) -> None:
        """Give up waiting: `read`, as `read()` returned it, is answered at once; UNSETTLED if a part of it runs."""
        self._submit(lambda: self._core.cancel(read), Future())

    def probe(self, peer: PeerName) -> Future[Probe]:
        """Read one page-table row of the peer. The future raises `PeerLost`, `DeadlineExceeded`, `TransferError`."""
        ticket: Ticket[Probe] = Ticket()
        return self._submit(lambda: self._core.probe(peer, ticket), ticket.future)

    def lane(self, peer: PeerName) -> str:
        """What carries reads from a peer, by name: "cma", "tcp", "rc_mlx5", "loopback"; "unknown" before `add_peer`."""
        return self.lane_detail(peer).name

    def lane_detail(self, peer: PeerName) -> Lane:
        """The lane with the transport's own words for it."""
        known = self._core.peers.get(peer)
        return UNKNOWN_LANE if known is None else known.lane

    def copies(self, peer: PeerName) -> bool:
        """This thread copies what it reads from the peer: an order's witness sees each page as it lands."""
        known = self._core.peers.get(peer)
        return known is not None and all(line.lane.copied for line in known.lines)

    def expect_reads(self, *, peers_may: bool) -> None:
        """Peers hold leases of this node's pages, or none does any more. Over a socket their reads move only while the
        thread looks: until the last lease has ended it does every `reading_s`, and begins at once."""
        had, self._lending = self._lending, peers_may
        if peers_may and not had:
            self._submit(lambda: None, Future())  # it may be asleep

    def status(self) -> TransferStatus:
        """How it stands, as of the thread's last step. Waits for nothing."""
        return self._core.status(time.monotonic())

    def close(self) -> None:
        """Let running reads end for `close_s`, destroy the agents and answer everything outstanding. Idempotent.

        Raises what it failed of, `TransferError` for an agent that could not be destroyed: then unsettled reads stay
        unsettled for ever.
        """
        if not self._ended:
            self._submit(self._stop, Future())
        self._thread.join()
        atexit.unregister(self.close)
        self._end.result()

    def _stop(self) -> None:
        self._stopping = True

    def _submit(self, action: Callable[[], None], future: Future[T]) -> Future[T]:
        # running from the start: a caller that stops waiting must not cancel the future under the thread
        future.set_running_or_notify_cancel()
        with self._gate:
            if not self._ended:
                self._commands.put((action, future))
                return future
        future.set_exception(self._closed_error())
        return future

    def _closed_error(self) -> TransferError:
        return TransferError(f"the transfer engine of {self._name} is closed", node=self._name)

    def _main(self, rails: BackendFactory | RailFactories, pool: PoolMap, started: Future[TransferCore]) -> None:
        try:
            _move_to(self._settings.cpus)
            if pool.memory == "VRAM":
                _use_gpu(pool.device)
            core = TransferCore(rails, self._name, pool, self._settings)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(core)
        reason = CLOSED
        try:
            self._loop(core)
        except Exception as error:
            logger.exception("the transfer thread of %s failed", self._name)
            reason = f"the transfer thread failed: {error}"
        self._answer_all(core, reason)

    def _loop(self, core: TransferCore) -> None:
        pace = _Pace(self._settings)
        give_up_at = math.inf
        due = time.monotonic()
        while not self._stopping or (core.reading and time.monotonic() < give_up_at):
            if self._stopping and give_up_at == math.inf:
                core.stop(CLOSED)
                give_up_at = time.monotonic() + self._settings.close_s
            # over TCP bytes move while an agent is polled, on both sides, and no read's end says so
            late_s = time.monotonic() - due
            if late_s > LATE_S:
                core.postpone(late_s)
            began_s = time.thread_time()
            core.serve()
            served_s = time.thread_time()
            moved = core.step(time.monotonic())
            work_s, now = time.thread_time() - served_s, time.monotonic()
            if served_s - began_s > WORK_S and core.carries:
                pace.flowed(now, served_s - began_s)
            if core.busy and work_s > WORK_S:
                pace.came(work_s)  # what own reads take once they have ended says nothing of the next ones
            if moved:
                pace.moved(now) if core.busy else pace.ended()
            rest_s = pace.rest(now, reading=core.busy or (self._lending and core.carries))
            due = now + rest_s
            if self._run_commands(rest_s) and core.busy:
                pace.moved(time.monotonic())

    def _run_commands(self, wait_s: float) -> bool:
        """Sleep until a command comes, at most `wait_s`; run all there are."""
        ran = False
        try:
            action, future = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                self._in_hand, ran = future, True
                try:
                    action()
                except PdkvError as error:
                    future.set_exception(error)
                self._in_hand = None
                action, future = self._commands.get_nowait()
        except queue.Empty:
            return ran

    def _answer_all(self, core: TransferCore, reason: str) -> None:
        try:
            core.close(reason)
        except Exception as error:
            logger.exception("an agent of %s was not destroyed", self._name)
            self._end.set_exception(error)
        else:
            self._end.set_result(None)
        with self._gate:
            self._ended = True
        waiting = [] if self._in_hand is None else [self._in_hand]
        while not self._commands.empty():
            waiting.append(self._commands.get_nowait()[1])
        for future in waiting:
            if not future.done():
                future.set_exception(self._closed_error())


def _move_to(cpus: frozenset[int]) -> None:
    """The calling thread, and those that UCX starts from it."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            logger.warning("the transfer thread stays where it is: CPUs %s can't be had (%s)", sorted(cpus), error)


def _use_gpu(device: int) -> None:
    """A thread begins without a CUDA context, and UCX takes the memory of one that isn't current for the host's."""
    import torch

    torch.cuda.set_device(device)
