"""Clients that read slowly, or not at all, when the service is told to end."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import pytest

from pdkv.http.front import HttpFront
from tests.http.fronts import ENDED, Service, body, fronted
from tests.http.test_front import run
from tests.node.scene import turns

SIZE = {False: 150_000, True: 300}
"""Tokens of an answer that the system has no room for; as a stream, of one that the service ends before that shows."""


class Slow:
    """A client with a connection of its own, and little room for what it doesn't read."""

    def __init__(self, front: HttpFront, address: str) -> None:
        assert front._listener is not None
        for listening in front._listener.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._address = address

    async def ask(self, raw: bytes) -> None:
        host, _, port = self._address.rpartition(":")
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.connect((host, int(port)))
        own.setblocking(False)
        self.reader, self.writer = await asyncio.open_connection(sock=own, limit=1024)
        self.writer.write(raw)
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def read(self) -> bytes:
        transport: Any = self.writer.transport
        transport.resume_reading()
        return await self.reader.read(-1)


def posting(*, stream: bool) -> bytes:
    raw = json.dumps(body([1], stream=stream)).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_waits_for_an_answer_that_is_being_written(*, stream: bool) -> None:
    """The service has ended it, the client hasn't read it."""

    async def test() -> None:
        service = Service("x" * SIZE[stream])
        async with fronted(service) as (front, address):
            client = Slow(front, address)
            await client.ask(posting(stream=stream))
            await service.closed_once()
            await front.drain()
            ended = asyncio.create_task(front.ended())
            await turns()
            assert not ended.done()
            reading = asyncio.create_task(client.read())
            await ended
        # the process may end here: what is left is the system's to send
        said = await reading
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else said.count(b"x") >= SIZE[stream]
        client.writer.close()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_end_cuts_is_named(
    *, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client never reads: nothing is written into the middle of it, and its connection is not left as if whole."""
    monkeypatch.setattr("pdkv.http.front.LAST_WORDS_S", 0.05)

    async def test() -> None:
        service = Service("x" * SIZE[stream])
        async with fronted(service) as (front, address):
            client = Slow(front, address)
            await client.ask(posting(stream=stream))
            await service.closed_once()
            await turns()
            await front.stop(ENDED)
            with suppress(ConnectionError):
                assert b"Draining" not in await client.read()
        client.writer.close()

    run(test)
    assert "POST '/v1/completions' of 127.0.0.1 is cut in its answer: Draining: r0 has ended" in caplog.text
