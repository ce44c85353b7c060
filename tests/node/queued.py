"""A queue over a real manager without bytes, and requests that wait in it by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.node.queue import AdmissionQueue, Ask
from pdkv.replay.pool import pool_without_bytes
from tests.node.scene import LIMIT_S, turns

PAGES = 10


def ask(pages: int, hashes: PageHashes | None = None, peer: str = "") -> Ask:
    return Ask(hashes or PageHashes(), pages, max_hit_pages=len(hashes or ()), peer=peer)


class Bench:
    """A queue, and requests that wait in it by name, in the order in which they got in."""

    def __init__(self, **settings: int) -> None:
        self.manager = CacheManager(pool_without_bytes(PAGES))
        self.queue = AdmissionQueue(self.manager, **settings)  # type: ignore[arg-type]
        self.order: list[str] = []
        self.has: dict[str, Reservation] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(
        self, name: str, pages: int, hashes: PageHashes | None = None, *, again: bool = False, peer: str = ""
    ) -> None:
        async def wait() -> None:
            self.has[name] = await self.queue.admit(ask(pages, hashes, peer), again=again)
            self.order.append(name)

        self.tasks[name] = asyncio.create_task(wait())
        await turns(3)

    async def go(self, name: str) -> None:
        self.queue.settle(self.has[name])
        self.manager.end(self.has.pop(name))
        self.manager.check()
        await turns(3)

    def free(self) -> int:
        return self.manager.census()["free"]


def play(scenario: Callable[[Bench], Awaitable[None]], **settings: int) -> Bench:
    async def main() -> Bench:
        bench = Bench(**settings)
        async with asyncio.timeout(LIMIT_S):
            await scenario(bench)
        left = [task for task in bench.tasks.values() if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert len(bench.queue) == 0
        for reservation in bench.has.values():
            bench.queue.settle(reservation)
            bench.manager.end(reservation)
        assert len(bench.queue.shares) == 0
        assert len(bench.queue.started) == 0
        assert bench.free() + bench.manager.census()["cached"] == PAGES
        bench.manager.check()
        return bench

    return asyncio.run(main())
