"""The cache manager under pressure in any order of events; and proof that the model sees what goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdkv.errors import PdkvError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.offload import HostCopy
from tests.kvcache.pressure_model import PressureMachine

QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestAnyOrderOfEvents = PressureMachine.TestCase
TestAnyOrderOfEvents.settings = QUICK


def _only_main_moves(machine: PressureMachine) -> None:
    def copy_pages(source: LocalPages, target: LocalPages) -> None:
        for piece in machine.pool.pieces(Group.MAIN):
            view = machine.pool.piece_view(piece).numpy()
            view[target.array] = view[source.array]

    machine.pool.copy_pages = copy_pages  # type: ignore[method-assign]


def _the_tree_is_not_told(machine: PressureMachine) -> None:
    machine.manager.tree.renumber = lambda source, target: None  # type: ignore[method-assign]


def _digests_stay_behind(machine: PressureMachine) -> None:
    machine.manager.carry_digests = lambda source, target: None  # type: ignore[method-assign]


def _moved_without_a_word_to_peers(machine: PressureMachine) -> None:
    copy, bump = machine.pool.copy_pages, machine.manager.table.bump

    def copy_pages(source: LocalPages, target: LocalPages) -> None:
        copy(source, target)
        at = source.array
        machine.manager.table._generation[at] -= np.uint64(1)

    machine.pool.copy_pages = copy_pages  # type: ignore[method-assign]
    machine.manager.table.bump = bump  # type: ignore[method-assign]


def _index_is_lost_on_the_way_back(machine: PressureMachine) -> None:
    save = machine.store.save

    def lossy(pages: LocalPages, tokens: int) -> HostCopy:
        copy = save(pages, tokens)
        copy.rows[1][:] = 0
        return copy

    machine.store.save = lossy  # type: ignore[method-assign]


def _host_memory_is_never_given_back(machine: PressureMachine) -> None:
    machine.store.drop = lambda copy: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "sabotage",
    [
        _only_main_moves,
        _the_tree_is_not_told,
        _digests_stay_behind,
        _moved_without_a_word_to_peers,
        _index_is_lost_on_the_way_back,
        _host_memory_is_never_given_back,
    ],
)
def test_the_machine_finds(sabotage: Callable[[PressureMachine], None]) -> None:
    class Sabotaged(PressureMachine):
        def sabotaged(self) -> None:
            sabotage(self)

        def audit(self) -> None:
            """Off: the model alone has to see it."""

    quick = settings(
        QUICK, max_examples=300, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, PdkvError, pytest.fail.Exception)):
        run_state_machine_as_test(Sabotaged, settings=quick)
