"""Requests that have started and get their pages as they need them: who gets some next.

Guarantees: they are served in the order of their start, again as long as one of them gets something; who stops waiting,
by deadline or cancelled, leaves nothing behind. Nobody takes what those who started before need next, a window each,
unless everybody who has started waits; and a grant leaves everybody sure of the rest (`granting`). So everybody gets
all that it claimed, if those end who have theirs. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import BoundsError, CapacityError, PdkvError
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.node.shares import PeerShares


@dataclass(eq=False, slots=True)
class Growing:
    """A request that has started and waits for more of its pages."""

    reservation: Reservation
    pages: int
    """So many of its sequence have to be there,"""
    most: int
    """and so many may."""
    granted: asyncio.Future[None]
    passed: int = 0
    """How often others went in while it was the first that waits."""

    @property
    def size(self) -> int:
        """Pages in all."""
        return self.reservation.total_pages


class Started:
    """Those of one manager."""

    def __init__(self, manager: CacheManager, shares: PeerShares, window_pages: int | None) -> None:
        """`window_pages` None: all have their pages from the start."""
        self.window_pages = window_pages
        self.advance: Callable[[], None] = lambda: None
        """Called when somebody begins to wait: `serve` is due."""
        self.changed: Callable[[], None] = lambda: None
        """Called when others may be served that couldn't be before."""
        self._manager = manager
        self._shares = shares
        self._waiting: list[Growing] = []

    def __len__(self) -> int:
        """Waits: a request may have several, each announcement for its own pages."""
        return len(self._waiting)

    def claims(self) -> dict[str, int]:
        """Pages that they have claimed, and hold by now; and how many requests wait for more (growing)."""
        started = self._manager.reservations.values()
        claimed, held = sum(each.total_pages for each in started), sum(len(each.sequence) for each in started)
        return {"claimed": claimed, "held": held, "growing": len({each.reservation.id for each in self._waiting})}

    def there(self) -> int:
        """Pages that are free or evictable."""
        return self._manager.allocator.free_count + self._manager.tree.evictable

    def needed_before(self, reservation: Reservation | None) -> int:
        """Pages that those who started before it, or all, need next: a window each."""
        window = self.window_pages or 0
        started = self._manager.reservations.values()
        return sum(min(each.rest, window) for each in started if reservation is None or each.id < reservation.id)

    def take(self, reservation: Reservation, pages: int) -> None:
        """Have so many pages of its sequence if that may be now, and nobody waits for some."""
        more = pages - len(reservation.sequence)
        if more > 0 and not self._waiting and self._given(reservation, more):
            self.changed()  # where it lacked pages of its prompt, another one may come in a window now

    async def reach(self, reservation: Reservation, pages: int, *, until: int) -> None:
        """Return once `pages` of its sequence are there. A window more are taken, as far as `until`, unless somebody
        waits for pages. Raises `ReservationDead`, `BoundsError` beyond those that it may ever have."""
        most = min(pages + (self.window_pages or 0), until)
        if pages <= len(reservation.sequence):
            return self.take(reservation, most)
        if pages > reservation.total_pages:
            raise BoundsError("pages of a sequence", pages, f"at most {reservation.total_pages}")
        waiting = Growing(reservation, pages, max(pages, most), asyncio.get_running_loop().create_future())
        insort(self._waiting, waiting, key=lambda each: each.reservation.id)
        try:
            self.advance()
            await waiting.granted
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.changed()

    def serve(self) -> Growing | None:
        """Give what can be given: what one gets may be what makes it safe for another. The first that goes on waiting,
        if any does."""
        moved = True
        while moved:
            served = [each for each in self._waiting if self._served(each)]
            self._waiting = [each for each in self._waiting if each not in served]
            moved = bool(served)
        return self._waiting[0] if self._waiting else None

    def _served(self, waiting: Growing) -> bool:
        """True if it needn't wait any more. It gets a window, or what it needs, or, where that would be unsafe, all."""
        reservation, have = waiting.reservation, len(waiting.reservation.sequence)
        ways = (waiting.most, waiting.pages, reservation.total_pages)[len(self) > 1 :]
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
        if count + self.needed_before(reservation) > self.there() and not self._all_wait():
            return False
        try:
            self._shares.require_growth(reservation, count)
            self._manager.grow(reservation, count)
        except CapacityError:
            return False
        return True

    def _all_wait(self) -> bool:
        """Everybody who has started: whoever can go on has to now."""
        return self._manager.reservations.keys() <= {each.reservation.id for each in self._waiting}
