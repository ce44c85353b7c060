"""Moves pages to lower numbers, so that what is free is one long run again.

Guarantees: both caches of a page move together, byte for byte, its unwritten slots with it; the row that peers read is
void before a byte moves, and the new one is sealed under the same hash after; tree, reservations, digests, claims and
observer know the new number when the call returns, and whoever holds an old `LocalPages` of a moved sequence has to
take the reservation's new one. Never moved is a page that somebody may write to, wait for or read here: reserved,
quarantined, kept by a lease, or in the sequence of a request that its caller did not name as resting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, ConfigError
from pdkv.ids import LocalPages, PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import PageState


def compact(manager: CacheManager, resting: Collection[Reservation] = (), *, limit: int | None = None) -> int:
    """Move the highest pages that may move into the lowest free ones, at most `limit`; returns how many.

    `resting`: live requests that no engine step works on and no peer reads, until the call returns. Costs the whole
    pool and tree: for a quiet moment. Raises `BoundsError` if one of them has ended, and as `move`.
    """
    can = np.flatnonzero(movable(manager, resting))[::-1]
    free = np.flatnonzero(manager.ownership.in_state(PageState.FREE))
    count = min(can.size, free.size, can.size if limit is None else max(limit, 0))
    count = int(np.count_nonzero(free[:count] < can[:count]))  # both ends meet once
    source = LocalPages.checked(np.sort(can[:count]), manager.pool.num_pages)  # runs of pages stay runs
    move(manager, source, LocalPages.checked(free[:count], manager.pool.num_pages), resting)
    return count


def movable(manager: CacheManager, resting: Collection[Reservation] = ()) -> npt.NDArray[np.bool_]:
    """bool [num_pages]: cached pages that nobody but resting requests has locked, and private pages of these."""
    found = np.zeros(manager.pool.num_pages, np.bool_)
    for request in resting:
        if manager.reservations.get(request.id) is not request:
            raise BoundsError("resting request", request.id, "a live reservation")
        found[request.pages.array] = manager.ownership.held(request.pages, request.id, PageState.PRIVATE)
    locks = Counter(node for request in resting for node in request.node.path())
    stack = [manager.tree.root]
    while stack:
        node = stack.pop()
        found[node.pages] = node.locks == locks[node]
        stack += node.children.values()
    return found


def move(manager: CacheManager, source: LocalPages, target: LocalPages, resting: Collection[Reservation] = ()) -> None:
    """Page i of `source` becomes page i of `target`. Raises `BoundsError`, with nothing changed, for a page that must
    not move, one that is not free to move to, or unless they are as many; `ConfigError` for the pages of a group.
    """
    if not manager.renumbers:
        raise ConfigError("compact", "a group of ranks", "a node by itself: a page has one number on all ranks")
    can = movable(manager, resting)[source.array]
    if not can.all():
        raise BoundsError("page to move", int(source.array[~can][0]), "one that nobody may write to or read meanwhile")
    free = manager.allocator.is_free(target)
    if not free.all() or len(source) != len(target):
        have = int(target.array[~free][0]) if not free.all() else f"{len(target)} pages"
        raise BoundsError("page to move to", have, f"{len(source)} free pages")
    sealed, hashes = manager.table.sealed(source), manager.table.hashes(source)
    cached = manager.tree.holds(source.array)
    manager.table.bump(source)
    manager.pool.copy_pages(source, target)
    manager.table.seal(target.where(sealed), PageHashes(hashes.rows()[sealed].tobytes()))
    manager.carry_digests(source, target)
    manager.ownership.renumber(source, target)
    manager.tree.renumber(source.array[cached], target.array[cached])
    number = np.arange(manager.pool.num_pages, dtype=np.int32)
    number[source.array] = target.array
    for request in resting:
        request.set(*(LocalPages.kept(number[pages.array]) for pages in (request.hit, request.sequence)))
    _take(manager, target)
    manager.allocator.free(source)
    if manager.observer is not None:
        manager.observer.moved(source.where(cached), target.where(cached))


def _take(manager: CacheManager, pages: LocalPages) -> None:
    """These free pages, and no others, out of the allocator."""
    allocator = manager.allocator
    every = allocator.allocate(allocator.free_count)
    allocator.free(every.where(~np.isin(every.array, pages.array)))
