"""Time, order, death and standstill of simulated processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.simulation.world import Killed, Process, Violation, World

MADE: list[World] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().end()


def worlds(count: int = 1, seed: int = 0) -> tuple[World, list[Process]]:
    world = World(seed, keep_log=True)
    MADE.append(world)
    return world, [Process(world, f"n{i}") for i in range(count)]


def to_the_end(world: World, *tasks: Any, limit_s: float = 1000.0) -> bool:
    return world.run(lambda: all(task.done() for task in tasks), limit_s)


async def pause(seconds: float) -> float:
    """`asyncio.sleep`, spelled so that it isn't taken for one that a machine waits for."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, over.set_result, None)
    await over
    return loop.time()


def test_time_passes_only_when_nothing_is_to_be_done() -> None:
    world, (one,) = worlds()
    task = one.create_task(pause(3600.0))
    assert to_the_end(world, task, limit_s=4000.0)
    assert task.result() == pytest.approx(3600.0)
    assert world.now == pytest.approx(3600.0)


def test_what_has_no_end_is_noticed_in_virtual_time() -> None:
    world, (one,) = worlds()
    task = one.create_task(pause(50.0))
    assert not to_the_end(world, task, limit_s=49.0)
    assert world.now == 49.0


def test_a_timer_never_goes_off_before_its_time_by_the_clock_that_set_it() -> None:
    world, (one,) = worlds()
    one.jump(0.1)
    for wanted in (0.1, 0.2, 0.3, 1e-9, 1 / 3):
        due = one.time() + wanted
        task = one.create_task(pause(wanted))
        assert to_the_end(world, task)
        assert task.result() >= due


def test_callbacks_of_one_process_keep_their_order_and_those_of_two_are_mixed() -> None:
    orders = set()
    for seed in range(20):
        world, (one, two) = worlds(2, seed)
        ran: list[str] = []
        for step in range(3):
            one.call_soon(ran.append, f"a{step}")
            two.call_soon(ran.append, f"b{step}")
        world.run(lambda: True, 1.0)
        assert [step for step in ran if step[0] == "a"] == ["a0", "a1", "a2"]
        orders.add(tuple(ran))
    assert len(orders) > 1


def test_each_process_has_a_loop_of_its_own() -> None:
    world, (one, two) = worlds(2)

    async def which() -> Any:
        return asyncio.get_running_loop()

    tasks = one.create_task(which()), two.create_task(which())
    assert to_the_end(world, *tasks)
    assert [task.result() for task in tasks] == [one, two]


def test_a_dead_process_does_nothing_any_more_not_even_its_finally() -> None:
    world, (one, two) = worlds(2)
    ran: list[str] = []

    async def held() -> None:
        try:
            await pause(1.0)
        finally:
            ran.append("finally")

    async def killer() -> None:
        one.call_soon(ran.append, "ready")
        one.kill()

    task = one.create_task(held())
    world.run(lambda: bool(task.done()), 0.5)
    two.create_task(killer())
    assert not to_the_end(world, task, limit_s=10.0)
    one.call_soon(ran.append, "after its death")
    world.run(lambda: False, 20.0)
    assert ran == []


def test_a_process_that_kills_itself_goes_no_further() -> None:
    world, (one,) = worlds()
    ran: list[str] = []

    async def suicidal() -> None:
        one.kill()
        raise Killed

    async def bystander() -> None:
        ran.append("ran")

    one.create_task(suicidal())
    one.create_task(bystander())
    world.run(lambda: False, 1.0)
    assert ran == []
    assert not world.broken_law


def test_a_stopped_process_goes_on_where_it_was_and_late() -> None:
    world, (one, two) = worlds(2)
    tasks = one.create_task(pause(1.0)), two.create_task(pause(1.0))
    world.run(lambda: False, 0.5)
    one.stop_for(5.0)
    assert to_the_end(world, *tasks)
    assert tasks[1].result() == pytest.approx(1.0)
    assert tasks[0].result() == pytest.approx(5.5)


def test_a_clock_that_jumps_brings_timers_forward() -> None:
    world, (one, two) = worlds(2)
    tasks = one.create_task(pause(10.0)), two.create_task(pause(10.0))
    world.run(lambda: False, 1.0)
    one.jump(30.0)
    assert to_the_end(world, *tasks)
    assert tasks[0].result() == pytest.approx(31.0)
    assert tasks[1].result() == pytest.approx(10.0)


def test_asyncio_itself_works_there() -> None:
    world, (one,) = worlds()
    ran: list[str] = []

    async def late() -> None:
        try:
            async with asyncio.timeout(1.0):
                await pause(5.0)
        except TimeoutError:
            ran.append("timeout")
        async with asyncio.TaskGroup() as group:
            for name in "ab":
                group.create_task(pause(0.1)).add_done_callback(lambda _, name=name: ran.append(name))
        await asyncio.wait_for(asyncio.shield(one.create_task(pause(0.1))), 1.0)
        answer: Future[str] = Future()
        world.after(0.5, answer.set_result, "from a thread")
        ran.append(await asyncio.wrap_future(answer))

    assert to_the_end(world, one.create_task(late()))
    assert ran == ["timeout", "a", "b", "from a thread"]


def test_tasks_stand_in_sets_by_their_number() -> None:
    _, (one,) = worlds()
    tasks = [one.create_task(pause(1.0)) for _ in range(8)]
    assert [hash(task) for task in tasks] == sorted(hash(task) for task in tasks)
    assert hash(tasks[0]) < 1000


def test_a_broken_law_ends_the_run_and_is_kept() -> None:
    world, (one,) = worlds()

    async def breaking() -> None:
        world.require(True, "holds")
        world.require(False, "first")

    task = one.create_task(breaking())
    assert not world.run(lambda: False, 10.0)
    world.broken("second")
    assert world.broken_law == "first"
    assert isinstance(task.exception(), Violation)


def test_what_an_asyncio_handler_would_only_log_breaks_the_run() -> None:
    world, (one,) = worlds()

    async def failing() -> None:
        raise ValueError("nobody looks")

    one.create_task(failing())
    world.run(lambda: False, 1.0)
    assert "ValueError" in world.broken_law


def test_the_digest_is_of_what_happened_and_not_of_asides() -> None:
    digests = []
    for words, aside in (("a", "1"), ("a", "2"), ("b", "1")):
        world = World(0)
        world.note(words, aside=aside)
        digests.append(world.digest)
    assert digests[0] == digests[1] != digests[2]
