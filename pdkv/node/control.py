"""What an operator can tell a serving process, beside signals.

Guarantees: a drain that was asked for is the one that SIGTERM begins, and is not taken back; the node is not ready from
the moment it was asked for; asking twice waits twice and does it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdkv.errors import ConfigError
from pdkv.node.readiness import Readiness

log = logging.getLogger(__name__)


class Control:
    """Of one process; used in its loop."""

    def __init__(
        self,
        readiness: Readiness,
        drain: Callable[[], Awaitable[None]],
        compact: Callable[[], Awaitable[int]] | None = None,
        *,
        ended: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`drain` refuses new requests and returns when the others have ended; a router has no pages to compact.
        `ended` is for a process that lets nobody in by itself once it is told to end: it only waits."""
        self._readiness = readiness
        self._drain = drain
        self._ended = ended or drain
        self._compact = compact
        self.told = asyncio.Event()
        """The process is to end."""

    async def drain(self, *, end: bool) -> None:
        """Returns when nothing runs and nothing is leased any more. With `end` the process ends then, or after its
        grace period."""
        log.info("drained by an operator%s", ", to end then" if end else "")
        self._readiness.say("drain", "drained by an operator")
        if end:
            self.told.set()
        await (self._ended if end else self._drain)()

    async def compact(self) -> int:
        """Pages that were moved. Raises `ConfigError` where there are none, or where none may be moved."""
        if self._compact is None:
            raise ConfigError("compact", "a router", "a prefill or decode node: it has no pages")
        return await self._compact()
