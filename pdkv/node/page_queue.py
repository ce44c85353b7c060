"""Requests of a prefill node that wait for its pages.

Guarantees: first come, first served, so that a large one is not passed over for ever; nobody waits longer than
`most_s`, and whoever did is told what was short; what can never fit is refused when its turn comes; nothing is held
while it waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdkv.errors import CapacityError, NeverFits
from pdkv.kvcache.manager import Reservation


class PageQueue:
    """Used in its node's loop."""

    def __init__(self, most_s: float) -> None:
        """`most_s`: shorter than a decode node's patience with a node that says nothing (`peer_silence_s`)."""
        self._most_s = most_s
        self._waiting: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def changed(self) -> None:
        """`CacheManager.on_room`: pages have been given back, or can be evicted by now."""
        if self._waiting:
            self._waiting[0].set()

    async def take(self, reserve: Callable[[], Reservation]) -> Reservation:
        """What `reserve` gives, in its turn. Raises what it raises; `CapacityError` only after `most_s`."""
        refusal = CapacityError(f"{len(self)} requests wait for pages of this node", waiting=len(self))
        if not self._waiting:
            try:
                return reserve()
            except NeverFits:
                raise
            except CapacityError as error:
                refusal = error
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._most_s):
                while True:
                    await turn.wait()
                    turn.clear()
                    try:
                        return reserve()
                    except NeverFits:
                        raise
                    except CapacityError as error:
                        refusal = error
        except TimeoutError:
            raise refusal from None
        finally:
            self._waiting.remove(turn)
            self.changed()
