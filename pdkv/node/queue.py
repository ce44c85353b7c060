"""Who may reserve pages next: a bounded queue before the cache manager's `reserve`.

Guarantees: a waiting request holds neither locks nor pages; what can never fit is refused at once, and so is whoever
finds the queue full; whoever stops waiting, by deadline or cancelled, leaves nothing behind. Pages go to the head as
soon as they suffice for it. Another one may pass the head only if it wants fewer pages in all, fits now, no room is
being made for the head, and the head was passed less than `pass_limit` times: so a long request gets in after at most
`pass_limit` short ones for itself and for each that was ahead of it.

A request that was retracted comes again: it waits before all that are new, but behind a new one that is the head by
then, for which it may have been retracted. A priority is for eviction alone: were it to order the queue as well, a
stream of important requests would starve the others for ever, which the rule of passing rules out. Runs on one event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import CapacityError, IntegrityError, PdkvError
from pdkv.ids import PageHashes
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
        make_room: Callable[[int], bool] = lambda short_pages: False,
    ) -> None:
        """At most `limit` new requests wait. `make_room` hears how many pages a new request at the head lacks, and says
        whether some are being given back for it."""
        self.limit = limit
        self.make_room = make_room
        self._manager = manager
        self._pass_limit = pass_limit
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
            if not waiting.granted.done() and not again and len(self._line) > self.limit:
                raise self._full(waiting)
            return await waiting.granted
        except BaseException:
            if waiting.granted.done() and not waiting.granted.cancelled() and waiting.granted.exception() is None:
                self._manager.end(waiting.granted.result())
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
                self._room()  # whoever is the head now may fit

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
        while self._line and self._served(self._line[0]):
            del self._line[0]
        if not self._line:
            return
        head = self._line[0]
        if not head.again and self.make_room(_short_pages(head)):
            return
        for other in self._line[1:]:
            if head.passed >= self._pass_limit:
                return
            if other.ask.pages < head.ask.pages and self._served(other):
                self._line.remove(other)
                head.passed += 1

    def _served(self, waiting: _Waiting) -> bool:
        """True if it needn't wait any more."""
        if waiting.granted.done():
            return True
        ask = waiting.ask
        try:
            waiting.granted.set_result(
                self._manager.reserve(
                    ask.hashes,
                    ask.pages,
                    max_hit_pages=ask.max_hit_pages,
                    drop_pages=ask.drop_pages,
                    priority=ask.priority,
                )
            )
        except CapacityError as error:
            waiting.refused = error
            return False
        except PdkvError as error:
            waiting.granted.set_exception(error)
        return True

    def _full(self, waiting: _Waiting) -> CapacityError:
        ahead = len(self._line) - 1
        why = waiting.refused or CapacityError("those who wait come first")
        words = f"{ahead} requests wait already, the limit is {self.limit}; {why}"
        return CapacityError(words, queued=ahead, queue_limit=self.limit, **why.fields)


def _short_pages(head: _Waiting) -> int:
    if head.refused is None:
        raise IntegrityError("the head of the queue waits, but was never tried")
    return int(head.refused.fields["short_pages"])
