"""The connections of the HTTP port: how many there may be, and when each of them ends.

Guarantees: one too many is told so and hung up on; the answer after which a connection ends says so, and is not cut for
it; one that has served for as long as it may ends with its next answer, so its client's next request goes to whoever is
there by then; once the service drains, those without a request end at once, and the others with the answer to theirs; a
request that has come by then, and not begun, is one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from aiohttp import web

FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


TURNS = 4
"""Of the loop, until a request is handled that the system has: it is read, its connection wakes, then its task."""


class Connections:
    """Of one front."""

    def __init__(self, most: int, age_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """`age_s`: from a connection's first request; None: as long as its client keeps it."""
        self._most = most
        self._age_s = age_s
        self._now = now
        self._since_s: WeakKeyDictionary[asyncio.BaseTransport, float] = WeakKeyDictionary()
        self._busy: WeakSet[asyncio.BaseTransport] = WeakSet()
        """With a request that runs: HTTP/1.1 answers one at a time."""
        self.draining = False
        """No answer leaves a connection open."""
        self.refusing = False
        """No request begins."""

    def accept(self, server: web.Server | None) -> asyncio.BaseProtocol:
        """What speaks over a connection that has just come."""
        if server is None or len(server.connections) >= self._most:
            return _Refused()
        return server()

    @contextmanager
    def busy(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """While a request of it runs; None: its client has gone already."""
        if transport is None:
            yield
            return
        self._since_s.setdefault(transport, self._now())
        self._busy.add(transport)
        try:
            yield
        finally:
            self._busy.discard(transport)

    def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before its headers go: if this is the last answer over its connection, they say so."""
        if not response.prepared and (self.draining or self._is_old(request.transport)):
            response.force_close()

    async def drain(self, server: web.Server | None) -> None:
        self.draining = True
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.refusing = True
        for connection in server.connections if server is not None else ():
            if connection.transport is not None and connection.transport not in self._busy:
                connection.transport.close()

    def _is_old(self, transport: asyncio.BaseTransport | None) -> bool:
        if self._age_s is None or transport is None:
            return False
        now_s = self._now()
        return now_s - self._since_s.get(transport, now_s) >= self._age_s


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(FULL)
        transport.close()
