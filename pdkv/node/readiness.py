"""Whether a node can serve, and why not: what its health service and its status say.

Guarantees: a node is unready for as long as a part of it says so, and ready again by itself when the last one has taken
that back; whoever watches hears of each change of a reason, of the latest one if several came at once, and not of its
details.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Readiness:
    """Reasons why a node can't serve now, by the part of it that knows. Used on the node's loop."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._details: dict[str, str] = {}
        self._changed = asyncio.Event()

    @property
    def unready(self) -> str:
        """Why the node can't serve; empty if it can."""
        details = self._details
        return "; ".join(f"{why}: {details[part]}" if details[part] else why for part, why in self._reasons.items())

    def say(self, part: str, why: str, detail: str = "") -> None:
        """`part` can't serve, for this reason; empty: it can. `detail` may change without being another reason."""
        self._details[part] = detail
        if why == self._reasons.get(part, ""):
            return
        if why:
            self._reasons[part] = why
        else:
            del self._reasons[part]
        self._changed.set()

    async def watch(self, tell: Callable[[str], Awaitable[None]]) -> None:
        """Runs until it is cancelled: `tell`, who takes the node for ready at first, gets `unready` when it changed."""
        told = ""
        while True:
            self._changed.clear()
            reasons = "; ".join(self._reasons.values())
            if told != reasons:
                told = reasons
                await tell(self.unready)
            await self._changed.wait()
