"""Who may reserve pages next: a bounded queue before the cache manager's `reserve`.

Guarantees: a waiting request holds neither locks nor pages; what can never fit is refused at once, and so is whoever
finds the queue full; whoever stops waiting, by deadline or cancelled, leaves nothing behind. Pages go to the head as
soon as they suffice for it. Another one may pass the head only if it wants fewer pages in all, fits now, no room is
being made for the head, and the head was passed less than `pass_limit` times: so a long request gets in after at most
`pass_limit` short ones for itself and for each that was ahead of it.

Pages reserved for prompts that one prefill node is to bring are at most `peer_pages`, but for a request that is the
only one to wait for that node. Who would exceed it stands aside: it keeps its place and is not the head, so a node that
has stopped holds up those who wait for it, and nobody else.

A request that was retracted comes again: it waits before all that are new, but behind a new one that is the head by
then, for which it may have been retracted. A priority is for eviction alone: were it to order the queue as well, a
stream of important requests would starve the others for ever, which the rule of passing rules out. Runs on one event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import CapacityError, IntegrityError, PdkvError
from pdkv.ids import PageHashes, ReservationId
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.shortage import never_fits

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


class AdmissionQueue:
    """In front of one manager, whose `on_room` it takes."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        limit: int = 64,
        pass_limit: int = PASS_LIMIT,
        peer_pages: int | None = None,
        make_room: Callable[[int], bool] = lambda short_pages: False,
    ) -> None:
        """At most `limit` new requests wait for room, and as many in each peer's share, `peer_pages` (None: all there
        are). `make_room` hears how many pages a new request at the head lacks, and says whether some are being given
        back for it."""
        self.limit = limit
        self.make_room = make_room
        self._manager = manager
        self._pass_limit = pass_limit
        self._peer_pages = peer_pages
        self._charged: dict[ReservationId, tuple[str, int]] = {}
        """Peer and pages of each reservation whose prompt is to come."""
        self._of_peer: Counter[str] = Counter()
        """Those pages, summed up."""
        self._line: list[_Waiting] = []
        self._due = False
        manager.on_room = self._room

    def __len__(self) -> int:
        """Requests that wait."""
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
        peer, pages = self._charged.pop(reservation.id, ("", 0))
        if peer:
            self._of_peer[peer] -= pages
            self._of_peer += Counter()  # drops those with nothing
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
        if self._line and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Let in who fits, in order, and by the rule of passing."""
        self._due = False
        while (head := self._head()) and self._served(head):
            self._line.remove(head)
        if head is None:
            return
        if not head.again and self.make_room(_short_pages(head)):
            return
        for other in self._line[self._line.index(head) + 1 :]:
            if head.passed >= self._pass_limit:
                return
            if other.ask.pages < head.ask.pages and not self._aside(other) and self._served(other):
                self._line.remove(other)
                head.passed += 1

    def _head(self) -> _Waiting | None:
        """The first that doesn't stand aside."""
        return next((waiting for waiting in self._line if not self._aside(waiting)), None)

    def _aside(self, waiting: _Waiting) -> bool:
        """With it, more pages would be reserved for its peer than may be."""
        ask = waiting.ask
        held = self._of_peer[ask.peer] if ask.peer else 0
        if waiting.granted.done() or self._peer_pages is None or not held:
            return False
        found = self._manager.tree.match(ask.hashes, limit=ask.max_hit_pages).pages.size
        wanted = ask.pages - max(found - ask.drop_pages, 0)
        if held + wanted <= self._peer_pages:
            return False
        words = f"{held} pages are reserved for prompts from {ask.peer}, {wanted} more exceed {self._peer_pages}"
        waiting.refused = CapacityError(words, peer=ask.peer, held_pages=held, wanted_pages=wanted)
        return True

    def _beside(self, waiting: _Waiting) -> int:
        """Others that wait for what it waits for: room in the pool, or in its peer's share."""
        aside, peer = self._aside(waiting), waiting.ask.peer
        others = (other for other in self._line if other is not waiting and self._aside(other) is aside)
        return sum(not aside or other.ask.peer == peer for other in others)

    def _served(self, waiting: _Waiting) -> bool:
        """True if it needn't wait any more."""
        if waiting.granted.done():
            return True
        ask = waiting.ask
        try:
            made = self._manager.reserve(
                ask.hashes,
                ask.pages,
                max_hit_pages=ask.max_hit_pages,
                drop_pages=ask.drop_pages,
                priority=ask.priority,
            )
        except CapacityError as error:
            waiting.refused = error
            return False
        except PdkvError as error:
            waiting.granted.set_exception(error)
        else:
            if ask.peer:
                self._charged[made.id] = (ask.peer, len(made.pages))
                self._of_peer[ask.peer] += len(made.pages)
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
