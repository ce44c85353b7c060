"""Deaths that were ordered count as kills, others as faults of the product; faults that a node names count by stage."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.soak.aims import AT_ANY_TIME
from pdkv.cli.soak.keeper import Keeper
from pdkv.cli.soak.report import SoakReport
from pdkv.node.stages import Stage


class Process:
    """Ends with `code`, or never."""

    def __init__(self, code: int | None) -> None:
        self._code = code
        self.signals: list[signal.Signals] = []

    async def wait(self) -> int:
        if self._code is None:
            await asyncio.Event().wait()
        return self._code or 0

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    async def stop(self) -> None:
        self.signal(signal.SIGTERM)


class Nursery:
    """Gives out processes that end with these codes, the last of which never ends."""

    def __init__(self, tmp: Path, *codes: int) -> None:
        self._tmp = tmp
        self._codes: list[int | None] = [*codes, None]
        self.flags: list[dict[str, Any]] = []

    def log(self, name: str) -> Path:
        path = self._tmp / name
        path.write_text("first\nlast words\n")
        return path

    async def start(self, role: str, name: str, flags: Mapping[str, Any], heard: Callable[[str], None]) -> Process:
        self.flags.append(dict(flags))
        return Process(self._codes[len(self.flags) - 1])


def keeper(nursery: Nursery) -> tuple[Keeper, SoakReport]:
    report = SoakReport(seed=0)
    return Keeper(nursery, report, 0, pool_pages=64, say=lambda text: None), report  # type: ignore[arg-type]


class Victim(Process):
    """Counts its deaths, and lives on."""

    def __init__(self) -> None:
        super().__init__(None)
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


async def harassed(keeper: Keeper, times: int) -> None:
    """So many faults from outside."""
    keeper._stopped = lambda post, process: None  # type: ignore[method-assign]
    task = asyncio.create_task(keeper.harass(1e-9))
    async with asyncio.timeout(10):
        while sum(keeper._report.faults.values()) < times:
            await asyncio.sleep(0)
    task.cancel()


async def kept(keeper: Keeper, lives: int) -> None:
    """The first prefill node's place, until its `lives`-th process serves."""
    post = keeper.prefills[0]
    task = asyncio.create_task(keeper.keep(post))
    async with asyncio.timeout(10):
        while post.lives < lives:
            await asyncio.sleep(0)
    task.cancel()


def test_a_kill_is_a_kill_and_the_place_is_filled_again(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, -signal.SIGKILL)
    nodes, report = keeper(nursery)
    asyncio.run(kept(nodes, 2))
    assert (report.kills, report.restarts, report.unclean_exits) == (1, 1, 0)
    assert nursery.flags[0]["bind"] == nursery.flags[1]["bind"]


@pytest.mark.parametrize(("well", "due"), [(True, ["disturbed", "lost"]), (False, ["disturbed"])])
def test_a_prefill_nodes_death_counts_where_all_others_are_well(well: bool, due: list[str], tmp_path: Path) -> None:
    nodes, _ = keeper(Nursery(tmp_path, -signal.SIGKILL))
    heard: list[str] = []
    nodes.lost, nodes.disturbed = lambda: heard.append("lost"), lambda: heard.append("disturbed")
    for post in nodes.nodes[1:]:
        post.serving.set()
    nodes.decodes[0].stopped = not well
    asyncio.run(kept(nodes, 2))
    assert heard == due


@pytest.mark.parametrize("code", [-signal.SIGABRT, 1, 0])
def test_a_death_that_nobody_ordered_is_a_fault(tmp_path: Path, code: int) -> None:
    nodes, report = keeper(Nursery(tmp_path, code))
    asyncio.run(kept(nodes, 2))
    assert (report.kills, report.unclean_exits) == (0, 1)
    assert "last words" in report.notes[0]


def test_a_kill_in_peace_is_a_fault_too(tmp_path: Path) -> None:
    nodes, report = keeper(Nursery(tmp_path, -signal.SIGKILL))
    nodes.make_peace()
    asyncio.run(kept(nodes, 2))
    assert (report.kills, report.unclean_exits) == (0, 1)


def test_each_life_has_a_plan_at_what_was_hit_least(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, -signal.SIGKILL)
    nodes, report = keeper(nursery)
    report.faults.update(("kill", stage.value) for stage in Stage if stage is not Stage.SEALED)
    asyncio.run(kept(nodes, 2))
    assert all(flags["fault_plan"].startswith("kill@prefill.sealed:") for flags in nursery.flags)


def test_while_all_are_well_most_faults_from_outside_leave_a_recovery_to_be_measured(tmp_path: Path) -> None:
    def prefills_killed(*, all_well: bool) -> int:
        nodes, _ = keeper(Nursery(tmp_path))
        for post in nodes.nodes:
            post.process = Victim()  # type: ignore[assignment]
            post.serving.set()
        nodes.decodes[0].stopped = not all_well
        asyncio.run(harassed(nodes, 200))
        return sum(post.process.kills for post in nodes.prefills)  # type: ignore[union-attr, misc]

    assert prefills_killed(all_well=True) > 140
    assert prefills_killed(all_well=False) < 100


def test_what_a_node_says_of_its_fault_is_counted(tmp_path: Path) -> None:
    async def body() -> None:
        nodes, report = keeper(Nursery(tmp_path))
        await kept(nodes, 1)
        post = nodes.prefills[0]
        nodes._heard(post, "an ordinary line")
        nodes._heard(post, '{"fault": "stop", "stage": "prefill.sealed", "count": 1}')
        nodes._heard(post, '{"fault": "lose", "read": 3}')
        nodes._heard(post, '{"fault": "corrupt", "stage": "read.pages", "count": 3}')
        assert report.faults == {
            ("stop", "prefill.sealed"): 1,
            ("lose", AT_ANY_TIME): 1,
            ("corrupt", "read.pages"): 1,
        }
        assert report.stops == 1
        for task in nodes._loop_tasks:
            task.cancel()

    asyncio.run(body())


def test_those_who_dont_end_cleanly_are_counted(tmp_path: Path) -> None:
    async def body() -> None:
        nodes, report = keeper(Nursery(tmp_path))
        nodes.prefills[0].process = Process(0)  # type: ignore[assignment]
        nodes.decodes[0].process = Process(-signal.SIGABRT)  # type: ignore[assignment]
        await nodes.end()
        assert report.unclean_exits == 1
        assert "d0" in report.notes[0]

    asyncio.run(body())
