"""Reads the bodies of requests.

Guarantees: no body is larger than one may be, all that are being read together no larger than `BODIES` of the largest,
and none takes longer than it may, whatever its sender says of its length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pdkv.errors import BodyTooLarge, DeadlineExceeded, FieldRefused, LimitReached, SlowClient
from pdkv.node.flow import deadline

BODIES = 8


class Intake:
    def __init__(self, most_bytes: int, within_s: float) -> None:
        self._most = most_bytes
        self._within_s = within_s
        self._held = 0
        """Bytes of all bodies that are in memory."""

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """It counts as held until it is left. Raises `FieldRefused`, `BodyTooLarge`, `LimitReached`, `SlowClient`."""
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise FieldRefused("Content-Encoding", repr(coding[:80]), "identity: bodies are not compressed")
        self._require_size(request.content_length or 0)
        mine, parts = 0, []
        try:
            try:
                async with deadline(self._within_s, "the request's body"):
                    async for part in request.content.iter_any():
                        mine += len(part)
                        self._held += len(part)
                        self._require_size(mine)
                        if self._held > BODIES * self._most:
                            most = BODIES * self._most
                            raise LimitReached(f"bodies of all requests have {most} bytes together", bytes=most)
                        parts.append(part)
            except DeadlineExceeded as error:
                raise SlowClient(f"the request's body did not come within {self._within_s:.3g} s") from error
            yield b"".join(parts)
        finally:
            self._held -= mine

    def _require_size(self, size: int) -> None:
        if size > self._most:
            raise BodyTooLarge("the request's body, bytes", size, f"at most {self._most}")
