"""A page goes from one owner to the next: what every such move of the cache manager has in common.

Guarantees: a page's generation has moved, and its row is no longer sealed, before a new holder hears of it; allocator,
tree and claims tell the same of every page; a holder's number is never given twice. A call costs the pages it moves.
"""

from __future__ import annotations

import numpy as np

from pdkv.ids import LocalPages
from pdkv.kvcache.allocator import PageAllocator
from pdkv.kvcache.events import Observer
from pdkv.kvcache.eviction import EvictionOrder
from pdkv.kvcache.ownership import CACHED, FREE, Claim, Ownership, PageState, claim
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.radix_tree import RadixTree


class PageMoves:
    """The pages of one pool, and who has them."""

    def __init__(self, pool: SlotPool, *, order: EvictionOrder | None = None) -> None:
        self.pool = pool
        self.table = pool.table
        self.tree = RadixTree(pool.num_pages, order)
        self.allocator = PageAllocator(pool.num_pages)
        self.ownership = Ownership(pool.num_pages)
        self.evicted_pages = 0
        """Since the start, so far."""
        self.observer: Observer | None = None
        """Who wants to hear what the tree has: see `events`."""
        self._last_holder = 0

    def _new_holder(self) -> int:
        """To reservations and leases alike: an old one finds nothing of its own in a reused page."""
        self._last_holder += 1
        return self._last_holder

    def _take(self, count: int, holder: int) -> LocalPages:
        """`count` pages are reserved for the holder: free ones, then cached ones in the order of eviction.

        The rows of free pages have been void since they were freed (`_free`).
        """
        reserved = claim(PageState.RESERVED, holder)
        short = count - self.allocator.free_count
        if short <= 0:
            free = self.allocator.allocate(count)
            self.ownership.move(free, FREE, reserved)
            return free
        evicted = LocalPages.kept(self.tree.evict(short))
        if self.observer is not None:
            self.observer.removed(evicted)
        self.table.bump(evicted)
        self.ownership.move(evicted, CACHED, reserved)
        self.evicted_pages += short
        # All free pages are needed too, so in this order they and the evicted ones make the longest runs there are.
        free = self.allocator.allocate(count - short)
        self.ownership.move(free, FREE, reserved)
        both = np.concatenate((free.array, evicted.array))
        both.sort()
        return LocalPages.kept(both)

    def _free(self, pages: LocalPages, held_as: Claim) -> None:
        """A free page has no sealed row, and another generation than when it had one: who still reads it finds out."""
        self.ownership.move(pages, held_as, FREE)
        self._give_back(pages)

    def _give_back(self, pages: LocalPages) -> None:
        sealed = self.table.sealed(pages)
        if np.count_nonzero(sealed):
            self.table.bump(pages.where(sealed))
        self.allocator.free(pages)
