"""The cache manager in any order of events, against a plain model; and proof that the model sees what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdkv.errors import PdkvError
from pdkv.ids import LeaseId, LocalPages
from pdkv.kvcache.eviction import Key, NodeUse
from pdkv.kvcache.manager import CacheManager, Reservation
from tests.kvcache.manager_model import ManagerMachine

QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestAnyOrderOfEvents = ManagerMachine.TestCase
TestAnyOrderOfEvents.settings = QUICK


def _no_bump(manager: CacheManager) -> None:
    manager.table.bump = lambda pages: None  # type: ignore[method-assign]


def _no_bump_for_its_own_owner(manager: CacheManager) -> None:
    reopen, bump = manager.reopen_private, manager.table.bump

    def without_bump(reservation: Reservation, pages: LocalPages) -> None:
        manager.table.bump = lambda pages: None  # type: ignore[method-assign]
        try:
            reopen(reservation, pages)
        finally:
            manager.table.bump = bump  # type: ignore[method-assign]

    manager.reopen_private = without_bump  # type: ignore[method-assign]


def _no_lock(manager: CacheManager) -> None:
    manager.tree.lock = manager.tree.unlock = lambda node, *, use=None: None  # type: ignore[method-assign]
    manager.tree.extend_lock = lambda held, to, *, use=None: None  # type: ignore[method-assign]


def _quarantine_is_forgotten(manager: CacheManager) -> None:
    manager._hold_back = lambda reservation, pages, reason: None  # type: ignore[method-assign]


def _commit_of_the_dead(manager: CacheManager) -> None:
    """An end that leaves the reservation listed, so that a late commit finds it."""
    end = manager.end

    def without_forgetting(reservation: Reservation, *, writers: bool = False) -> LocalPages:
        held = end(reservation, writers=writers)
        manager.reservations[reservation.id] = reservation
        return held

    manager.end = without_forgetting  # type: ignore[method-assign]


def _lease_holds_no_lock(manager: CacheManager) -> None:
    hand_over = manager.hand_over

    def without_lock(reservation: Reservation, lease_id: LeaseId) -> None:
        hand_over(reservation, lease_id)
        manager.tree.unlock(reservation.node)
        manager.tree.lock(manager.tree.root)
        manager.leased[lease_id] = replace(manager.leased[lease_id], node=manager.tree.root)

    manager.hand_over = without_lock  # type: ignore[method-assign]


def _freed_under_a_writer(manager: CacheManager) -> None:
    end = manager.end
    manager.end = lambda reservation, *, writers=False: end(reservation)  # type: ignore[method-assign]


def _answers_like_prompts(manager: CacheManager) -> None:
    class ByUseAlone:
        def key(self, node: NodeUse) -> Key:
            return (node.last_used,)

    manager.tree.order = ByUseAlone()


@pytest.mark.parametrize(
    "sabotage",
    [
        _no_bump,
        _no_bump_for_its_own_owner,
        _no_lock,
        _quarantine_is_forgotten,
        _commit_of_the_dead,
        _lease_holds_no_lock,
        _freed_under_a_writer,
        _answers_like_prompts,
    ],
)
def test_the_machine_finds(sabotage: Callable[[CacheManager], None]) -> None:
    class Sabotaged(ManagerMachine):
        def started(self) -> None:
            sabotage(self.manager)

        def audit(self) -> None:
            """Off: the model alone has to see it."""

    quick = settings(
        QUICK, max_examples=3000, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, PdkvError, pytest.fail.Exception)):
        run_state_machine_as_test(Sabotaged, settings=quick)
