"""What the transfer engine does for one caller: a sequence of reads and the one outcome they lead to.

Guarantees: page-table rows are asked for only after every data read is DONE; FAILED is said only when each read of the
task has a proven end; landing rows go back only when nothing can land in them; a task's future is resolved once, and
after UNSETTLED its `settled` future when the last read has a proven end, be it that its agent is gone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import numpy as np

from pdkv.errors import DeadlineExceeded, PdkvError, PeerLost, TransferError
from pdkv.ids import SINK_PAGE, Int32Array, PeerName
from pdkv.transfer.backends.base import End, EndState
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Line, Peer
from pdkv.transfer.orders import Flow, Probe, ReadOrder, ReadOutcome, ReadStatus, Unsettled, Witness

T = TypeVar("T")
ROWS_AT_ONCE = 1024
"""Page-table rows of one READ: each costs the thread a little time."""


class Table(Enum):
    """What the indices of a read count: pieces of pages on both sides; or landing rows here, page-table rows there."""

    PAGES = auto()
    ROWS = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A read that a task asks for, whatever agent makes it. Both columns int32, equally long."""

    table: Table
    local: Int32Array
    remote: Int32Array
    bytes: int = 0
    """Of pages."""
    part: slice = field(default_factory=lambda: slice(0, 0))
    """Of the order's columns."""
    witness: Witness | None = None

    def split(self, most_bytes: int) -> Iterator[Wanted]:
        """The same pages in reads of so many bytes at most, at least of one page."""
        pages = self.part.stop - self.part.start
        count = max(1, most_bytes * pages // self.bytes)
        local, remote = self.local.reshape(-1, pages), self.remote.reshape(-1, pages)
        for first in range(0, pages, count):
            some = slice(first, min(first + count, pages))
            part = slice(self.part.start + some.start, self.part.start + some.stop)
            share = self.bytes // pages * (some.stop - some.start)
            columns = (local[:, some].reshape(-1), remote[:, some].reshape(-1))
            yield replace(self, local=columns[0], remote=columns[1], bytes=share, part=part)


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[T]):
    """A caller's claim on an answer; waiting counts from when it was drawn."""

    future: Future[T] = field(default_factory=Future)
    drawn: float = field(default_factory=time.monotonic)


_SINK = np.array([SINK_PAGE], np.int32)
SCRATCH = Wanted(Table.PAGES, _SINK, _SINK)
"""Piece 0 of page 0 on either side: the write sink, which anybody may read and overwrite."""


class Task(ABC):
    """The common part: what was posted, until when, and how it stops."""

    pages = 0
    """That it holds back when it is unsettled."""
    flow: Flow | None = None
    line: Line | None = None
    """It is about this one; otherwise any will do."""

    def __init__(self, peer: Peer, ticket: Ticket[Any], wait_s: float) -> None:
        self.peer = peer
        self.ticket = ticket
        self.deadline = ticket.drawn + wait_s
        self.outstanding = 0
        """Reads that were posted and have no proven end."""
        self.failure = ""
        """Why it stopped, once it has."""
        self.over = False
        """Nothing is outstanding and nothing will be posted."""
        self.unsettled_since: float | None = None
        """Monotonic seconds: when it was first seen to have answered before it was over."""

    def holds(self, since: float) -> bool:
        """It has been unsettled since then, monotonic seconds, and somebody waits for its end: for pages, or for the
        peer's removal."""
        unsettled = self.unsettled_since is not None and self.unsettled_since <= since and not self.over
        return unsettled and bool(self.pages or self.peer.departures)

    @property
    @abstractmethod
    def due(self) -> bool:
        """A read of it can be posted now."""

    @property
    def left(self) -> int:
        """Bytes of pages that are still to be posted."""
        return 0

    @abstractmethod
    def next(self, most_bytes: int) -> Wanted:
        """The read to post, when one is due: of so many bytes of pages, at least of one page."""

    @abstractmethod
    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        """One of its reads has ended DONE or FAILED; it doesn't count as outstanding any more."""

    @abstractmethod
    def again(self, wanted: Wanted) -> None:
        """One of its reads has proven to be over without its data, on a line that is down: post it anew."""

    @abstractmethod
    def lost(self, end: End) -> None:
        """One of its reads was given up without proof; it stays outstanding until its agent is gone."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Post nothing more; what runs goes on."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Stop, and answer the caller now."""


class OrderTask(Task):
    """A `ReadOrder`: data reads, then the page-table rows, then the comparison."""

    def __init__(self, order: ReadOrder, peer: Peer, ticket: Ticket[ReadOutcome], landing: LandingRows) -> None:
        super().__init__(peer, ticket, order.deadline_s)
        self.pages = len(order)
        self.flow = order.flow
        self.future = ticket.future
        self._order = order
        self._landing = landing
        self._parts = deque([slice(0, self.pages)])
        """What is to be posted; cut when it is."""
        self._rows: Int32Array | None = None
        self._row_parts: deque[slice] = deque()
        self._rows_landed = 0
        self._settled: Future[None] | None = None
        self._backend_bytes = 0
        self._descriptors = 0
        self._post_s = 0.0

    @property
    def due(self) -> bool:
        if self.failure:
            return False
        if self._parts or self._row_parts:
            return True
        return self._rows is None and not self.outstanding and self._landing.free >= self.pages

    @property
    def left(self) -> int:
        return sum(part.stop - part.start for part in self._parts) * self.peer.plan.page_bytes

    def next(self, most_bytes: int) -> Wanted:
        plan, order = self.peer.plan, self._order
        if self._parts:
            part = _cut(self._parts, max(1, most_bytes // plan.page_bytes))
            if order.witness is not None:
                order.witness.begins(part)
            indices = plan.indices(order.local[part], order.remote[part])
            return Wanted(Table.PAGES, *indices, (part.stop - part.start) * plan.page_bytes, part, order.witness)
        if self._rows is None:
            self._rows = self._landing.take(self.pages)
            self._row_parts.append(slice(0, self.pages))
        part = _cut(self._row_parts, ROWS_AT_ONCE)
        return Wanted(Table.ROWS, self._rows[part], order.remote.array[part], part=part)

    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        is_data = wanted.table is Table.PAGES
        if is_data:
            self._post_s += post_s
            self._backend_bytes += end.bytes
            self._descriptors += end.descriptors
        elif end.state is EndState.DONE:
            self._rows_landed += wanted.local.size
        if end.state is EndState.DONE:
            self._conclude()
        else:
            self.stop(end.reason)

    def again(self, wanted: Wanted) -> None:
        (self._parts if wanted.table is Table.PAGES else self._row_parts).appendleft(wanted.part)

    def lost(self, end: End) -> None:
        self.give_up(end.reason)

    def stop(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._parts.clear()
        self._row_parts.clear()
        self._conclude()

    def give_up(self, reason: str) -> None:
        self.stop(reason)
        if not self.future.done():
            self._settled = Future()
            self._answer(ReadStatus.UNSETTLED)

    def _conclude(self) -> None:
        if self.outstanding or self.over:
            return
        if self._rows_landed == self.pages:
            self._finish(ReadStatus.DONE)
        elif self.failure:
            self._finish(ReadStatus.FAILED)

    def _finish(self, status: ReadStatus) -> None:
        """A proven end."""
        self.over = True
        if not self.future.done():
            self._answer(status)
        elif self._settled is not None:
            self._settled.set_result(None)
        if self._rows is not None:
            self._landing.give_back(self._rows)

    def _answer(self, status: ReadStatus) -> None:
        order = self._order
        stale = np.zeros(len(order), np.bool_)
        if status is ReadStatus.DONE and self._rows is not None:
            stale = self._landing.stale(self._rows, order.generations, order.hashes)
        self.future.set_result(
            ReadOutcome(
                status=status,
                stale=stale,
                bytes=len(order) * self.peer.plan.page_bytes,
                backend_bytes=self._backend_bytes,
                descriptors=self._descriptors,
                post_s=self._post_s,
                elapsed_s=time.monotonic() - self.ticket.drawn,
                reason=self.failure,
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

    @property
    def due(self) -> bool:
        return self._wanted is not None

    def next(self, most_bytes: int) -> Wanted:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            raise TransferError("a probe reads once", peer=self.peer.name)
        return wanted

    def ended(self, wanted: Wanted, end: End, post_s: float) -> None:
        if end.state is not EndState.DONE:
            self._fail(PeerLost if end.disconnected else TransferError, end.reason)
        elif not self.future.done():
            self.future.set_result(Probe(time.monotonic() - self.ticket.drawn))
        self._finish()

    def again(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def lost(self, end: End) -> None:
        # it can only touch scratch bytes: the task is over, but its landing row stays taken
        self._fail(PeerLost if end.disconnected else TransferError, end.reason)
        self.over = True

    def stop(self, reason: str) -> None:
        self._withdraw(PeerLost, reason)

    def give_up(self, reason: str) -> None:
        self._fail(DeadlineExceeded, reason)
        self._withdraw(DeadlineExceeded, reason)

    def _withdraw(self, kind: type[PdkvError], reason: str) -> None:
        self.failure = self.failure or reason
        if self._wanted is not None:
            self._wanted = None
            self._fail(kind, reason)
            self._finish()

    def _fail(self, kind: type[PdkvError], reason: str) -> None:
        if not self.future.done():
            name = self.peer.name
            self.future.set_exception(kind(f"read from {name}: {reason}", peer=name, reason=reason))

    def _finish(self) -> None:
        self.over = True
        self.release()
        self.release = lambda: None


def held_back(tasks: Iterable[Task], now: float) -> tuple[Unsettled, ...]:
    """By tasks that have answered before they were over, a row a peer."""
    rows: dict[PeerName, Unsettled] = {}
    for task in tasks:
        if task.pages and not task.over and task.unsettled_since is not None:
            name, age_s = task.peer.name, now - task.unsettled_since
            row = rows.get(name, Unsettled(name, 0, 0, 0.0))
            rows[name] = Unsettled(name, row.reads + 1, row.pages + task.pages, max(row.oldest_s, age_s))
    return tuple(rows.values())


def _cut(parts: deque[slice], most: int) -> slice:
    """Take the first of them, at most so much of it."""
    first = parts.popleft()
    if first.stop - first.start > most:
        parts.appendleft(slice(first.start + most, first.stop))
    return slice(first.start, min(first.stop, first.start + most))
