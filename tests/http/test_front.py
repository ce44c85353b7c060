"""The HTTP port: what it answers, and how requests, clients and the service end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ServerDisconnectedError
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import CapacityError, PeerLost, UnknownRequest
from pdkv.http.front import HttpFront
from pdkv.metrics.names import Metrics
from pdkv.metrics.routed import MeteredRouter
from pdkv.node.readiness import Readiness
from pdkv.router.registry import Registry
from pdkv.router.service import RouterSettings
from pdkv.rpc.security import Gate
from tests.http.fronts import ENDED, Service, body, exchanged, fronted, health, posted, streamed
from tests.waiting import DEADLINE_S, until


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))  # type: ignore[arg-type]


def test_a_whole_answer() -> None:
    async def test() -> None:
        service = Service("hello")
        async with fronted(service) as (_, address):
            status, said, _ = await posted(address, body([1, 2], max_tokens=5, seed=3, user="u"))
        assert (status, said["choices"][0]["text"], said["usage"]["completion_tokens"]) == (200, "hello", 5)
        (asked,) = service.asked
        assert asked.tokens.tolist() == [1, 2]
        assert asked.request_id == said["id"]
        assert (asked.namespace.extra_key, asked.sampling.seed, asked.remaining_s) == ("u", 3, 30.0)

    run(test)


def test_a_stream_says_the_same_in_parts() -> None:
    async def test() -> None:
        async with fronted(Service("hello")) as (_, address):
            *parts, usage, last = await streamed(address, body(stream_options={"include_usage": True}))
        assert last == "[DONE]"
        assert "".join(part["choices"][0]["text"] for part in parts) == "hello"
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 5 + ["length"]
        assert all(part["usage"] is None for part in parts)
        assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)

    run(test)


def test_a_stop_string_finishes_the_request_behind_it() -> None:
    """It waits for nothing but to be told, and its stream is read to its end before the last text is said."""

    async def test() -> None:
        service = Service("hello", waits_at=4)
        async with fronted(service) as (_, address):
            _, said, _ = await posted(address, body(stop="ll"))
            assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("he", "stop")
            assert said["usage"]["completion_tokens"] == 4
            assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
            assert service.ends == ["stop"]
            *parts, usage, _ = await streamed(address, body(stop="ll", stream_options={"include_usage": True}))
            assert "".join(part["choices"][0]["text"] for part in parts) == "he"
            assert (parts[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]) == ("stop", 4)
        assert (service.finished, service.ends) == ([4, 4], ["stop", "stop"])

    run(test)


def test_one_that_came_to_its_end_by_itself_meanwhile_has_its_account_too() -> None:
    async def test() -> None:
        service = Service("hello")
        service.deaf = UnknownRequest("it has its answer")
        async with fronted(service) as (_, address):
            _, said, _ = await posted(address, body(stop="ll"))
        assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("he", "stop")
        assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert service.ends == ["length"]

    run(test)


@pytest.mark.parametrize("deaf", [PeerLost("gone"), None])
def test_one_that_cannot_be_finished_is_aborted_by_name(
    deaf: PeerLost | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is gone, or is told and goes on and on: the client has its answer all the same."""

    async def test() -> None:
        service = Service("hello", waits_at=4)
        service.deaf = deaf
        if deaf is None:
            monkeypatch.setattr("pdkv.http.front.FINISH_S", 0.01)
            monkeypatch.setattr(service.enough, "set", lambda: None)
        async with fronted(service) as (_, address):
            _, said, _ = await posted(address, body(stop="ll"))
            assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == ("he", "stop")
            assert said["usage"]["prompt_tokens_details"] is None
            await service.closed.wait()
        assert service.ends == []

    run(test)
    kind = "PeerLost" if deaf else "DeadlineExceeded"
    assert f"has its answer, and its end is not known: {kind}" in caplog.text


def test_what_fails_before_the_first_token_has_a_status_of_its_own() -> None:
    async def test() -> None:
        for error, status in ((CapacityError("full", retry_after_s=7), 429), (PeerLost("gone"), 503)):
            async with fronted(Service("", fails=error)) as (_, address):
                for stream in (False, True):
                    found, said, headers = await posted(address, body(stream=stream))
                    assert (found, said["error"]["code"]) == (status, error.kind)
                    assert headers["Retry-After"] == ("7" if status == 429 else "1")

    run(test)


def test_a_request_that_fails_has_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The service's, of one that it was asked for, and the front's, of one that never came to it."""
    caplog.set_level("INFO", "pdkv")
    router = MeteredRouter(Registry((), ()), None, RouterSettings(running_limit=0, waiting_limit=0))  # type: ignore[arg-type]
    router.metrics = Metrics()

    async def test() -> None:
        async with fronted(router, gate=Gate(calls_per_peer=1)) as (front, address):
            assert (await posted(address, body()))[0] == 429
            front._access._running["127.0.0.1"] = 1
            assert (await posted(address, body()))[0] == 429

    run(test)
    ended, refused = caplog.records
    assert (ended.name, ended.levelname) == ("pdkv.request", "WARNING")
    assert ended.facts["outcome"] == "RouterFull"  # type: ignore[attr-defined]
    assert "as many as may" in ended.facts["error"]  # type: ignore[attr-defined]
    assert refused.getMessage() == "POST '/v1/completions' of 127.0.0.1: 429 LimitReached"


def test_what_fails_after_it_is_the_last_event() -> None:
    async def test() -> None:
        async with fronted(Service("ab", fails=PeerLost("gone"))) as (_, address):
            *parts, last = await streamed(address, body())
            assert len(parts) == 2
            assert (last["error"]["code"], last["error"]["message"]) == ("PeerLost", "gone")

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(*, stream: bool) -> None:
    async def test() -> None:
        service = Service("hello", waits_at=2)
        async with fronted(service) as (front, address):
            client = asyncio.create_task(posted(address, body(stream=stream)))
            await service.waiting.wait()
            assert service.running == 1
            client.cancel()
            await service.closed.wait()
            await front.ended()

    run(test)


def test_a_request_has_its_time(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        service = Service("hello", waits_at=0)
        async with fronted(service, request_s=0.01) as (_, address):
            status, said, _ = await posted(address, body())
            assert (status, said["error"]["code"]) == (504, "DeadlineExceeded")
            service.waits_at = 2
            *_, last = await streamed(address, body())
            assert last["error"]["code"] == "DeadlineExceeded"

    run(test)
    assert "failed" not in caplog.text


def test_the_services_end_is_told_to_those_who_run() -> None:
    async def test() -> None:
        service = Service("hello", waits_at=2)
        async with fronted(service) as (front, address):
            stream = asyncio.create_task(streamed(address, body()))
            await service.waiting.wait()
            await front.drain()
            ending = asyncio.create_task(front.ended())
            await asyncio.sleep(0)
            assert not ending.done()
            await front.stop(ENDED)
            await ending
            assert (await stream)[-1]["error"]["code"] == "Draining"
            assert service.closed.is_set()

    run(test)


def test_health_is_the_services() -> None:
    async def test() -> None:
        readiness = Readiness()
        async with fronted(Service(), readiness=readiness) as (_, address):
            assert await health(address) == (200, "ok")
            readiness.say("nodes", "no decode node is up")
            assert await health(address) == (503, "no decode node is up")

    run(test)


def test_models_and_paths_that_are_not_there() -> None:
    async def test() -> None:
        async with fronted(Service()) as (_, address), ClientSession() as session:
            for path, status in (("v1/models", 200), ("v1/models/tiny", 200), ("v1/models/gpt", 404), ("v1/x", 404)):
                async with session.get(f"http://{address}/{path}") as answer:
                    assert answer.status == status, path
                    assert ("error" in await answer.json()) == (status == 404)
            async with session.get(f"http://{address}/v1/completions") as answer:
                assert answer.status == 405

    run(test)


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\n", "utf-8")

    async def test() -> None:
        service = Service()
        async with fronted(service, api_keys=str(tmp_path / "keys")) as (_, address):
            for key, status in ((None, 401), ("beta", 401), ("alpha", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                found, _, said = await posted(address, body(), headers=headers)
                assert (found, "WWW-Authenticate" in said) == (status, status == 401)
            assert len(service.asked) == 1

    run(test)


def test_a_body_that_is_too_large_is_not_read() -> None:
    async def test() -> None:
        service = Service()

        async def endless() -> Any:
            while True:
                yield b" " * 4096

        async with fronted(service) as (_, address):
            status, said, _ = await posted(address, body("x" * 70_000))
            assert (status, said["error"]["code"]) == (413, "BodyTooLarge")
            async with ClientSession() as session:
                try:
                    async with session.post(f"http://{address}/v1/completions", data=endless()) as answer:
                        assert answer.status == 413
                except (ServerDisconnectedError, ConnectionError):
                    pass  # it may hang up while the client is still sending
            assert not service.asked
            assert (await posted(address, body()))[0] == 200

    run(test)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def test() -> None:
        async with fronted(Service(), body_s=0.01) as (_, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    run(test)


def test_a_connection_without_a_request_is_closed() -> None:
    async def test() -> None:
        async with fronted(Service(), idle_s=0.01) as (_, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/comp")
            assert await reader.read() == b""
            writer.close()

    run(test)


def test_a_client_that_does_not_read_holds_up_the_service_and_no_memory() -> None:
    """Beyond the sockets' buffers nothing is asked of the service."""

    async def test() -> None:
        service = Service("x" * 200_000)
        async with fronted(service, request_s=1.0) as (_, address):
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            raw = b'{"model": "tiny", "prompt": [1], "stream": true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
            transport: Any = writer.transport
            transport.pause_reading()
            await service.closed.wait()  # its time was over, before all was said
            assert 0 < service.told < len(service.says)
            transport.abort()

    run(test)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 48\r\n\r\n"
STREAM = POST + b'{"model": "tiny", "prompt": [1], "stream": true}'
LIST = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(("asked", "answer"), [(STREAM, b"text/event-stream"), (LIST * 100_000, b'"object": "list"')])
def test_a_client_that_never_reads_is_hung_up_on(asked: bytes, answer: bytes) -> None:
    """In the middle of a stream, and under answers that are whole; one that reads within that time is not."""

    async def test() -> None:
        async with fronted(Service("x" * 100_000), stall_s=1.0) as (front, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(asked[: len(LIST)] if asked.startswith(LIST) else asked)
            assert answer in await reader.readuntil(answer)
            transport: Any = writer.transport
            transport.pause_reading()
            writer.write(asked)
            await until(partial(connections, front), lambda count: count == 0, "it is hung up on")
            transport.abort()

    run(test)


async def connections(front: HttpFront) -> int:
    assert front._runner is not None
    assert front._runner.server is not None
    return len(front._runner.server.connections)


GARBAGE = st.binary(max_size=300) | st.lists(
    st.sampled_from(
        [
            *(b"GET ", b"POST ", b"/v1/completions", b"/health", b" HTTP/1.1\r\n", b" HTTP/9.9\r\n", b"\r\n", b"\n"),
            *(b"Host: a\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
            *(b"Transfer-Encoding: x\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n", b"Connection: upgrade\r\n"),
            *(b"Upgrade: h2c\r\n", b"A" * 9000, b"a: b\r\n" * 70, b"\x00", b"\xff", b"{}", b"Expect: 100-continue\r\n"),
            *(b"Content-Encoding: gzip\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"),
        ]
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=15, deadline=None)
@given(st.lists(GARBAGE, min_size=1, max_size=12))
def test_whatever_bytes_come_only_their_connection_ends(pieces: list[bytes]) -> None:
    async def test() -> None:
        service = Service()
        async with fronted(service) as (front, address):
            await asyncio.gather(*(exchanged(address, raw) for raw in pieces))
            assert (await posted(address, body()))[0] == 200
            await front.ended()
        assert service.running == 0

    run(test)
