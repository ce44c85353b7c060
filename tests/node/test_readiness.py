"""Reasons for not being ready: which stand, and who hears of them."""

from __future__ import annotations

import asyncio

from pdkv.node.readiness import Readiness
from tests.node.scene import turns


def test_every_reason_has_to_be_taken_back() -> None:
    readiness = Readiness()
    assert readiness.unready == ""
    readiness.say("peers", "none answers")
    readiness.say("group", "a rank is lost")
    assert readiness.unready == "none answers; a rank is lost"
    readiness.say("peers", "")
    readiness.say("peers", "")
    assert readiness.unready == "a rank is lost"
    readiness.say("group", "")
    assert readiness.unready == ""


def test_who_watches_hears_each_change_once() -> None:
    async def main() -> None:
        readiness, heard = Readiness(), list[str]()
        slow = asyncio.Event()

        async def tell(why: str) -> None:
            heard.append(why)
            if why == "b":
                await slow.wait()

        watch = asyncio.create_task(readiness.watch(tell))
        await turns(3)
        for why in ("a", "a", "b"):
            readiness.say("x", why)
            await turns(3)
        # while it tells of one, others come and go: the latest counts
        readiness.say("x", "c")
        readiness.say("x", "d")
        await turns(3)
        assert heard == ["a", "b"]
        slow.set()
        await turns(3)
        readiness.say("x", "d")
        await turns(3)
        assert heard == ["a", "b", "d"]
        readiness.say("x", "")
        await turns(3)
        assert heard.pop() == ""
        watch.cancel()
        await asyncio.wait([watch])

    asyncio.run(main())


def test_details_are_told_and_are_no_change() -> None:
    async def main() -> None:
        readiness, heard = Readiness(), list[str]()

        async def tell(why: str) -> None:
            heard.append(why)

        watch = asyncio.create_task(readiness.watch(tell))
        for detail in ("d0 is late", "d0 is gone"):
            readiness.say("nodes", "no node is up", detail)
            await turns(3)
            assert readiness.unready == f"no node is up: {detail}"
        assert heard == ["no node is up: d0 is late"]
        readiness.say("nodes", "no two may be paired", "d0")
        await turns(3)
        readiness.say("nodes", "")
        await turns(3)
        assert heard[1:] == ["no two may be paired: d0", ""]
        watch.cancel()
        await asyncio.wait([watch])

    asyncio.run(main())
