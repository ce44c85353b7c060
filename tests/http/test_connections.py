"""When connections of the HTTP port end: none too soon, and none with an answer that doesn't say so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Response

from pdkv.http.connections import Connections
from pdkv.rpc.security import TLS_AGE_S, Gate, MutualTls, PlainText, Security, connection_age_s
from tests.http.fronts import Service, body, exchanged, fronted, health, posted
from tests.waiting import DEADLINE_S

LIST = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
ANSWER = b'"object": "list"'
AGE_S = 20.0


class Wire(asyncio.Transport):
    """Of no loop."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(("age_s", "is_last"), [(1e-9, True), (3600.0, False), (None, False)])
def test_the_answer_over_an_old_connection_is_whole_and_the_last(
    age_s: float | None, stream: str, *, is_last: bool
) -> None:
    """So who keeps a connection is sent to another router before the one that it has is told to end."""

    async def test() -> None:
        async with fronted(Service("hello"), gate=Gate(connection_age_s=age_s)) as (_, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            said = f'{{"model": "tiny", "prompt": [1], "stream": {stream}}}'
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(said)}\r\n\r\n{said}".encode()
            )
            headers = await reader.readuntil(b"\r\n\r\n")
            assert (b"\r\nConnection: close\r\n" in headers) is is_last
            await reader.readuntil(b"data: [DONE]\n\n" if stream == "true" else b'"choices"')
            writer.write(LIST)
            if is_last:
                assert ANSWER not in await reader.read()
            else:
                assert ANSWER in await reader.readuntil(ANSWER)
            writer.close()

    run(test)


def test_a_connection_is_as_old_as_its_first_request() -> None:
    times_s = iter((1000.0, 1000.0, 1019.9, 1020.0))
    connections = Connections(1, AGE_S, lambda: next(times_s))
    request = make_mocked_request("GET", "/", transport=Wire())
    with connections.busy(request.transport):
        answers = [Response() for _ in range(3)]
        for answer in answers:
            connections.prepare(request, answer)
    assert [answer.keep_alive for answer in answers] == [None, None, False]


@pytest.mark.parametrize(
    ("gate", "security", "age_s"),
    [
        (Gate(), PlainText(), None),
        (Gate(), MutualTls(Path("a"), Path("b"), Path("c")), TLS_AGE_S),
        (Gate(connection_age_s=20.0), MutualTls(Path("a"), Path("b"), Path("c")), 20.0),
        (Gate(connection_age_s=20.0), PlainText(), 20.0),
    ],
)
def test_a_certificate_is_shown_again_after_a_while(gate: Gate, security: Security, age_s: float | None) -> None:
    assert connection_age_s(gate, security) == age_s


def test_a_draining_front_keeps_no_connection() -> None:
    """Neither one without a request, which it ends, nor one that has been answered or is yet to be."""

    async def test() -> None:
        service = Service("hello", waits_at=1)
        async with fronted(service) as (front, address):
            assert "Connection" not in (await posted(address, body(max_tokens=1, stop="h")))[2]
            host, _, port = address.rpartition(":")
            idle, kept = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            kept[1].write(LIST)
            assert ANSWER in await kept[0].readuntil(ANSWER)
            service.waiting.clear()
            asked = asyncio.create_task(posted(address, body()))
            await service.waiting.wait()
            await front.drain()
            for reader, writer in (idle, kept):
                assert b"HTTP" not in await reader.read(), "hung up on, and told nothing"
                writer.close()
            assert not asked.done()
            service.finished.append(2)
            service.enough.set()
            status, said, headers = await asked
            assert (status, said["choices"][0]["text"], headers["Connection"]) == (200, "h", "close")
            status, said, headers = await posted(address, body(stop="h"))
            assert (status, said["error"]["code"], headers["Connection"]) == (503, "Draining", "close")
            assert await health(address) == (503, "draining")

    run(test)


def test_what_has_come_over_a_kept_connection_is_answered_before_a_drain_ends_it() -> None:
    async def test() -> None:
        async with fronted(Service("hello")) as (front, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(LIST)
            await reader.readuntil(ANSWER)
            said = b'{"model": "tiny", "prompt": [1]}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
            await front.drain()
            answer = await reader.read()
            assert b"HTTP/1.1 200 " in answer
            assert b"\r\nConnection: close\r\n" in answer
            writer.close()

    run(test)


def test_one_connection_too_many_is_told_so() -> None:
    async def test() -> None:
        service = Service("hello", waits_at=1)
        async with fronted(service, gate=Gate(connections=1)) as (_, address):
            first = asyncio.create_task(posted(address, body()))
            await service.waiting.wait()
            assert (await exchanged(address, b"")).startswith(b"HTTP/1.1 503 ")
            first.cancel()
            await service.closed.wait()

    run(test)
