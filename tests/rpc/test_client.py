"""Clients against a real server: errors, cancellation, deadlines, closing."""

import asyncio
import dataclasses
import socket
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pdkv.errors import (
    BoundsError,
    ConfigError,
    Draining,
    LeaseExpired,
    NotAuthorised,
    PdkvError,
    PeerLost,
    ProtocolError,
    RemoteError,
    TlsRefused,
    UnknownRequest,
    WrongIncarnation,
)
from pdkv.ids import Incarnation, PageHashes, PeerName, RequestId
from pdkv.node.messages import Accepted, NodeIntro, Token
from pdkv.node.ranks import Joining
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.rpc.client import ClientSettings, GrpcDirectory
from pdkv.rpc.convert import prefill
from pdkv.rpc.errors import KINDS
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.certificates import HERE
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, Stream, collect, failure, run, serving, soon
from tests.rpc.test_errors import example
from tests.rpc.tls import DECODE, PREFILL, Files, dialling, served


def test_every_call_arrives_and_is_answered() -> None:
    async def body() -> None:
        events = [samples.ACCEPTED, samples.pages(3, 1), samples.prefill_done(samples.pages(1, 3))]
        node = FakePrefill(Stream(*events))
        async with serving(node) as (server, directory):
            peer = directory.peer(server.address)
            assert await peer.connect(samples.intro(samples.D)) == samples.intro()
            got = await collect(peer.prefill(samples.prefill_request()))
            assert all(samples.same(a, b) for a, b in zip(got, events, strict=True))
            assert await peer.renew_lease(samples.LEASE_CALL) == 30.0
            await peer.release_lease(samples.LEASE_CALL)
            assert await peer.status() == samples.status("prefill")
            assert (await peer.estimate(EstimateCall(PageHashes()))).waiting_tokens == 640
            assert node.calls[:1] == [samples.intro(samples.D)]
            assert node.calls[1:3] == [samples.LEASE_CALL] * 2
            assert samples.same(node.stream.request, samples.prefill_request())

    run(body)


def test_decode_and_router_answer() -> None:
    async def body() -> None:
        events = [samples.TOKEN, samples.GENERATE_DONE]
        async with serving(None, FakeDecode(Stream(*events)), FakeRouter(Stream(*events))) as (server, directory):
            for client in (directory.decode(server.address), directory.router(server.address)):
                assert await collect(client.generate(samples.generate_request())) == events
            assert (await directory.decode(server.address).status()).role == "decode"
            found = await directory.decode(server.address).estimate(EstimateCall(samples.LOCATE_CALL.hashes))
            assert found == Estimate(samples.D, 3, 0, 12)
            assert (await directory.router(server.address).status()).requests == 4

    run(body)


def test_each_error_arrives_as_its_class() -> None:
    async def body() -> None:
        node = FakePrefill()
        async with serving(node) as (server, directory):
            peer = directory.peer(server.address)
            for kind in KINDS.values():
                sent = example(kind)
                node.error, node.stream = sent, Stream(samples.ACCEPTED, error=sent)
                with pytest.raises(PdkvError) as caught:
                    await peer.renew_lease(samples.LEASE_CALL)
                seen, streamed = await failure(peer.prefill(samples.prefill_request()))
                assert seen == [samples.ACCEPTED]
                for error in (caught.value, streamed):
                    assert type(error) is kind
                    assert str(error) == str(sent)
                    assert error.fields == {**sent.fields, "address": server.address}
                    assert error.differences == sent.differences

    run(body)


def test_a_cancelled_caller_ends_the_stream_at_the_node() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            task = asyncio.create_task(collect(directory.peer(server.address).prefill(samples.prefill_request())))
            await soon(node.stream.waiting)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await soon(node.stream.ended)
            assert node.stream.end in ("CancelledError", "GeneratorExit")

    run(body)


def test_a_decode_node_is_told_that_an_answer_is_enough() -> None:
    async def body() -> None:
        node = FakeDecode()
        async with serving(decode=node) as (server, directory):
            client, asked = directory.decode(server.address), samples.generate_request().request_id
            await client.finish(asked, 3)
            assert node.finished == [(asked, 3)]
            with pytest.raises(UnknownRequest, match="no request other runs here") as unknown:
                await client.finish(RequestId("other"), 3)
            assert unknown.value.fields["request"] == "other"
            with pytest.raises(BoundsError, match="output_tokens: 0"):
                await client.finish(asked, 0)

    run(body)


def test_closing_a_stream_early_ends_it_at_the_node() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            async with aclosing(directory.peer(server.address).prefill(samples.prefill_request())) as events:
                assert isinstance(await anext(events), Accepted)
            await soon(node.stream.ended)

    run(body)


def test_a_node_blocked_in_a_write_is_ended_too() -> None:
    """The client reads nothing, so the server waits for room; its generator must not be left open."""

    async def body() -> None:
        many = [dataclasses.replace(samples.pages(8192), first_index=i) for i in range(200)]
        node = FakePrefill(Stream(samples.ACCEPTED, *many))
        async with serving(node) as (server, directory):
            async with aclosing(directory.peer(server.address).prefill(samples.prefill_request())) as events:
                await anext(events)
            await soon(node.stream.ended)
            assert node.stream.end in ("CancelledError", "GeneratorExit")

    run(body)


def test_remaining_time_bounds_a_stream() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            request = samples.prefill_request(remaining_s=0.2)
            _, error = await failure(directory.peer(server.address).prefill(request))
            assert error.kind == "DeadlineExceeded"
            await soon(node.stream.ended)

    run(body)


def test_a_node_that_is_not_there_is_lost() -> None:
    async def body() -> None:
        async with serving(FakePrefill()) as (server, _):
            address = server.address
        directory = GrpcDirectory(PlainText(), ClientSettings(connect_timeout_s=0.2))
        peer = directory.peer(address)
        with pytest.raises(PeerLost, match="Connection refused") as caught:
            await peer.connect(samples.intro())
        assert caught.value.fields["address"] == address
        with pytest.raises(PeerLost, match=r"could not be reached within 0\.2 s"):
            await directory.rank(address).join(Joining(samples.P, samples.contract(), 9))
        with pytest.raises(PeerLost):
            await peer.renew_lease(samples.LEASE_CALL)
        await directory.close()

    run(body)


def test_a_node_that_says_nothing_is_lost_after_a_while() -> None:
    async def body() -> None:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
        async with silent as listener:
            host, port = listener.sockets[0].getsockname()
            directory = GrpcDirectory(PlainText(), ClientSettings(connect_timeout_s=0.2))
            with pytest.raises(PeerLost, match=r"could not be reached within 0\.2 s"):
                await directory.peer(f"{host}:{port}").connect(samples.intro())
            await directory.close()

    run(body)


def test_a_connection_that_breaks_is_a_lost_peer() -> None:
    async def body() -> None:
        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
            host, port = listener.sockets[0].getsockname()
            directory = GrpcDirectory(PlainText())
            _, error = await failure(directory.peer(f"{host}:{port}").prefill(samples.prefill_request()))
            assert isinstance(error, PeerLost)
            await directory.close()

    run(body)


def test_a_server_that_stops_ends_its_streams_with_a_status() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            reading = asyncio.create_task(failure(directory.peer(server.address).prefill(samples.prefill_request())))
            await soon(node.stream.waiting)
            await server.stop(0)
            _, error = await reading
            assert isinstance(error, PeerLost)
            await soon(node.stream.ended)

    run(body)


def test_closing_the_directory_ends_calls_without_cancelling_their_callers() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            reading = asyncio.create_task(failure(directory.peer(server.address).prefill(samples.prefill_request())))
            await soon(node.stream.waiting)
            await directory.close()
            _, error = await reading
            assert isinstance(error, PeerLost)

    run(body)


def test_one_channel_an_address() -> None:
    async def body() -> None:
        directory = GrpcDirectory(PlainText())
        one, two, other = directory.peer("h:1"), directory.decode("h:1"), directory.peer("h:2")
        assert one._channels is two._channels is other._channels
        await directory.close()

    run(body)


@pytest.mark.parametrize("address", ["unix:/run/x", "h", ""])
def test_only_host_and_port_are_dialled(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        GrpcDirectory(PlainText()).peer(address)


def test_a_request_too_large_is_refused_before_it_is_sent() -> None:
    async def body() -> None:
        node = FakePrefill()
        async with serving(node) as (server, directory):
            request = samples.prefill_request((16 << 20) + 1)
            _, error = await failure(directory.peer(server.address).prefill(request))
            assert isinstance(error, BoundsError)
            assert "Prefill, bytes of the message" in str(error)

    run(body)


def test_a_service_that_is_not_served_is_a_remote_error() -> None:
    async def body() -> None:
        async with serving(FakePrefill()) as (server, directory):
            _, error = await failure(directory.decode(server.address).generate(samples.generate_request()))
            assert isinstance(error, RemoteError)
            assert error.fields["code"] == "UNIMPLEMENTED"

    run(body)


def test_nothing_is_retried() -> None:
    async def body() -> None:
        node = FakePrefill(error=Draining("not now"))
        async with serving(node) as (server, directory):
            with pytest.raises(Draining):
                await directory.peer(server.address).renew_lease(samples.LEASE_CALL)
            assert len(node.calls) == 1

    run(body)


NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "its own": ((PREFILL, *HERE), ""),
    "another node's": (("p9", *HERE), f"says it is node {PREFILL}, but its certificate has no DNS name {PREFILL}"),
    "a URI alone": ((f"spiffe://fleet/pdkv/{PREFILL}", *HERE), "its certificate has no DNS name"),
}


@pytest.mark.parametrize("what", NAMES)
def test_an_introduction_counts_only_from_a_certificate_of_that_name(what: str, tmp_path: Path) -> None:
    async def body() -> None:
        names, refusal = NAMES[what]
        files = Files(tmp_path)
        node = FakePrefill()
        async with served(files.of("server", *names), Services(node)) as server, dialling(files.client) as directory:
            peer = directory.peer(server.address)
            if not refusal:
                assert await peer.connect(samples.intro(samples.D)) == samples.intro()
                assert await peer.renew_lease(samples.LEASE_CALL) == 30.0
                return
            with pytest.raises(NotAuthorised, match=refusal) as refused:
                await peer.connect(samples.intro(samples.D))
            assert refused.value.fields == {"address": server.address, "node": PREFILL}
            calls = len(node.calls)
            with pytest.raises(TlsRefused):
                await peer.renew_lease(samples.LEASE_CALL)
            assert len(node.calls) == calls

    run(body)


def test_a_node_that_is_another_one_when_it_is_asked_again_is_not_believed(tmp_path: Path) -> None:
    async def body() -> None:
        class Turncoat(FakePrefill):
            async def connect(self, intro: NodeIntro) -> NodeIntro:
                self.calls.append(intro)
                return samples.intro(samples.P if len(self.calls) == 1 else samples.D)

        files = Files(tmp_path)
        both = files.of("server", PREFILL, DECODE, *HERE)
        async with served(both, Services(Turncoat())) as server, dialling(files.client) as directory:
            with pytest.raises(ProtocolError, match=f"is {PREFILL}.* first and {DECODE}"):
                await directory.peer(server.address).connect(samples.intro(samples.D))

    run(body)


@pytest.mark.parametrize("tls", [False, True])
def test_a_rank_that_comes_up_late_is_waited_for(tls: bool, tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        own = files.client if tls else PlainText()
        async with dialling(own) as directory:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            joining = asyncio.create_task(directory.rank(address).join(Joining(samples.D, samples.contract(), 16)))
            with pytest.raises(PeerLost):
                await directory.peer(address).connect(samples.intro(samples.D))
            assert not joining.done(), "a prefill node is one of many, a rank is the only one"
            rank: Any = SimpleNamespace(join=AsyncMock(return_value=samples.P))
            server = GrpcServer(Endpoint(address), Services(rank=rank), files.server if tls else PlainText())
            await server.start()
            assert await joining == samples.P
            await server.stop(0)

    run(body)


def test_a_late_renewal_is_told_so() -> None:
    async def body() -> None:
        async with serving(FakePrefill(error=LeaseExpired("over", lease="lease-1"))) as (server, directory):
            with pytest.raises(LeaseExpired) as caught:
                await directory.peer(server.address).renew_lease(samples.LEASE_CALL)
            assert caught.value.fields["lease"] == "lease-1"

    run(body)


def test_a_stream_of_another_life_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        real, reborn = prefill.prefill_event_to_pb, PeerName(samples.P.node, Incarnation("c" * 32))
        monkeypatch.setattr(
            prefill, "prefill_event_to_pb", lambda event, e: real(event, dataclasses.replace(e, sender=reborn))
        )
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, directory):
            seen, error = await failure(directory.peer(server.address).prefill(samples.prefill_request()))
            assert seen == []
            assert isinstance(error, WrongIncarnation)
            await soon(node.stream.ended)

    run(body)


def test_tokens_stream_as_they_are_made() -> None:
    """The first is there while the node still works on the second."""

    async def body() -> None:
        node = FakeDecode(Stream(samples.TOKEN, hangs=True))
        async with serving(None, node) as (server, directory):
            stream = directory.decode(server.address).generate(samples.generate_request())
            async with aclosing(stream) as events:
                assert isinstance(await anext(events), Token)
                assert not node.stream.ended.is_set()
            await soon(node.stream.ended)

    run(body)
