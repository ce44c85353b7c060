"""Whatever is broken on purpose, the audit says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdkv.errors import IntegrityError
from pdkv.ids import LeaseId, LocalPages, PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import CACHED, PageState, claim
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.chains import chain_of
from tests.kvcache.manager_model import FMT

NUM_PAGES = 13


def page(number: int) -> LocalPages:
    return LocalPages.checked(np.array([number]), NUM_PAGES)


@pytest.fixture
def managed() -> tuple[CacheManager, Reservation]:
    """Pages 1, 2 cached under a lock; 3, 4 reserved; 5 quarantined; 6 a lease's tail; 7 an ended one's quarantined."""
    manager = CacheManager(SlotPool.create(FMT, NUM_PAGES))
    verifier = Verifier(manager.pool, "none")
    reservation = manager.reserve(chain_of("abcd"), 6, max_hit_pages=0)
    manager.commit(verifier.seal(reservation.id, 0, reservation.pages[:2], chain_of("ab")))
    manager.quarantine(reservation, page(5), "no end seen")
    manager.take_private(reservation, page(6))
    manager.seal_private(reservation, verifier.seal(reservation.id, 5, page(6), chain_of("t")))
    manager.hand_over(reservation, LeaseId("lease"))
    manager.end(manager.reserve(chain_of("x"), 1, max_hit_pages=0), writers=True)
    manager.check()
    return manager, reservation


def _count(manager: CacheManager, reservation: Reservation) -> None:
    manager.ownership._counts[PageState.FREE] += 1


def _lock(manager: CacheManager, reservation: Reservation) -> None:
    manager.tree.unlock(reservation.node)


def _free_page_still_owned(manager: CacheManager, reservation: Reservation) -> None:
    manager.allocator.free(page(3))


def _cached_page_lost(manager: CacheManager, reservation: Reservation) -> None:
    manager.ownership.move(page(2), CACHED, claim(PageState.PRIVATE, reservation.id))


def _cached_page_unsealed(manager: CacheManager, reservation: Reservation) -> None:
    manager.table.bump(page(1))


def _reserved_page_sealed(manager: CacheManager, reservation: Reservation) -> None:
    manager.table.seal(page(3), chain_of("c"))


def _row_renamed(manager: CacheManager, reservation: Reservation) -> None:
    manager.table.bump(page(1))
    manager.table.seal(page(1), chain_of("z"))


def _quarantine_miscounted(manager: CacheManager, reservation: Reservation) -> None:
    manager.held_back[reservation.id].pages += 1


def _quarantine_forgotten(manager: CacheManager, reservation: Reservation) -> None:
    manager.held_back.clear()


def _reservation_forgotten(manager: CacheManager, reservation: Reservation) -> None:
    """Its pages have leaked; its lock has been given back."""
    manager.tree.unlock(reservation.node)
    del manager.reservations[reservation.id]


def _lease_forgotten(manager: CacheManager, reservation: Reservation) -> None:
    manager.tree.unlock(manager.leased.pop(LeaseId("lease")).node)


def _page_stolen(manager: CacheManager, reservation: Reservation) -> None:
    manager.ownership.move(page(3), claim(PageState.RESERVED, reservation.id), claim(PageState.PRIVATE, 99))


def _prefix_overstated(manager: CacheManager, reservation: Reservation) -> None:
    reservation.committed += 1


def _other_prompt(manager: CacheManager, reservation: Reservation) -> None:
    reservation.hashes = PageHashes(chain_of("zzzz").raw)


@pytest.mark.parametrize(
    "broken",
    [
        _count,
        _lock,
        _free_page_still_owned,
        _cached_page_lost,
        _cached_page_unsealed,
        _reserved_page_sealed,
        _row_renamed,
        _quarantine_miscounted,
        _quarantine_forgotten,
        _reservation_forgotten,
        _lease_forgotten,
        _page_stolen,
        _prefix_overstated,
        _other_prompt,
    ],
)
def test_the_audit_sees(
    managed: tuple[CacheManager, Reservation], broken: Callable[[CacheManager, Reservation], None]
) -> None:
    broken(*managed)
    with pytest.raises(IntegrityError):
        managed[0].check()
