"""Deaths that were ordered count as kills, others as faults of the product; faults that a node names count by stage."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.soak.keeper import AT_ANY_TIME, MISSED, Keeper
from pdkv.cli.soak.report import SoakReport
from pdkv.node.fault_plan import FaultPlan
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


def test_each_life_gets_the_fault_that_had_fewest(tmp_path: Path) -> None:
    stages = [stage.value for stage in Stage if stage.value.startswith("prefill")]
    nursery = Nursery(tmp_path, *[-signal.SIGKILL] * (len(stages) - 1))
    nodes, _ = keeper(nursery)
    asyncio.run(kept(nodes, len(stages)))
    plans = [process_faults(flags["fault_plan"]) for flags in nursery.flags]
    assert sorted(plan[0] for plan in plans) == sorted(f"kill@{stage}" for stage in stages)
    mild = Counter(rule for plan in plans for rule in plan[1:])
    assert set(mild) == {f"{kind}@{stage}" for kind in ("stop", "fail", "delay") for stage in stages}
    assert max(mild.values()) - min(mild.values()) <= 1


def test_a_fault_that_is_never_come_to_strikes_early_in_the_end(tmp_path: Path) -> None:
    nodes, report = keeper(Nursery(tmp_path))
    for stage in Stage:
        if stage is not Stage.ADMITTED:
            report.faults["kill", stage.value] += 1
    plans = [nodes._plan(nodes.decodes[0]) for _ in range(MISSED + 1)]
    assert all(plan.startswith("kill@decode.admitted:nth=") for plan in plans)
    assert not any(plan.startswith("kill@decode.admitted:nth=1,") for plan in plans[:MISSED])
    assert plans[MISSED].startswith("kill@decode.admitted:nth=1,")


def process_faults(text: str) -> list[str]:
    """What it does at which stage; the plan is one that a node takes."""
    FaultPlan.parse(text)
    rules = [rule.partition(":")[0] for rule in text.partition(";")[0].split(",")]
    return [rule for rule in rules if rule.partition("@")[2] in set(Stage)]


def test_a_decode_nodes_plan_is_one_that_it_takes(tmp_path: Path) -> None:
    nodes, _ = keeper(Nursery(tmp_path))
    assert len(process_faults(nodes._plan(nodes.decodes[0]))) == 5


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
