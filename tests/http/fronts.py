"""A front over a service that says what a test tells it to, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from aiohttp import ClientSession

from pdkv.errors import Draining, PdkvError
from pdkv.http.front import HttpFront, HttpSettings
from pdkv.http.tokenizer import tokenizer_named
from pdkv.ids import RequestId
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest, Shipment, Token
from pdkv.node.readiness import Readiness
from pdkv.rpc.security import Gate, PlainText, Security

ENDED = Draining("r0 has ended")
SETTINGS = HttpSettings("127.0.0.1:0", ("tiny",), body_bytes=1 << 16, request_s=30.0)


class Service:
    """Says a token a character of `says`, and waits in between where it is told to."""

    def __init__(self, says: str = "hello", *, waits_at: int | None = None, fails: PdkvError | None = None) -> None:
        self.says = says
        self.waits_at = waits_at
        self.fails = fails
        self.asked: list[GenerateRequest] = []
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()
        """The last request has ended, in whatever way."""
        self.running = 0
        self.told = 0
        """Tokens of all requests."""
        self.begun = asyncio.Event()
        self.enough = asyncio.Event()
        self.finished: list[int] = []
        self.ends: list[str] = []
        """Of streams that were read to their end."""
        self.deaf: PdkvError | None = None
        """Raised by `finish`."""

    async def closed_once(self) -> None:
        """A request has begun, and ended."""
        await self.begun.wait()
        await self.closed.wait()

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        assert request == self.asked[-1].request_id
        self.finished.append(output_tokens)
        if self.deaf is not None:
            raise self.deaf
        self.enough.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.enough.clear()
        self.asked.append(request)
        self.running += 1
        self.closed.clear()
        self.begun.set()
        try:
            for index, token in enumerate(self.says.encode()):
                if index == self.waits_at:
                    self.waiting.set()
                    await self.enough.wait()
                if self.enough.is_set():
                    yield GenerateDone("stop", self.finished[-1], Shipment(), (1,))
                    self.ends.append("stop")
                    return
                self.told += 1
                yield Token(index, token, 0.0)
            if self.fails is not None:
                raise self.fails
            yield GenerateDone("length", len(self.says), Shipment(), (1,))
            self.ends.append("length")
        finally:
            self.running -= 1
            if not self.running:
                self.closed.set()


@asynccontextmanager
async def fronted(
    service: Any,
    *,
    security: Security | None = None,
    gate: Gate | None = None,
    readiness: Readiness | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[HttpFront, str]]:
    """The front, and its host:port."""
    front = HttpFront(
        service,
        replace(SETTINGS, **settings),
        tokenizer_named("bytes"),
        readiness or Readiness(),
        security or PlainText(),
        gate or Gate(),
    )
    address = await front.start()
    try:
        yield front, address
    finally:
        await front.stop(ENDED)


def body(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **more}


async def posted(address: str, said: Any, **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, object and headers of an answer that is no stream."""
    async with (
        ClientSession() as session,
        session.post(f"http://{address}/v1/completions", json=said, **more) as answer,
    ):
        return answer.status, json.loads(await answer.read()), dict(answer.headers)


async def streamed(address: str, said: Any, after: Callable[[], None] = lambda: None) -> list[Any]:
    """Data of a stream's events; `after` is called with the first one."""
    found: list[Any] = []
    async with (
        ClientSession() as session,
        session.post(f"http://{address}/v1/completions", json={**said, "stream": True}) as answer,
    ):
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        async for line in answer.content:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                found.append(data.decode() if data == b"[DONE]" else json.loads(data))
                if len(found) == 1:
                    after()
    return found


async def health(address: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(f"http://{address}/health") as answer:
        return answer.status, (await answer.json())["status"]


async def exchanged(address: str, raw: bytes) -> bytes:
    """All that comes back for these bytes until the connection ends or nothing more is due."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = b""
    with suppress(OSError):  # it may have hung up already
        writer.write(raw)
        await writer.drain()
        writer.write_eof()
    with suppress(OSError):
        found = await reader.read()
    writer.close()
    return found
