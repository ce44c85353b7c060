"""Visits: when each begins, that none waits for another, and what one may fail with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import pytest

from pdkv.errors import PeerLost
from pdkv.node.flow import together
from pdkv.node.rounds import Rounds
from tests.node.scene import turns, until


class Milk(Rounds[str]):
    """Each house every 10 s; some don't open, some throw things."""

    def __init__(self, *houses: str) -> None:
        self.now_s = 100.0
        super().__init__(lambda: self.now_s)
        self.next_s = dict.fromkeys(houses, 100.0)
        self.visits: list[str] = []
        self.closed: dict[str, asyncio.Event] = {}
        self.throws: dict[str, Exception] = {}

    def due(self) -> Mapping[str, float]:
        return self.next_s

    async def visit(self, key: str) -> None:
        self.next_s[key] = self._now() + 10.0
        self.visits.append(key)
        if key in self.closed:
            await self.closed[key].wait()
        if key in self.throws:
            raise self.throws[key]


def test_what_is_due_is_visited_and_the_next_time_is_told() -> None:
    async def main() -> None:
        milk = Milk("a", "b")
        async with together() as group:
            assert milk.step(group) == math.inf, "both are under way"
        assert milk.visits == ["a", "b"]
        milk.next_s["b"] = 103.0
        async with together() as group:
            assert milk.step(group) == 3.0
        milk.now_s = 103.0
        async with together() as group:
            assert milk.step(group) == 7.0
        assert milk.visits == ["a", "b", "b"]
        milk.next_s.clear()
        async with together() as group:
            assert milk.step(group) == math.inf

    asyncio.run(main())


def test_a_house_that_does_not_open_holds_up_only_itself() -> None:
    async def main() -> None:
        milk = Milk("a", "b")
        milk.closed["a"] = asyncio.Event()
        milk.throws["b"] = PeerLost("a brick")
        async with together() as group:
            for _ in range(3):
                milk.step(group)
                await turns(3)
                milk.now_s += 10.0
            assert milk.visits == ["a", "b", "b", "b"]
            milk.closed.pop("a").set()
            await turns(3)
            milk.step(group)
        assert milk.visits.count("a") == 2

    asyncio.run(main())


def test_its_task_sleeps_until_the_next_one_is_due_or_something_changed() -> None:
    async def main() -> None:
        milk = Milk("a")
        loop = asyncio.get_running_loop()
        milk._now = loop.time
        milk.next_s = {"a": loop.time()}
        milk.visits = []
        task = asyncio.create_task(milk.run())
        await until(lambda: milk.visits == ["a"])
        await turns()
        assert milk.visits == ["a"], "not again before its time"
        milk.next_s = {"b": loop.time() + 0.02}
        milk.changed.set()
        await until(lambda: milk.visits == ["a", "b"])
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_a_bug_in_a_visit_is_no_affair_of_its_own() -> None:
    """The negative control of what is passed over: anything but a named error ends the whole, and is heard."""

    async def main() -> None:
        milk = Milk("a")
        milk._now = asyncio.get_running_loop().time
        milk.throws["a"] = KeyError("bug")
        with pytest.raises(KeyError):
            await milk.run()

    asyncio.run(main())
