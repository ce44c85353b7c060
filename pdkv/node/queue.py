"""Who may reserve pages next: a bounded queue before the cache manager's `reserve`.

Guarantees: a request that waits to start holds neither locks nor pages; what can never fit is refused at once, and so
is whoever finds the queue full; whoever stops waiting, by deadline or cancelled, leaves nothing behind. Pages go to the
head as soon as they suffice for it. Another one may pass the head only if it wants fewer pages in all, fits now, no
room is being made for the head, and the head was passed less than `pass_limit` times: so a long request gets in after
at most `pass_limit` short ones for itself and for each that was ahead of it.

With a window a request starts when it is sure to get all its pages (`granting`), has those of the window, and gets the
others as they are needed (`reach`); of one peer's, only one at a time with less than its prompt. Those who have started
come before all who have not, in the order of their start, and are passed by the same rule: while one of them waits, few
start, so those who run end and it gets its pages.

Pages reserved for prompts that one prefill node is to bring are bounded (`shares`). Who would exceed that stands aside:
it keeps its place and is not the head, so a node that has stopped holds up those who wait for it, and nobody else.

A request that was retracted comes again: it waits before all that are new, but behind a new one that is the head by
then, for which it may have been retracted. A priority is for eviction alone: were it to order the queue as well, a
stream of important requests would starve the others for ever, which the rule of passing rules out. Runs on one event
loop.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import BoundsError, CapacityError, IntegrityError, PdkvError
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.shortage import never_fits
from pdkv.node.shares import PeerShares

PASS_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """Arguments of `CacheManager.reserve`."""

    hashes: PageHashes
    pages: int
    """In all, output and draft headroom included."""
    max_hit_pages: int
    drop_pages: int = 0
    priority: int = 0
    """Of its pages when room is made later; whose turn it is doesn't depend on it."""
    peer: str = ""
    """Who is to bring the prompt, of whom a queue may limit the pages; empty: nobody."""


@dataclass(eq=False, slots=True)
class _Waiting:
    ask: Ask
    again: bool
    granted: asyncio.Future[Reservation]
    refused: CapacityError | None = None
    """Why it did not fit when it was tried last."""
    passed: int = 0
    """How often others went in while it was the head."""

    @property
    def size(self) -> int:
        """Pages in all."""
        return self.ask.pages


@dataclass(eq=False, slots=True)
class _Growing:
    """A request that has started and waits for more of its pages."""

    reservation: Reservation
    pages: int
    """So many of its sequence have to be there,"""
    most: int
    """and so many may."""
    granted: asyncio.Future[None]
    passed: int = 0

    @property
    def size(self) -> int:
        return self.reservation.total_pages


class AdmissionQueue:
    """In front of one manager, whose `on_room` it takes."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        limit: int = 64,
        pass_limit: int = PASS_LIMIT,
        peer_pages: int | None = None,
        window_pages: int | None = None,
        make_room: Callable[[int], bool] = lambda short_pages: False,
    ) -> None:
        """At most `limit` new requests wait for room, and as many in each peer's share, `peer_pages` (None: all there
        are). With `window_pages` a request takes so many of its pages ahead of its need, else all when it starts.
        `make_room` hears how many pages a new request at the head lacks, and says whether some are being given back
        for it."""
        self.limit = limit
        self.make_room = make_room
        self.shares = PeerShares(peer_pages)
        self._manager = manager
        self._pass_limit = pass_limit
        self._window_pages = window_pages
        self._line: list[_Waiting] = []
        self._growing: list[_Growing] = []
        """In the order of their start."""
        self._due = False
        manager.on_room = self._room

    def __len__(self) -> int:
        """Requests that wait to start."""
        return len(self._line)

    @property
    def growing(self) -> int:
        """Requests that have started and wait for pages."""
        return len(self._growing)

    def claims(self) -> dict[str, int]:
        """Pages of those who have started: claimed, and held by now; and how many of them wait for more (growing)."""
        started = self._manager.reservations.values()
        claimed, held = sum(each.total_pages for each in started), sum(len(each.sequence) for each in started)
        return {"claimed": claimed, "held": held, "growing": self.growing}

    def require_possible(self, ask: Ask) -> None:
        """Raises `NeverFits` for what is larger than the whole pool."""
        usable = self._manager.pool.num_pages - 1
        if ask.pages > usable:
            raise never_fits(self._manager.pool.fmt, ask.pages, usable)

    async def admit(self, ask: Ask, *, again: bool = False) -> Reservation:
        """The reservation, as soon as it is this request's turn and there is room; `again` after it was retracted.

        Raises `NeverFits`, `CapacityError` if it doesn't fit now and as many as may wait do, and what `reserve` raises.
        """
        self.require_possible(ask)
        waiting = _Waiting(ask, again, asyncio.get_running_loop().create_future())
        self._line.insert(self._place(waiting), waiting)
        try:
            self._advance()
            if not waiting.granted.done() and not again and (others := self._beside(waiting)) >= self.limit:
                raise self._full(waiting, others)
            return await waiting.granted
        except BaseException:
            if waiting.granted.done() and not waiting.granted.cancelled() and waiting.granted.exception() is None:
                self.settle(waiting.granted.result())
                self._manager.end(waiting.granted.result())
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
                self._room()  # whoever is the head now may fit

    async def exchange(self, old: Reservation, ask: Ask) -> Reservation:
        """End `old` and reserve anew for the same request, which finds in the tree what it had committed.

        Out of turn if it fits, since it takes no more than it gives but for pages that are held back; else it waits as
        one that was retracted, but not for those. Raises `CapacityError` if without them the pool is too small, and as
        `admit`; `old` has ended, whatever comes of it.
        """
        self.settle(old)
        self._manager.end(old)
        self._require_unheld(ask)
        waiting = _Waiting(ask, True, asyncio.get_running_loop().create_future())
        if not self._aside(waiting) and self._served(waiting):
            return waiting.granted.result()
        return await self.admit(ask, again=True)

    def take(self, reservation: Reservation, pages: int) -> None:
        """Have so many pages of its sequence if that may be now, and nobody who has started waits for some."""
        more = pages - len(reservation.sequence)
        if more > 0 and not self._growing and self._given(reservation, more):
            self._room()  # where it lacked pages of its prompt, another one may come in a window now

    async def reach(self, reservation: Reservation, pages: int, *, until: int) -> None:
        """Return once `pages` of its sequence are there. A window more are taken, as far as `until`, unless somebody
        waits for pages. Raises `ReservationDead`, `BoundsError` beyond those that it may ever have."""
        most = min(pages + (self._window_pages or 0), until)
        if pages <= len(reservation.sequence):
            return self.take(reservation, most)
        if pages > reservation.total_pages:
            raise BoundsError("pages of a sequence", pages, f"at most {reservation.total_pages}")
        waiting = _Growing(reservation, pages, max(pages, most), asyncio.get_running_loop().create_future())
        insort(self._growing, waiting, key=lambda each: each.reservation.id)
        try:
            self._advance()
            await waiting.granted
        finally:
            if waiting in self._growing:
                self._growing.remove(waiting)
                self._room()

    def _require_unheld(self, ask: Ask) -> None:
        census = self._manager.census()
        left, held = census["total"] - census["quarantined"], census["quarantined"]
        if ask.pages > left:
            words = f"{ask.pages} pages wanted, {held} of {census['total']} are held back by reads without an end"
            raise CapacityError(words, wanted_pages=ask.pages, short_pages=ask.pages - left, held_back=held)

    def settle(self, reservation: Reservation) -> None:
        """Its prompt has come, or nobody is to bring it any more: its pages count for no peer. Idempotent."""
        if self.shares.settle(reservation):
            self._room()

    def retry(self) -> None:
        """Something that `make_room` goes by has changed."""
        self._room()

    def _place(self, waiting: _Waiting) -> int:
        if not waiting.again:
            return len(self._line)
        first = 1 if self._line and not self._line[0].again else 0
        return next((i for i in range(first, len(self._line)) if not self._line[i].again), len(self._line))

    def _room(self) -> None:
        """The manager is amid its work: look at the queue right after."""
        if (self._line or self._growing) and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Give pages to those who have started, let in who fits, in order, and by the rule of passing."""
        self._due = False
        if first := self._grow():
            return self._pass(first, self._line[:])
        while (head := self._head()) and self._served(head):
            self._line.remove(head)
        if head is None or (not head.again and self.make_room(_short_pages(head))):
            return
        self._pass(head, self._line[self._line.index(head) + 1 :])

    def _pass(self, first: _Waiting | _Growing, others: list[_Waiting]) -> None:
        """Let in those behind the first one that may pass it."""
        for other in others:
            if first.passed >= self._pass_limit:
                return
            if other.size < first.size and not self._aside(other) and self._served(other):
                self._line.remove(other)
                first.passed += 1

    def _grow(self) -> _Growing | None:
        """The first that goes on waiting, when all got what they can get: what one gets may be what makes it certain
        for another."""
        moved = True
        while moved:
            served = [each for each in self._growing if self._grown(each)]
            self._growing = [each for each in self._growing if each not in served]
            moved = bool(served)
        return self._growing[0] if self._growing else None

    def _grown(self, waiting: _Growing) -> bool:
        """True if it needn't wait any more. It gets a window, or what it needs, or, where that would be unsafe, all."""
        reservation, have = waiting.reservation, len(waiting.reservation.sequence)
        ways = (waiting.most, waiting.pages, reservation.total_pages)[len(self._growing) > 1 :]
        try:
            if not waiting.granted.done() and (
                have >= waiting.pages or any(self._given(reservation, to - have) for to in ways)
            ):
                waiting.granted.set_result(None)
        except PdkvError as error:
            waiting.granted.set_exception(error)
        return waiting.granted.done()

    def _given(self, reservation: Reservation, count: int) -> bool:
        """So many more pages, if that may be."""
        try:
            self.shares.require_growth(reservation, count)
            self._manager.grow(reservation, count)
        except CapacityError:
            return False
        return True

    def _head(self) -> _Waiting | None:
        """The first that doesn't stand aside."""
        return next((waiting for waiting in self._line if not self._aside(waiting)), None)

    def _aside(self, waiting: _Waiting) -> bool:
        """With it, more pages would be reserved for its peer than may be."""
        if waiting.granted.done() or not self.shares.waiting(waiting.ask.peer):
            return False
        ways, prompt = self._ways(waiting)
        return not any(self._within_share(waiting, prompt, count) for count in ways)

    def _within_share(self, waiting: _Waiting, prompt: int, count: int) -> bool:
        try:
            self.shares.require_start(waiting.ask.peer, prompt, count)
        except CapacityError as error:
            waiting.refused = error
            return False
        return True

    def _ways(self, waiting: _Waiting) -> tuple[list[int], int]:
        """With how many pages it may start, the best way first, and how many its prompt lacks.

        With a window, or with all where that alone is safe. While another one lacks pages of a prompt from the same
        peer, not with less than its prompt: the peer computes for both, so both would come later, and keep pages for
        longer. Who comes again may have been given its window before, and then it is safe to be without it.
        """
        ask = waiting.ask
        found = self._manager.tree.match(ask.hashes, limit=ask.max_hit_pages).pages.size
        found = max(found - ask.drop_pages, 0)
        every, prompt = ask.pages - found, min(len(ask.hashes) + 1, ask.pages) - found
        if self._window_pages is None:
            return [every], prompt
        first = prompt if self.shares.lacking(ask.peer) else min(self._window_pages, prompt)
        return [first, *([0] if waiting.again else []), every], prompt

    def _beside(self, waiting: _Waiting) -> int:
        """Others that wait for what it waits for: room in the pool, or in its peer's share."""
        aside, peer = self._aside(waiting), waiting.ask.peer
        others = (other for other in self._line if other is not waiting and self._aside(other) is aside)
        return sum(not aside or other.ask.peer == peer for other in others)

    def _served(self, waiting: _Waiting) -> bool:
        """True if it needn't wait any more."""
        if waiting.granted.done():
            return True
        if self._window_pages is None:  # whoever asks has looked whether it stands aside
            return self._reserved(waiting, None)
        ways, prompt = self._ways(waiting)
        return any(self._within_share(waiting, prompt, n) and self._reserved(waiting, n) for n in ways)

    def _reserved(self, waiting: _Waiting, ahead: int | None) -> bool:
        """True if it has its pages, or an error that isn't about room."""
        ask = waiting.ask
        try:
            made = self._manager.reserve(
                ask.hashes,
                ask.pages,
                max_hit_pages=ask.max_hit_pages,
                drop_pages=ask.drop_pages,
                priority=ask.priority,
                ahead=ahead,
            )
        except CapacityError as error:
            waiting.refused = error
            return False
        except PdkvError as error:
            waiting.granted.set_exception(error)
        else:
            if ask.peer:
                self.shares.charge(ask.peer, made)
            waiting.granted.set_result(made)
        return True

    def _full(self, waiting: _Waiting, ahead: int) -> CapacityError:
        why = waiting.refused or CapacityError("those who wait come first")
        words = f"{ahead} requests wait already, the limit is {self.limit}; {why}"
        return CapacityError(words, queued=ahead, queue_limit=self.limit, **why.fields)


def _short_pages(head: _Waiting) -> int:
    if head.refused is None:
        raise IntegrityError("the head of the queue waits, but was never tried")
    return int(head.refused.fields["short_pages"])
