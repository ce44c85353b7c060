"""How many requests a router runs at once, and how many may wait for that.

Guarantees: at most `running` requests are given to nodes at once and `waiting` wait, in the order in which they came;
one more is refused by name at once, with a time after which to come again; whoever waits, waits no longer than its
request may take, and is forgotten when its client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdkv.errors import RouterFull
from pdkv.node.flow import deadline

LEAST_AGAIN_S, MOST_AGAIN_S = 1.0, 60.0
"""Of what a client is told to wait."""
PACE_STEP = 0.1
"""How much the time between two ends of requests tells of the next."""


class Lobby:
    """Of one router."""

    def __init__(self, running: int, waiting: int, now: Callable[[], float]) -> None:
        """`now`: monotonic seconds."""
        self._limits = running, waiting
        self._places = asyncio.Semaphore(running)
        self._now = now
        self._full_s = 0.0
        """Since when all places are taken, and none has changed hands."""
        self._pace_s = LEAST_AGAIN_S
        """Between two ends of requests while all places are taken, on average: how idle it was before says nothing."""
        self.waiting = 0

    @asynccontextmanager
    async def place(self, remaining_s: float) -> AsyncIterator[None]:
        """One of the `running` places. Raises `RouterFull`, and `DeadlineExceeded` if none gets free in time."""
        if self._places.locked():
            await self._wait(remaining_s)
        else:
            await self._places.acquire()
        if self._places.locked():
            self._full_s = self._now()
        try:
            yield
        finally:
            self._left()

    @property
    def again_s(self) -> float:
        """After which a client that is refused may find a place: by then those who wait have one, at today's pace."""
        return min(max(self._pace_s * (self.waiting + 1), LEAST_AGAIN_S), MOST_AGAIN_S)

    async def _wait(self, remaining_s: float) -> None:
        running, waiting = self._limits
        if self.waiting >= waiting:
            again = f"{self.again_s:.3g}"
            words = f"this router runs {running} requests and {waiting} wait, as many as may: again in {again} s"
            raise RouterFull(words, running_limit=running, waiting_limit=waiting, retry_after_s=again)
        self.waiting += 1
        try:
            async with deadline(remaining_s, f"waiting for a place among {running} running requests"):
                await self._places.acquire()
        finally:
            self.waiting -= 1

    def _left(self) -> None:
        if self._places.locked():
            now_s = self._now()
            self._pace_s += PACE_STEP * (now_s - self._full_s - self._pace_s)
            self._full_s = now_s
        self._places.release()
