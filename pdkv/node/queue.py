"""Who may reserve pages next: a bounded queue before the cache manager's `reserve`.

Guarantees: a request that waits to start holds neither locks nor pages; what can never fit is refused at once, and so
is whoever finds the queue full; whoever stops waiting, by deadline or cancelled, leaves nothing behind. Pages go to the
head as soon as they suffice for it. Another one may pass the head only if it wants fewer pages in all, fits now, no
room is being made for the head, and the head was passed less than `pass_limit` times: so a long request gets in after
at most `pass_limit` short ones for itself and for each that was ahead of it.

With a window a request starts when it is sure to get all its pages (`granting`) and takes nothing that others need
next; it has those of the window, and gets the others as they are needed (`started`); of one peer's, only one at a time
with less than its prompt. Those who have started come before all who have not, and are passed by the same rule: while
one of them waits, few start, so those who run end and it gets its pages.

Pages reserved for prompts that one prefill node is to bring are bounded (`shares`). Who would exceed that stands aside:
it keeps its place and is not the head, so a node that has stopped holds up those who wait for it, and nobody else.

A request that was retracted comes again: it waits before all that are new, but behind a new one that is the head by
then, for which it may have been retracted. A priority is for eviction alone: were it to order the queue as well, a
stream of important requests would starve the others for ever, which the rule of passing rules out. Runs on one event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pdkv.errors import CapacityError, IntegrityError, PdkvError
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.shortage import never_fits
from pdkv.node.shares import PeerShares
from pdkv.node.started import Growing, Started

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


class _Ways(NamedTuple):
    """How a request may start."""

    counts: tuple[int, ...]
    """With so many pages, the best way first."""
    prompt: int
    """Pages that its prompt lacks."""
    room: int
    """Pages there, when what it hits is locked."""


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
        self.started = Started(manager, self.shares, window_pages)
        self.started.advance, self.started.changed = self._advance, self._room
        self._line: list[_Waiting] = []
        self._due = False
        manager.on_room = self._room

    def __len__(self) -> int:
        """Requests that wait to start."""
        return len(self._line)

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
        if (self._line or len(self.started)) and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Give pages to those who have started, let in who fits, in order, and by the rule of passing."""
        self._due = False
        if first := self.started.serve():
            return self._pass(first, self._line[:])
        while (head := self._head()) and self._served(head):
            self._line.remove(head)
        if head is None or (not head.again and self.make_room(_short_pages(head))):
            return
        self._pass(head, self._line[self._line.index(head) + 1 :])

    def _pass(self, first: _Waiting | Growing, others: list[_Waiting]) -> None:
        """Let in those behind the first one that may pass it."""
        for other in others:
            if first.passed >= self._pass_limit:
                return
            if other.granted.done():  # cancelled, and about to leave
                continue
            if other.size < first.size and not self._aside(other) and self._served(other):
                self._line.remove(other)
                first.passed += other.granted.exception() is None

    def _head(self) -> _Waiting | None:
        """The first that doesn't stand aside."""
        return next((waiting for waiting in self._line if not self._aside(waiting)), None)

    def _aside(self, waiting: _Waiting) -> bool:
        """With it, more pages would be reserved for its peer than may be."""
        if waiting.granted.done() or not self.shares.waiting(waiting.ask.peer):
            return False
        ways = self._ways(waiting)
        return not any(self._within_share(waiting, ways, count) for count in ways.counts)

    def _within_share(self, waiting: _Waiting, ways: _Ways, count: int) -> bool:
        try:
            self.shares.require_start(waiting.ask.peer, ways.prompt, count)
        except CapacityError as error:
            waiting.refused = error
            return False
        return True

    def _spared(self, waiting: _Waiting, ways: _Ways, count: int) -> bool:
        """It takes nothing that those who have started need next."""
        short = count + self.started.needed_before(None) - ways.room
        if short > 0:
            words = f"{count} pages wanted, {short} of them are what requests that have started need next"
            waiting.refused = CapacityError(words, wanted_pages=count, short_pages=short)
        return short <= 0

    def _ways(self, waiting: _Waiting) -> _Ways:
        """With a window, or with all where that alone is safe. While another one lacks pages of a prompt from the same
        peer, not with less than its prompt: the peer computes for both, so both would come later, and keep pages for
        longer. Who comes again may have been given its window before, and then it is safe to be without it.
        """
        ask, tree = waiting.ask, self._manager.tree
        match = tree.match(ask.hashes, limit=ask.max_hit_pages)
        found = max(match.pages.size - ask.drop_pages, 0)
        every, prompt = ask.pages - found, min(len(ask.hashes) + 1, ask.pages) - found
        room = self.started.there() - tree.would_lock(match)
        window = self.started.window_pages
        if window is None:
            return _Ways((every,), prompt, room)
        first = prompt if self.shares.lacking(ask.peer) else min(window, prompt)
        return _Ways((first, 0, every) if waiting.again else (first, every), prompt, room)

    def _beside(self, waiting: _Waiting) -> int:
        """Others that wait for what it waits for: room in the pool, or in its peer's share."""
        aside, peer = self._aside(waiting), waiting.ask.peer
        others = (other for other in self._line if other is not waiting and self._aside(other) is aside)
        return sum(not aside or other.ask.peer == peer for other in others)

    def _served(self, waiting: _Waiting) -> bool:
        """True if it needn't wait any more."""
        if waiting.granted.done():
            return True
        if self.started.window_pages is None:  # whoever asks has looked whether it stands aside
            return self._reserved(waiting, None)
        ways = self._ways(waiting)
        return any(
            self._within_share(waiting, ways, count)
            and (waiting.again or self._spared(waiting, ways, count))
            and self._reserved(waiting, count)
            for count in ways.counts
        )

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
