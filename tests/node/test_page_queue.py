"""Who waits for pages, in which order, and for how long; `reserve` is a counter of free pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdkv.errors import CapacityError, NeverFits
from pdkv.kvcache.manager import Reservation
from pdkv.node.messages import Accepted, LeaseCall
from pdkv.node.page_queue import PageQueue
from tests.node.scene import prefill_request, recovered, request, run, said, until
from tests.node.toy import Pair, make_pair


class Pages:
    def __init__(self, free: int) -> None:
        self.free = free
        self.served: list[str] = []

    def taking(self, name: str, count: int) -> Callable[[], Reservation]:
        def reserve() -> Reservation:
            if count > 99:
                raise NeverFits(f"{count} pages", wanted=count)
            if count > self.free:
                raise CapacityError(f"{count} pages, {self.free} free", wanted=count)
            self.free -= count
            self.served.append(name)
            return cast(Reservation, SimpleNamespace(name=name))

        return reserve


async def begun(*works: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(work) for work in works]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_first_come_first_served_and_what_can_never_fit_at_once() -> None:
    async def scenario() -> None:
        pages, queue = Pages(4), PageQueue(30.0)
        await queue.take(pages.taking("now", 3))
        tasks = await begun(*(queue.take(pages.taking(name, count)) for name, count in (("large", 5), ("small", 1))))
        assert (pages.served, len(queue)) == (["now"], 2), "the small one would fit, and waits for its turn"
        with pytest.raises(NeverFits):
            await PageQueue(30.0).take(pages.taking("huge", 100))
        pages.free += 3
        queue.changed()
        await begun()
        assert pages.served == ["now"]
        pages.free += 2
        queue.changed()
        await asyncio.gather(*tasks)
        assert (pages.served, len(queue), pages.free) == (["now", "large", "small"], 0, 0)

    asyncio.run(scenario())


def test_whoever_gives_up_lets_the_next_one_go() -> None:
    async def scenario() -> None:
        pages, queue = Pages(1), PageQueue(30.0)
        large, small = await begun(queue.take(pages.taking("large", 5)), queue.take(pages.taking("small", 1)))
        large.cancel()
        await small
        assert (large.cancelled() or large.cancelling(), pages.served, len(queue)) == (True, ["small"], 0)

    asyncio.run(scenario())


def test_whoever_waited_long_enough_is_told_what_was_short() -> None:
    async def scenario() -> None:
        pages, queue = Pages(1), PageQueue(0.05)
        with pytest.raises(CapacityError, match="7 pages, 1 free"):
            await queue.take(pages.taking("alone", 7))
        first, second = await begun(queue.take(pages.taking("a", 5)), queue.take(pages.taking("b", 6)))
        with pytest.raises(CapacityError, match="5 pages, 1 free"):
            await first
        with pytest.raises(CapacityError, match="1 requests wait"):
            await second
        never = asyncio.create_task(queue.take(pages.taking("huge", 100)))
        with pytest.raises(NeverFits):
            await never
        assert len(queue) == 0

    asyncio.run(scenario())


def test_a_prefill_node_whose_pages_are_all_lent_lets_the_next_request_wait_for_them() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        node = pair.prefill
        first, *_ = await said(node.prefill(prefill_request(pair, request(300, name="first"))))
        assert isinstance(first, Accepted)
        asked = prefill_request(pair, request(300, seed=1, name="second"))
        second = asyncio.create_task(said(node.prefill(asked)))
        await until(lambda: len(node.queue) == 1)
        assert node.status().queued == 1
        await node.release_lease(LeaseCall(asked.envelope, first.lease_id))
        other, *_ = await second
        assert isinstance(other, Accepted)
        await node.release_lease(LeaseCall(asked.envelope, other.lease_id))
        await recovered(pair)

    run(scenario, make_pair(prefill_pages=8))
