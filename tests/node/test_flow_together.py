"""Tasks that run together: which error is raised, and that all have ended by then."""

from __future__ import annotations

import asyncio

import pytest

from pdkv.errors import PeerLost
from pdkv.node.flow import settle, together
from tests.node.scene import turns
from tests.node.test_flow import for_ever, go


def test_the_first_error_is_raised_as_itself_when_all_others_have_ended() -> None:
    async def scenario() -> None:
        ended: list[str] = []

        async def slow() -> None:
            try:
                await for_ever()
            finally:
                await asyncio.sleep(0)
                ended.append("slow")
                raise PeerLost("second")

        async def fast() -> None:
            await asyncio.sleep(0)
            raise PeerLost("first")

        async def all_of_them() -> None:
            async with together() as group:
                group.create_task(slow())
                group.create_task(fast())
                await for_ever()

        with pytest.raises(PeerLost, match="first"):
            await all_of_them()
        assert ended == ["slow"]

    go(scenario)


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_is_cancelled_while_the_others_end_is_told_so(cancelled: bool) -> None:
    async def scenario() -> None:
        may_end = asyncio.Event()

        async def all_of_them() -> None:
            async with together() as group:
                group.create_task(settle(asyncio.create_task(may_end.wait())))
                await asyncio.sleep(0)
                raise PeerLost("first")

        task = asyncio.create_task(all_of_them())
        await turns(3)
        if cancelled:
            task.cancel()
            await turns(3)
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled() is cancelled
        assert cancelled or isinstance(task.exception(), PeerLost)

    go(scenario)


@pytest.mark.parametrize("busy", [False, True])
def test_an_error_of_a_task_is_raised_as_itself_whether_the_body_is_over_or_not(busy: bool) -> None:
    async def scenario() -> None:
        async def fails() -> None:
            raise PeerLost("gone")

        async def body() -> None:
            async with together() as group:
                group.create_task(fails())
                if busy:
                    await asyncio.Event().wait()

        with pytest.raises(PeerLost):
            await body()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    go(scenario)


def test_an_error_of_the_body_ends_the_tasks() -> None:
    async def scenario() -> None:
        tasks: list[asyncio.Task[None]] = []

        async def body() -> None:
            async with together() as group:
                tasks.append(group.create_task(for_ever()))
                await asyncio.sleep(0)
                raise PeerLost("body")

        with pytest.raises(PeerLost, match="body"):
            await body()
        assert tasks[0].cancelled()

    go(scenario)


def test_one_that_is_closed_ends_as_that_and_not_as_cancelled() -> None:
    async def scenario() -> None:
        async def body() -> None:
            async with together():
                await for_ever()

        coroutine = body()
        task = asyncio.create_task(coroutine)
        await turns(3)
        task.cancel()
        coroutine.close()
        await asyncio.wait([task])
        assert isinstance(task.exception(), RuntimeError), "its coroutine is over"

    go(scenario)
