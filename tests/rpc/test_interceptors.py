"""What a service raises by mistake stays inside its call."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from pdkv.errors import ContractMismatch, DeadlineExceeded, Difference, Draining, PdkvError, PeerLost
from pdkv.rpc import interceptors
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.convert.checks import RANK_DEADLINE_S, UNARY_DEADLINE_S
from pdkv.rpc.guard import Guard
from pdkv.rpc.security import Gate, PlainText
from pdkv.v1.common_pb2 import StatusRequest
from tests.rpc import samples
from tests.rpc.fakes import LIMIT_S, FakePrefill, Stream, collect, failure, run, serving, soon


def test_a_bug_ends_its_call_and_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        secret = ValueError("a secret of this node")
        node = FakePrefill(Stream(samples.ACCEPTED, error=secret), error=secret)
        async with serving(node) as (server, directory):
            peer = directory.peer(server.address)
            _, error = await failure(peer.prefill(samples.prefill_request()))
            assert type(error) is PdkvError
            assert "/pdkv.v1.Prefill/Prefill failed with ValueError" in str(error)
            assert "secret" not in str(error)
            with pytest.raises(PdkvError, match="failed with ValueError"):
                await peer.renew_lease(samples.LEASE_CALL)
            node.stream = Stream(samples.ACCEPTED)
            assert await collect(peer.prefill(samples.prefill_request())) == [samples.ACCEPTED]

    with caplog.at_level(logging.ERROR, "pdkv.rpc.interceptors"):
        run(body)
    assert len(caplog.records) == 2
    assert all("a secret of this node" in str(r.exc_info) for r in caplog.records)


def test_a_node_that_is_refused_again_and_again_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        node = FakePrefill(error=ContractMismatch([Difference("index_topk", "64", "32", "equal")]))
        async with serving(node) as (server, _):
            for _ in range(3):
                async with dialled(server.address) as directory:
                    with pytest.raises(ContractMismatch):
                        await directory.peer(server.address).renew_lease(samples.LEASE_CALL)
            node.error = PeerLost("another thing")
            async with dialled(server.address) as directory:
                with pytest.raises(PeerLost):
                    await directory.peer(server.address).renew_lease(samples.LEASE_CALL)

    with caplog.at_level(logging.WARNING, "pdkv.rpc.interceptors"):
        run(body)
    words = [r.getMessage() for r in caplog.records if r.name == "pdkv.rpc.interceptors"]
    assert [line.partition(" ends with ")[2].split(":")[0] for line in words] == ["ContractMismatch", "PeerLost"]


@asynccontextmanager
async def dialled(address: str) -> AsyncIterator[GrpcDirectory]:
    """Over a connection, and so from a port, of its own."""
    directory = GrpcDirectory(PlainText())
    try:
        yield directory
    finally:
        await directory.close()


def test_a_unary_call_ends_even_if_its_client_set_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(FakePrefill):
        async def renew_lease(self, call: object) -> float:
            async for _ in Stream(hangs=True)(call):
                pass
            return 0.0

    async def body() -> None:
        monkeypatch.setattr(interceptors, "UNARY_DEADLINE_S", 0.1)
        async with serving(Stuck()) as (server, directory):
            with pytest.raises(DeadlineExceeded, match="RenewLease did not end within"):
                await directory.peer(server.address).renew_lease(samples.LEASE_CALL)

    run(body)


def test_a_server_that_ends_says_why_in_each_call() -> None:
    """And not without it: a server that just stops leaves its clients with gRPC's own word."""

    async def body() -> None:
        for told in (True, False):
            stream = Stream(samples.ACCEPTED, hangs=True)
            async with serving(FakePrefill(stream)) as (server, directory):
                peer = directory.peer(server.address)
                running = asyncio.create_task(failure(peer.prefill(samples.prefill_request())))
                await soon(stream.waiting)
                if told:
                    await server.end_calls(Draining("p0 has ended", node="p0"))
                    assert stream.ended.is_set(), "what it held is given back by then"
                    with pytest.raises(Draining, match="p0 has ended"):
                        await peer.renew_lease(samples.LEASE_CALL)
                await server.stop(0)
                seen, error = await running
                assert seen == [samples.ACCEPTED]
                assert (type(error), error.fields.get("node")) == ((Draining, "p0") if told else (PeerLost, None))

    run(body)


def test_what_was_said_is_written_before_calls_have_ended() -> None:
    async def body() -> None:
        stream = Stream(samples.ACCEPTED, hangs=True)
        async with serving(FakePrefill(stream)) as (server, directory):
            await server.calls_ended()
            running = asyncio.create_task(failure(directory.peer(server.address).prefill(samples.prefill_request())))
            await soon(stream.waiting)
            ended = asyncio.create_task(server.calls_ended())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not ended.done()
            await server.end_calls(Draining("p0 has ended"))
            await ended
            assert (await running)[0] == [samples.ACCEPTED]

    run(body)


def test_a_client_that_goes_away_is_not_told() -> None:
    async def body() -> None:
        stream = Stream(samples.ACCEPTED, hangs=True)
        async with serving(FakePrefill(stream)) as (server, directory):
            running = asyncio.create_task(collect(directory.peer(server.address).prefill(samples.prefill_request())))
            await soon(stream.waiting)
            running.cancel()
            await soon(stream.ended)
            assert stream.end == "CancelledError"
            await server.end_calls(Draining("p0 has ended"))

    run(body)


def test_a_rank_has_as_long_as_its_leader_gives_it() -> None:
    """What the server allows is what the client waits: 30 s would cut off steps that take longer."""
    methods = ("/pdkv.v1.Rank/Step", "/pdkv.v1.Rank/Read", "/pdkv.v1.Prefill/Status")
    assert [interceptors.deadline_s(method) for method in methods] == [RANK_DEADLINE_S] * 2 + [UNARY_DEADLINE_S]


def test_a_slow_step_of_a_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "UNARY_DEADLINE_S", 0.0)

    async def body() -> None:
        server = grpc.aio.server(interceptors=[interceptors.CallInterceptor(Guard(PlainText(), Gate()))])

        async def say(request: bytes, context: object) -> bytes:
            await asyncio.sleep(0)
            return b""

        for service in ("pdkv.v1.Rank", "pdkv.v1.Prefill"):
            handler = grpc.unary_unary_rpc_method_handler(say, request_deserializer=StatusRequest.FromString)
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Step": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.unary_unary("/pdkv.v1.Rank/Step")(b"", timeout=LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await channel.unary_unary("/pdkv.v1.Prefill/Step")(b"", timeout=LIMIT_S)
        await server.stop(0)

    run(body)
