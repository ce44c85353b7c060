"""One request's arrivals: announced pages are checked, read, verified and committed, in the order of the prompt.

Guarantees: a page is committed only after its data read ended DONE, its table row was read after it and is equal, and
its digest is equal; reads of later pages run while earlier ones are verified; when the request ends early, pages under
a read without a proven end are quarantined before anything else may have them, and come back when the read settles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pdkv.errors import (
    BoundsError,
    DigestMismatch,
    IntegrityError,
    PeerLost,
    ProtocolError,
    StalePages,
    TransferUnsettled,
    listed,
)
from pdkv.ids import LocalPages, RemotePages, RequestId
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import VerifiedPages, WatchedArrival
from pdkv.node.base import NodeParts
from pdkv.node.flow import ended, settle
from pdkv.node.messages import GenerateRequest, NodeIntro, PagesSealed
from pdkv.node.prompt import Prompt
from pdkv.node.stages import Stage
from pdkv.transfer.engine import Flow, ReadOrder, ReadOutcome, ReadStatus

READ_ATTEMPTS = 2
"""A page whose digest differs is read once more; then it is data loss."""
WHOLE_BYTES = 128 << 20
"""What is announced together and not more than that is not cut: of a prompt that comes in chunks, one is proved while
the next is read anyway."""
PORTION_BYTES = 256 << 20
"""Most of what is read before it is proved."""
PORTION_PAGES = 1 << 14
"""However small they are: an order of more rows than can be under way would be refused."""
SEEN_PORTION_BYTES = 1 << 30
"""Most of what is read before it is committed, where it is proved meanwhile: a peer that dies costs no more."""
LAST_PORTION_BYTES = 32 << 20
"""So much may be left to prove when everything has arrived."""


def portions(pages: int, page_bytes: int, *, seen: bool = False) -> Iterator[slice]:
    """Cut pages that were announced together into portions that are read and proved one after the other.

    One is proved while the next is read, so each is half of what is left, until that is soon proved. Of pages that are
    `seen` as they land nothing is left to prove.
    """
    first, whole = 0, pages * page_bytes <= WHOLE_BYTES
    while first < pages:
        count = left = min(pages - first, PORTION_PAGES)
        if seen:
            count = min(left, max(1, SEEN_PORTION_BYTES // page_bytes))
        elif not whole and left * page_bytes > LAST_PORTION_BYTES:
            count = max(min(left // 2, PORTION_BYTES // page_bytes), 1)
        yield slice(first, first + count)
        first += count


@dataclass(slots=True)
class Busy:
    """Adds up the union of overlapping intervals."""

    running: int = 0
    since_s: float = 0.0
    total_s: float = 0.0
    began_s: float | None = None
    """The beginning of the first one since this was None."""
    ended_s: float = 0.0
    """When the last one ended."""

    def enter(self, now_s: float) -> None:
        if not self.running:
            self.since_s = now_s
        if self.began_s is None:
            self.began_s = now_s
        self.running += 1

    def leave(self, now_s: float) -> None:
        self.running -= 1
        if not self.running:
            self.total_s += now_s - self.since_s
            self.ended_s = now_s


@dataclass(slots=True)
class IntakeCount:
    """Sums over the reads of a request that ended DONE; bytes without page-table rows."""

    pages: int = 0
    bytes_backend: int = 0
    descriptors: int = 0
    digests_verified: int = 0
    busy: Busy = field(default_factory=Busy)
    """Wall-clock during which at least one read was running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A prompt of which pages are to arrive, and the account of all that did."""

    request_id: RequestId
    prompt: Prompt
    at: Callable[[Stage], None]
    """Called when an arrival reaches a stage: READING, ARRIVED, COMMITTED."""
    fault: Callable[[SlotPool, LocalPages], None] | None = None
    """Put into what arrived, before it is verified."""
    count: IntakeCount = field(default_factory=IntakeCount)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Due):
    """What is to be brought to a decode node, the same for every attempt of a request."""

    request: GenerateRequest
    until_s: float
    """When the request's time is over, in the loop's seconds."""
    offer: bool = True
    """Let the prefill node read pages of the prompt that this node has."""


@dataclass(slots=True)
class Intake:
    """Where the pages of one reservation arrive from one peer."""

    parts: NodeParts
    peer: NodeIntro
    due: Due
    reservation: Reservation
    pulls: asyncio.TaskGroup
    """Owns the running pulls: the first that fails ends the others and whoever waits for more announcements."""
    read_deadline_s: float
    moved: Callable[[], None] = lambda: None
    """Called when a read has ended with all its data."""
    reach: Callable[[int], Awaitable[None]] | None = None
    """Waits until the reservation has so many pages of its sequence; None: it has all."""
    _first: int = 0
    _next: int = 0
    _last: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._first = self._next = self.reservation.committed

    @property
    def prompt(self) -> Prompt:
        return self.due.prompt

    @property
    def reading(self) -> bool:
        """Something is still to come from the peer's memory."""
        return bool(self.due.count.busy.running)

    def announce(self, sealed: PagesSealed) -> None:
        """Start pulling recorded pages. Raises `ProtocolError` or `BoundsError` for what doesn't fit this prompt."""
        last = sealed.first_index + len(sealed.hashes)
        if sealed.first_index != self._next or not self._next < last <= self.prompt.recorded_pages:
            raise ProtocolError(
                f"pages [{sealed.first_index}, {last}) announced, expected from {self._next} on,"
                f" at most {self.prompt.recorded_pages}",
                first=sealed.first_index,
                last=last,
                expected=self._next,
            )
        if sealed.hashes != self.prompt.hashes.part(self._next, last):
            raise ProtocolError("announced page hashes are not those of the prompt", first=self._next, last=last)
        self._start(sealed)
        self._next = last

    def announce_tail(self, sealed: PagesSealed | None) -> None:
        """Start pulling the tail page. Raises `ProtocolError` if it is missing, not due, or of other tokens."""
        if self._next != self.prompt.recorded_pages:
            raise ProtocolError(
                f"prefill ended with page {self._next} of {self.prompt.recorded_pages} not announced",
                announced=self._next,
                expected=self.prompt.recorded_pages,
            )
        due = self.prompt.tail_hash
        if (sealed.hashes.raw if sealed else b"") != due or (sealed is not None and not due):
            have = sealed.hashes.raw.hex() if sealed else "none"
            raise ProtocolError("tail page is not that of the prompt", have=have, expected=due.hex() or "none")
        if sealed is None:
            return
        if sealed.first_index != self.prompt.recorded_pages:
            raise ProtocolError("tail page index", have=sealed.first_index, expected=self.prompt.recorded_pages)
        self._start(sealed)

    async def finish(self) -> None:
        """Wait until every announced page is committed, on every rank of a group."""
        if self._last:
            await self._last
        if self.parts.barrier:
            await self.parts.barrier()

    def _start(self, sealed: PagesSealed) -> None:
        n = len(sealed.hashes)
        if sealed.page_ids.shape != (n,) or sealed.generations.shape != (n,) or sealed.digests.shape != (n, 2):
            shapes = (n, sealed.page_ids.shape, sealed.generations.shape, sealed.digests.shape)
            raise BoundsError("columns of announced pages", shapes, "one entry a page, two digests")
        remote = RemotePages.checked(sealed.page_ids, self.peer.pool.num_pages)
        # without digests there is nothing to do while the next portion is read, nor of what is digested as it lands
        page_bytes = self.parts.pool.fmt.page_bytes if self.parts.verifier.checks_digests else 0
        seen = self.parts.verifier.watches and self.parts.transfer.copies(self.peer.name)
        for part in portions(n, page_bytes, seen=seen):
            self._last = self.pulls.create_task(self._pull(_part(sealed, part), remote[part], self._last))

    async def _pull(self, sealed: PagesSealed, remote: RemotePages, before: asyncio.Task[None] | None) -> None:
        """Read and verify at once, commit after the pages before: only a committed prefix is ever extended."""
        first, stop = sealed.first_index, sealed.first_index + len(sealed.hashes)
        if self.reach is not None:
            await self.reach(stop)
        local, tail = self.reservation.sequence[first:stop], first >= self.prompt.recorded_pages
        if tail:
            self.parts.manager.take_private(self.reservation, local)
        verified = await self._read_verified(sealed, local, remote)
        if before is not None:
            await before
        if not tail:
            self.parts.manager.commit(verified)
            self.due.at(Stage.COMMITTED)
        else:
            self.parts.manager.seal_private(self.reservation, verified)
        self.due.count.pages += len(local)
        self.parts.moved.read += len(local)

    async def _read_verified(self, sealed: PagesSealed, local: LocalPages, remote: RemotePages) -> VerifiedPages:
        arrival = Arrival(self.reservation.id, sealed.first_index, local, sealed.hashes, sealed.digests)
        watched = self.parts.verifier.watch(arrival, self.parts.digests.soon)
        order = ReadOrder(
            self.peer.name,
            local,
            remote,
            sealed.generations,
            sealed.hashes,
            self.read_deadline_s,
            self._flow(sealed.first_index + len(local)),
            watched,
        )
        for attempt in range(1, READ_ATTEMPTS + 1):
            await self._read(order, sealed.first_index)
            if self.due.fault:
                self.due.fault(self.parts.pool, local)
                watched = None  # as if it had landed so
            try:
                verified = await self._proved(watched, arrival)
            except DigestMismatch as error:
                if attempt == READ_ATTEMPTS:
                    raise self._data_loss(error, order, sealed.first_index) from error
                continue
            if self.parts.verifier.checks_digests:
                self.due.count.digests_verified += len(local)
            return verified
        raise ProtocolError("unreachable: the last attempt returns or raises")

    async def _proved(self, watched: WatchedArrival | None, arrival: Arrival) -> VerifiedPages:
        """Raises `DigestMismatch`."""
        # to compare what was seen takes less than the way to a thread
        if watched is not None and np.array_equal(watched.seen, watched.written):
            return self.parts.verifier.verify(watched)
        return await self.parts.digests.run(self.parts.verifier.verify, watched or arrival)

    def _flow(self, end: int) -> Flow:
        """Of the pages before index `end`; the request's reads take turns on the links as one."""
        pages = self.prompt.recorded_pages + bool(self.prompt.tail_hash)
        return Flow(self.reservation.id, pages - self._first, pages - end)

    async def _read(self, order: ReadOrder, first_index: int) -> None:
        """One read to its end, accounted for. Raises by how it ended; unsettled pages are quarantined first."""
        loop, busy = asyncio.get_running_loop(), self.due.count.busy
        posted = self.parts.transfer.read(order)
        told = False
        busy.enter(loop.time())
        try:
            self.due.at(Stage.READING)
            await ended(posted)
            told = True
            outcome = posted.result()
        except BaseException:
            self.parts.transfer.cancel(posted)
            future = asyncio.wrap_future(posted)
            try:
                await settle(future, told=told)
            finally:
                if future.exception() is None:  # otherwise it was never posted
                    self._hold_back(order.local, future.result(), "the request ended during the read")
            raise
        finally:
            busy.leave(loop.time())
        self._hold_back(order.local, outcome, outcome.reason)
        if outcome.status is ReadStatus.FAILED:
            raise PeerLost(f"read from {order.peer} failed: {outcome.reason}", peer=order.peer, reason=outcome.reason)
        if outcome.status is ReadStatus.UNSETTLED:
            raise TransferUnsettled(
                f"read from {order.peer} did not end: {outcome.reason}", peer=order.peer, pages=len(order.local)
            )
        if outcome.stale.any():
            stale = np.flatnonzero(outcome.stale) + first_index
            raise StalePages(
                f"{stale.size} source pages were reused while they were read, first prompt page {int(stale[0])}",
                pages=stale.tolist(),
                peer=order.peer,
            )
        self.moved()
        self.due.at(Stage.ARRIVED)
        self.due.count.bytes_backend += outcome.backend_bytes
        self.due.count.descriptors += outcome.descriptors

    def _data_loss(self, error: DigestMismatch, order: ReadOrder, first_index: int) -> DigestMismatch:
        """The same with the page ids of the pool that the bytes came from."""
        sources = order.remote.array
        bad = [replace(page, source=int(sources[page.index - first_index])) for page in error.bad]
        words = listed(bad)
        return DigestMismatch(
            f"bytes of {len(bad)} of {len(order)} pages from {order.peer} are not what was announced,"
            f" {READ_ATTEMPTS} times: {words}",
            bad=bad,
            peer=order.peer,
            bad_pages=words,
        )

    def _hold_back(self, pages: LocalPages, outcome: ReadOutcome, reason: str) -> None:
        """Bytes may still land: the pages leave circulation until the read has settled or its agent is gone."""
        if outcome.status is not ReadStatus.UNSETTLED:
            return
        manager, reservation = self.parts.manager, self.reservation
        manager.quarantine(reservation, pages, reason)
        if outcome.settled is None:
            raise IntegrityError("an unsettled read doesn't say when it settles", pages=len(pages))
        loop = asyncio.get_running_loop()
        outcome.settled.add_done_callback(
            lambda _: loop.is_closed() or loop.call_soon_threadsafe(manager.release_quarantine, reservation, pages)
        )


def _part(sealed: PagesSealed, part: slice) -> PagesSealed:
    return PagesSealed(
        sealed.first_index + part.start,
        sealed.hashes.part(part.start, part.stop),
        sealed.page_ids[part],
        sealed.generations[part],
        sealed.digests[part],
    )
