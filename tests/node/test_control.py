"""A drain that an operator asks for, and the end that may follow it."""

from __future__ import annotations

import asyncio

import pytest

from pdkv.errors import ConfigError
from pdkv.node.control import Control
from pdkv.node.readiness import Readiness


def test_not_ready_at_once_and_back_when_nothing_runs() -> None:
    async def body() -> None:
        idle = asyncio.Event()
        readiness = Readiness()

        async def drain() -> None:
            await idle.wait()

        control = Control(readiness, drain)
        first = asyncio.create_task(control.drain(end=False))
        await asyncio.sleep(0)
        assert readiness.unready == "drained by an operator"
        assert not control.told.is_set()
        again = asyncio.create_task(control.drain(end=True))
        await asyncio.sleep(0)
        assert control.told.is_set()
        assert not first.done()
        idle.set()
        await asyncio.gather(first, again)
        assert readiness.unready

    asyncio.run(body())


def test_pages_are_compacted_where_there_are_some() -> None:
    async def drain() -> None: ...

    async def compact() -> int:
        return 5

    assert asyncio.run(Control(Readiness(), drain, compact).compact()) == 5
    with pytest.raises(ConfigError, match="no pages"):
        asyncio.run(Control(Readiness(), drain).compact())
