"""What the transfer engine does for one caller: a sequence of reads and the one outcome they lead to.

Guarantees: page-table rows are asked for only after every data read is DONE; FAILED is said only when no read of the
task runs and each end was proven; landing rows go back only when nothing can land in them; a task's future is
resolved once, and after UNSETTLED its `settled` future when the last read has a proven end or the agent is gone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from pdkv.errors import DeadlineExceeded, PdkvError, PeerLost, TransferError
from pdkv.ids import Int32Array
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, End, EndState, Lane, Prepared, Side
from pdkv.transfer.descriptors import ReadPlan, chunks
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.orders import Probe, ReadOrder, ReadOutcome, ReadStatus

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Peer:
    """A peer that was added, with what is prepared for reading from it."""

    agent: AgentName
    metadata: bytes
    plan: ReadPlan
    local: Prepared
    remote: Prepared
    rows: Prepared
    """The peer's page table; index = page."""
    lane: Lane = UNKNOWN_LANE
    running: int = 0
    lost: str = ""
    """Why no new read is posted, once the peer is gone."""
    leaving: bool = False
    arrivals: list[Future[None]] = field(default_factory=list)
    """Waiting for its first read to end."""
    departures: list[Future[None]] = field(default_factory=list)
    """Waiting for its removal."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[T]):
    """A caller's claim on an answer; waiting counts from when it was drawn."""

    future: Future[T] = field(default_factory=Future)
    drawn: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A read that a task asks for."""

    local: Side
    remote: Side
    is_data: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Landing rows and the descriptor list over them."""

    rows: LandingRows
    prepared: Prepared


class Task(ABC):
    """The common part: what runs, until when, and how it stops."""

    def __init__(self, peer: Peer, ticket: Ticket[Any], wait_s: float) -> None:
        self.peer = peer
        self.ticket = ticket
        self.deadline = ticket.drawn + wait_s
        self.running = 0
        self.over = False
        """Nothing runs, nothing will be posted, nothing can land."""

    @abstractmethod
    def next(self) -> Wanted | None:
        """The read to post now, if any. It counts as running from here on."""

    @abstractmethod
    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        """One of its reads has ended; it doesn't count as running any more."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Post nothing more; what runs goes on."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Stop, and answer the caller now."""

    @abstractmethod
    def fenced(self, reason: str) -> None:
        """The agent is gone: nothing lands any more."""


class OrderTask(Task):
    """A `ReadOrder`: data reads, then the page-table rows, then the comparison."""

    def __init__(
        self, order: ReadOrder, peer: Peer, ticket: Ticket[ReadOutcome], landing: Landing, read_max_bytes: int
    ) -> None:
        super().__init__(peer, ticket, order.deadline_s)
        self.future = ticket.future
        self._order = order
        self._landing = landing
        self._parts = deque(chunks(len(order), peer.plan.page_bytes, read_max_bytes))
        self._rows: Int32Array | None = None
        self._failure = ""
        self._unproven = False
        self._settled: Future[None] | None = None
        self._backend_bytes = 0
        self._descriptors = 0
        self._post_s = 0.0

    def next(self) -> Wanted | None:
        if self._failure or self._rows is not None:
            return None
        if self._parts:
            part = self._parts.popleft()
            local, remote = self.peer.plan.indices(self._order.local[part], self._order.remote[part])
            return Wanted(Side(self.peer.local, local), Side(self.peer.remote, remote), is_data=True)
        if self.running or self._landing.rows.free < len(self._order):
            return None
        self._rows = self._landing.rows.take(len(self._order))
        return Wanted(Side(self._landing.prepared, self._rows), Side(self.peer.rows, self._order.remote.array))

    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        if wanted.is_data:
            self._post_s += post_s
            self._backend_bytes += end.bytes
            self._descriptors += end.descriptors
        if end.state is not EndState.DONE:
            self._failure = self._failure or end.reason
            self._unproven |= end.state is EndState.LOST
        self._conclude(rows_landed=not wanted.is_data and end.state is EndState.DONE)

    def stop(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._conclude()

    def give_up(self, reason: str) -> None:
        self.stop(reason)
        if not self.future.done():
            self._settled = Future()
            self._answer(ReadStatus.UNSETTLED)

    def fenced(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.running, self._unproven = 0, False
        self._conclude()

    def _conclude(self, *, rows_landed: bool = False) -> None:
        if self.running or self.over:
            return
        if rows_landed:
            self._finish(ReadStatus.DONE)
        elif self._failure and not self._unproven:
            self._finish(ReadStatus.FAILED)
        elif self._failure and not self.future.done():
            self._settled = Future()
            self._answer(ReadStatus.UNSETTLED)

    def _finish(self, status: ReadStatus) -> None:
        """A proven end."""
        self.over = True
        if not self.future.done():
            self._answer(status)
        elif self._settled is not None:
            self._settled.set_result(None)
        if self._rows is not None:
            self._landing.rows.give_back(self._rows)

    def _answer(self, status: ReadStatus) -> None:
        order = self._order
        stale = np.zeros(len(order), np.bool_)
        if status is ReadStatus.DONE and self._rows is not None:
            stale = self._landing.rows.stale(self._rows, order.generations, order.hashes)
        self.future.set_result(
            ReadOutcome(
                status=status,
                stale=stale,
                bytes=len(order) * self.peer.plan.page_bytes,
                backend_bytes=self._backend_bytes,
                descriptors=self._descriptors,
                post_s=self._post_s,
                elapsed_s=time.monotonic() - self.ticket.drawn,
                reason=self._failure,
                settled=self._settled,
            )
        )


class ProbeTask(Task):
    """One read of bytes that nobody needs: a piece of the sink page, or one page-table row."""

    def __init__(self, peer: Peer, wanted: Wanted, ticket: Ticket[Probe], wait_s: float) -> None:
        super().__init__(peer, ticket, wait_s)
        self.future = ticket.future
        self.release: Callable[[], None] = lambda: None
        """Called when nothing lands any more."""
        self._wanted: Wanted | None = wanted

    def next(self) -> Wanted | None:
        wanted, self._wanted = self._wanted, None
        return wanted

    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        if end.state is EndState.DONE:
            if not self.future.done():
                self.future.set_result(Probe(time.monotonic() - self.ticket.drawn))
        else:
            self._fail(PeerLost if end.disconnected else TransferError, end.reason)
        # an unproven end can only touch scratch bytes: the task is over, but its landing row stays taken
        self._finish(release=end.state is not EndState.LOST)

    def stop(self, reason: str) -> None:
        self._withdraw(PeerLost, reason)

    def give_up(self, reason: str) -> None:
        self._fail(DeadlineExceeded, reason)
        self._withdraw(DeadlineExceeded, reason)

    def fenced(self, reason: str) -> None:
        self._fail(TransferError, reason)
        self._finish(release=True)

    def _withdraw(self, kind: type[PdkvError], reason: str) -> None:
        if self._wanted is not None:
            self._wanted = None
            self._fail(kind, reason)
            self._finish(release=True)

    def _fail(self, kind: type[PdkvError], reason: str) -> None:
        if not self.future.done():
            agent = self.peer.agent
            self.future.set_exception(kind(f"read from {agent}: {reason}", peer=agent, reason=reason))

    def _finish(self, *, release: bool) -> None:
        if not self.over and release:
            self.release()
        self.over = True
