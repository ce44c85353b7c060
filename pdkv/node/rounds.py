"""Visits to many, each at a pace of its own.

Guarantees: there is one visit at a time to each, and none waits for another's, so one that hangs holds up only itself;
what one visit fails with is its own affair, and ends nothing but itself if it is a `PdkvError`.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from pdkv.errors import PdkvError
from pdkv.node.flow import together

K = TypeVar("K", bound=Hashable)


class Rounds(ABC, Generic[K]):
    """`run` is its task for life; a test takes `step` by `step` instead, by a clock of its own."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: monotonic seconds, those of `due`."""
        self._now = now
        self._under_way: set[K] = set()
        self.changed = asyncio.Event()
        """To be set when a visit may be due earlier than was said."""

    @abstractmethod
    def due(self) -> Mapping[K, float]:
        """When each is to be visited next. A visit that has begun must have moved its own time on."""

    @abstractmethod
    async def visit(self, key: K) -> None:
        """May raise `PdkvError`: whom it concerns knows already."""

    def step(self, group: asyncio.TaskGroup) -> float:
        """Begin in `group` every visit that is due. Returns seconds until the next one is, `inf` if none is known."""
        now_s, next_s = self._now(), math.inf
        for key, due_s in self.due().items():
            if key in self._under_way:
                continue
            if due_s <= now_s:
                self._under_way.add(key)
                group.create_task(self._visit(key))
            else:
                next_s = min(next_s, due_s)
        return next_s - now_s

    async def run(self) -> None:
        """Until it is cancelled."""
        async with together() as group:
            while True:
                self.changed.clear()
                wait_s = self.step(group)
                try:
                    async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                        await self.changed.wait()
                except TimeoutError:
                    continue

    async def _visit(self, key: K) -> None:
        try:
            await self.visit(key)
        except PdkvError:
            return
        finally:
            self._under_way.discard(key)
            self.changed.set()
