"""The laws of the cache manager, recounted from scratch.

Guarantees: an `IntegrityError` whenever counts, free extents, tree, locks, page-table rows and holders don't tell the
same of every page. It costs the whole pool and tree and changes nothing: for tests and `pdkv doctor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdkv.errors import IntegrityError
from pdkv.ids import LocalPages
from pdkv.kvcache.granting import certain
from pdkv.kvcache.ownership import PageState

if TYPE_CHECKING:
    from pdkv.kvcache.manager import CacheManager


def audit(manager: CacheManager) -> None:
    """Raises `IntegrityError` naming what disagrees."""
    manager.ownership.check()
    manager.allocator.check()
    live, leased = manager.reservations.values(), manager.leased.values()
    manager.tree.check([r.node for r in live] + [kept.node for kept in leased])
    _pages_by_state(manager)
    _pages_by_holder(manager)
    _committed_prefixes(manager)
    _what_comes_back(manager)


def _pages_by_state(manager: CacheManager) -> None:
    """The allocator's, the tree's and the page table's view of each page against its state."""
    num_pages = manager.pool.num_pages
    every = LocalPages.checked(np.arange(1, num_pages), num_pages)
    states = (PageState.FREE, PageState.CACHED, PageState.PRIVATE)
    free, cached, private = (manager.ownership.in_state(s)[1:] for s in states)
    sealed = manager.table.sealed(every)
    renamed = (manager.tree.hashes(every.array) != manager.table.hashes(every).rows()).any(axis=1)
    wrong = {
        "free, or not, against the allocator": free != manager.allocator.is_free(every),
        "cached, or not, against the tree": cached != manager.tree.holds(every.array),
        "cached and not sealed": cached & ~sealed,
        "sealed and neither cached nor private": sealed & ~(cached | private),
        "sealed under another hash than the tree's": cached & renamed,
    }
    for what, pages in wrong.items():
        if pages.any():
            raise IntegrityError(f"pages are {what}", pages=every.array[pages])


def _pages_by_holder(manager: CacheManager) -> None:
    """Nobody holds a page but a live reservation, a lease, or a reservation whose pages are held back."""
    held_back = {int(of): held.pages for of, held in manager.held_back.items()}
    quarantined = manager.ownership.holders(PageState.QUARANTINED)
    if quarantined != held_back:
        raise IntegrityError("quarantined pages by reservation", counted=quarantined, kept=held_back)
    states = (PageState.RESERVED, PageState.PRIVATE, PageState.QUARANTINED)
    expected = dict(held_back)
    for reservation in manager.reservations.values():
        expected[reservation.id] = int(manager.ownership.held(reservation.pages, reservation.id, *states).sum())
    for kept in manager.leased.values():
        expected[kept.holder] = len(kept.private)
    expected = {holder: pages for holder, pages in expected.items() if pages}
    found = manager.ownership.holders(*states)
    if found != expected:
        raise IntegrityError("pages by holder", counted=found, kept=expected)


def _committed_prefixes(manager: CacheManager) -> None:
    """A live reservation's lock covers exactly the prefix of its prompt that it hit and committed."""
    for reservation in manager.reservations.values():
        path = manager.tree.pages_to(reservation.node)
        known = reservation.hashes.part(0, reservation.committed)
        if path.size != reservation.committed or not np.array_equal(manager.tree.hashes(path), known.rows()):
            raise IntegrityError(f"reservation {reservation.id} has locked another prefix than it committed")


def _what_comes_back(manager: CacheManager) -> None:
    """No request has more than it said it would need, and what its end is counted to give back is there."""
    own = (PageState.RESERVED, PageState.PRIVATE)
    for reservation in manager.reservations.values():
        alone = sum(node.pages.size for node in reservation.node.path() if node.locks == 1)
        there = alone + int(manager.ownership.held(reservation.pages, reservation.id, *own).sum())
        if reservation.rest < 0 or certain(reservation) > there:
            counted = f"{certain(reservation)}, {reservation.rest} to come"
            raise IntegrityError(f"reservation {reservation.id} gives back", counted=counted, kept=there)
