"""Waiting: streams with an owner, steps that are never abandoned, deadlines with names."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from pdkv.errors import BoundsError, DeadlineExceeded, PeerLost, RequestCancelled
from pdkv.node.flow import Idle, Worker, begin, deadline, settle, streamed
from tests.node.scene import Gate, turns, until

Body = Callable[[Callable[[int], None]], Awaitable[None]]


def go(scenario: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own; no task may outlive it."""

    async def main() -> None:
        async with asyncio.timeout(20):
            await scenario()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def for_ever() -> None:
    await asyncio.Event().wait()


# --- begin ------------------------------------------------------------------------------------------------------------


def test_what_was_begun_goes_on_when_its_caller_is_cancelled() -> None:
    async def scenario() -> None:
        gate, done = asyncio.Event(), list[str]()

        async def work() -> str:
            await gate.wait()
            done.append("done")
            return "what it came to"

        task = begin(work())

        async def waits() -> str:
            return await asyncio.shield(task)

        first, second = asyncio.create_task(waits()), asyncio.create_task(waits())
        await turns(3)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        gate.set()
        assert await second == "what it came to"
        assert done == ["done"]

    go(scenario)


@pytest.mark.parametrize(("error", "lines"), [(PeerLost("gone"), 0), (RuntimeError("bug"), 1)])
def test_what_was_begun_and_fails_unheard_is_logged_if_it_is_a_bug(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def work() -> None:
            raise error

        begin(work())
        await turns(3)

    go(scenario)
    assert len(caplog.records) == lines


# --- settle -----------------------------------------------------------------------------------------------------------


def test_settling_outlasts_every_cancellation_and_tells_of_it_afterwards() -> None:
    async def scenario() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(settle(future))
        for _ in range(3):
            await turns(3)
            waiting.cancel()
        await turns(3)
        assert not waiting.done()
        future.set_result(1)
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    go(scenario)


@pytest.mark.parametrize(("error", "lines"), [(PeerLost("gone"), 0), (RuntimeError("bug"), 1)])
def test_what_settles_badly_is_not_raised_but_a_bug_is_logged(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        unheard: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(settle(future))
        await turns(3)
        future.set_exception(error)
        await waiting
        del future
        await turns(3)
        assert not unheard

    with caplog.at_level(logging.ERROR):
        go(scenario)
    assert len(caplog.records) == lines


# --- streams ----------------------------------------------------------------------------------------------------------


def test_events_come_in_order_and_the_error_after_them() -> None:
    async def run(emit: Callable[[int], None]) -> None:
        emit(1)
        await asyncio.sleep(0)
        emit(2)
        raise PeerLost("gone")

    async def scenario() -> None:
        got: list[int] = []

        async def take() -> None:
            async for event in streamed(run):
                got.append(event)

        with pytest.raises(PeerLost):
            await take()
        assert got == [1, 2]

    go(scenario)


@pytest.mark.parametrize("how", ["close", "cancel", "break"])
def test_when_control_returns_the_task_behind_a_stream_has_ended(how: str) -> None:
    async def scenario() -> None:
        ended: list[str] = []

        async def run(emit: Callable[[int], None]) -> None:
            emit(1)
            try:
                await for_ever()
            finally:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                ended.append("body")

        async def take(until_broken: bool) -> None:
            async with aclosing(streamed(run)) as events:
                async for _ in events:
                    if until_broken:
                        break
            ended.append("consumer")

        if how == "close":
            stream = streamed(run)
            assert await anext(stream) == 1
            await stream.aclose()
        elif how == "break":
            await take(True)
        else:
            consumer = asyncio.create_task(take(False))
            await turns(5)
            consumer.cancel()
            await asyncio.wait([consumer])
            assert consumer.cancelled()
        assert ended[0] == "body"

    go(scenario)


@pytest.mark.parametrize("closes", [True, False])
def test_a_bug_that_its_consumer_had_no_time_to_hear_of_is_logged(
    closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(emit: Callable[[int], None]) -> None:
        emit(1)
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        async with aclosing(streamed(run)) as events:
            assert await anext(events) == 1
            await turns(3)
            if not closes:
                with pytest.raises(ZeroDivisionError):
                    await anext(events)

    with caplog.at_level(logging.ERROR):
        go(scenario)
    assert len(caplog.records) == closes


def test_a_consumer_is_not_told_that_it_was_cancelled_when_somebody_else_was() -> None:
    async def run(emit: Callable[[int], None]) -> None:
        raise asyncio.CancelledError

    async def scenario() -> None:
        with pytest.raises(RequestCancelled):
            await anext(streamed(run))

    go(scenario)


def test_a_stream_runs_on_while_its_consumer_is_busy() -> None:
    async def scenario() -> None:
        done: list[int] = []

        async def run(emit: Callable[[int], None]) -> None:
            for i in range(5):
                emit(i)
                await asyncio.sleep(0)
                done.append(i)

        async with aclosing(streamed(run)) as events:
            await anext(events)
            await until(lambda: len(done) == 5)
            assert [event async for event in events] == [1, 2, 3, 4]

    go(scenario)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_names_what_was_waited_for() -> None:
    async def scenario() -> None:
        for seconds in (0.01, 0.0, -1.0):
            with pytest.raises(DeadlineExceeded, match="the moon"):
                async with deadline(seconds, "the moon"):
                    await for_ever()

    go(scenario)


def test_a_timeout_of_the_body_stays_its_own() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with deadline(10.0, "the moon"):
                raise TimeoutError
        with pytest.raises(DeadlineExceeded, match="inner"):
            async with deadline(10.0, "outer"), deadline(0.0, "inner"):
                await for_ever()

    go(scenario)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
def test_a_deadline_is_a_number(seconds: float) -> None:
    async def scenario() -> None:
        with pytest.raises(BoundsError, match="finite"):
            async with deadline(seconds, "the moon"):
                await for_ever()

    go(scenario)


# --- the worker -------------------------------------------------------------------------------------------------------


def test_a_running_step_is_waited_for_and_a_queued_one_never_runs() -> None:
    async def scenario() -> None:
        worker, gate, ran = Worker("w"), Gate(), []

        def step(name: str) -> str:
            if name == "first":
                gate.pass_by()
            ran.append((name, threading.current_thread().name))
            return name

        first, second, third = (asyncio.create_task(worker.run(step, name)) for name in ("first", "second", "third"))
        await gate.reached()
        first.cancel()
        second.cancel()
        await turns()
        assert second.cancelled()
        assert not first.done()
        gate.open()
        assert await third == "third"
        await asyncio.wait([first])
        assert first.cancelled()
        assert [name for name, _ in ran] == ["first", "third"]
        assert all(thread.startswith("w") for _, thread in ran)
        worker.close()

    go(scenario)


def test_a_steps_error_is_its_callers() -> None:
    async def scenario() -> None:
        worker = Worker("w")
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        assert await worker.run(lambda: 7) == 7
        worker.close()

    go(scenario)


def test_what_is_to_be_done_soon_is_done_before_what_comes_after_it() -> None:
    async def scenario() -> None:
        worker, gate, ran = Worker("w"), Gate(), []
        running = asyncio.create_task(worker.run(gate.pass_by))
        await gate.reached()
        await asyncio.to_thread(worker.soon, ran.append, 1)
        worker.soon(lambda: 1 // 0)
        worker.soon(ran.append, 2)
        gate.open()
        await running
        assert await worker.run(ran.copy) == [1, 2]
        worker.close()
        worker.soon(ran.append, 3)
        assert len(ran) == 2

    go(scenario)


def test_closing_waits_for_the_running_step() -> None:
    async def scenario() -> None:
        worker, gate, ran = Worker("w"), Gate(), []

        def step() -> None:
            gate.pass_by()
            ran.append(1)

        running = asyncio.create_task(worker.run(step))
        await gate.reached()
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await turns()
        assert not closing.done()
        gate.open()
        await closing
        assert ran == [1]
        await running

    go(scenario)


def test_a_queued_step_of_a_worker_that_is_closed_ends_as_cancelled() -> None:
    async def scenario() -> None:
        worker, gate, ran = Worker("w"), Gate(), []
        running = asyncio.create_task(worker.run(gate.pass_by))
        await gate.reached()
        queued = asyncio.create_task(worker.run(ran.append, 1))
        await turns()
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.wait([queued])
        assert queued.cancelled()
        gate.open()
        await asyncio.gather(running, closing)
        assert not ran

    go(scenario)


# --- idleness ---------------------------------------------------------------------------------------------------------


def test_idle_is_waited_for_however_often_it_is_busy_again() -> None:
    async def scenario() -> None:
        busy = 2
        idle = Idle(lambda: busy)
        waiting = asyncio.create_task(idle.wait())
        for left in (1, 2, 1):
            busy = left
            idle.changed()
            await turns(5)
            assert not waiting.done()
        busy = 0
        idle.changed()
        await waiting
        await idle.wait()

    go(scenario)
