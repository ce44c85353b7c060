"""Who may call and speak for whom, and how much at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.experimental.session_cache import ssl_session_cache_lru
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdkv.errors import LimitReached, NotAuthorised, PdkvError, WrongIncarnation
from pdkv.node.rank import Rank
from pdkv.rpc.errors import error_from
from pdkv.rpc.guard import Guard, speaker
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import Services
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.v1 import common_pb2, decode_pb2, prefill_pb2, rank_pb2, router_pb2, source_pb2, visit_pb2
from tests.certificates import HERE
from tests.node.grouped import FACTS
from tests.node.toy import make_parts
from tests.rpc import samples
from tests.rpc.fakes import (
    LIMIT_S,
    FakeDecode,
    FakePrefill,
    FakeRouter,
    FakeSource,
    Stream,
    collect,
    failure,
    run,
    soon,
)
from tests.rpc.tls import DECODE, PREFILL, Files, credentials, dialling, served

FILES = (prefill_pb2, source_pb2, decode_pb2, router_pb2, rank_pb2, visit_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
ANYBODY = (common_pb2.StatusRequest, common_pb2.EstimateCall, decode_pb2.GenerateRequest, decode_pb2.FinishCall)
"""Requests that say nothing of who sends them: whoever is let in may send them."""


def request_of(method: Any) -> Any:
    return method.input_type._concrete_class


def said_by(kind: Any, node: str) -> Any:
    """A message of this kind from this node."""
    peer = common_pb2.PeerName(node=node, incarnation="b" * 32)
    if kind is prefill_pb2.Introduction:
        body = prefill_pb2.IntroductionBody(name=peer).SerializeToString()
        return kind(protocol_major=1, content_fingerprint=bytes(32), body=body)
    if "leader" in kind.DESCRIPTOR.fields_by_name:
        return kind(leader=peer)
    return kind(envelope=common_pb2.Envelope(sender=peer, receiver=peer, content_fingerprint=bytes(32)))


def test_every_message_says_who_speaks_or_may_come_from_anybody() -> None:
    """A new one that is neither would be believed whatever it says: it has to be an envelope's, or to be listed."""
    assert len(METHODS) >= 18
    for path, method in METHODS.items():
        kind = request_of(method)
        if kind in ANYBODY:
            assert speaker(kind()) is None, path
        else:
            assert speaker(said_by(kind, "x7")) == "x7", path


def test_an_introduction_that_says_nothing_names_nobody() -> None:
    assert speaker(prefill_pb2.Introduction(body=b"\xff")) is None
    assert speaker(prefill_pb2.Introduction()) == ""


async def called(channel: grpc.aio.Channel, path: str, raw: bytes) -> PdkvError | None:
    """What the call ends with."""
    try:
        if METHODS[path].server_streaming:
            async for _ in channel.unary_stream(path)(raw, timeout=LIMIT_S):
                pass
        else:
            await channel.unary_unary(path)(raw, timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return error_from(error, address="here", what=path)
    return None


def with_all_services(
    gate: Gate, who: tuple[str, ...], body: Callable[..., Coroutine[Any, Any, None]], path: Path
) -> None:
    """`body` with a channel of a client whose certificate has these names."""

    async def main() -> None:
        files = Files(path)
        rank = Rank(make_parts("d1", FACTS, LoopbackNet()))
        streams = (Stream(samples.ACCEPTED), Stream(samples.GENERATE_DONE), Stream(samples.GENERATE_DONE))
        node, decode, router = FakePrefill(streams[0]), FakeDecode(streams[1]), FakeRouter(streams[2])
        services = Services(node, decode, router, rank, FakeSource(), visit=samples.intro)
        async with served(files.server, services, gate) as server:
            keys = credentials(files.of("caller", *who))
            async with grpc.aio.secure_channel(server.address, keys) as channel:
                await body(channel, node)
        rank.parts.close()

    run(main)


def test_no_node_speaks_for_another(tmp_path: Path) -> None:
    async def body(channel: grpc.aio.Channel, node: FakePrefill) -> None:
        for path, method in METHODS.items():
            kind = request_of(method)
            if kind in ANYBODY:
                continue
            for other in ("p9", "", "decode-0\n", f"{DECODE}.fleet"):
                error = await called(channel, path, said_by(kind, other).SerializeToString())
                assert isinstance(error, NotAuthorised), (path, other, error)
                assert error.fields["names"] == f"{DECODE}, spiffe://fleet/pdkv/d2"
            for own in (DECODE, "d2"):
                error = await called(channel, path, said_by(kind, own).SerializeToString())
                assert not isinstance(error, NotAuthorised), (path, error)
        assert not any(isinstance(call, NotAuthorised) for call in node.calls)

    with_all_services(Gate(), (DECODE, "spiffe://fleet/pdkv/d2"), body, tmp_path)


@pytest.mark.parametrize(("names", "allowed"), [(("decode-7", "x"), True), (("router-0",), False), ((), False)])
def test_only_allowed_names_call_anything(names: tuple[str, ...], allowed: bool, tmp_path: Path) -> None:
    async def body(channel: grpc.aio.Channel, node: FakePrefill) -> None:
        for path, method in METHODS.items():
            kind = request_of(method)
            raw = (kind() if kind in ANYBODY else said_by(kind, names[0] if names else "")).SerializeToString()
            error = await called(channel, path, raw)
            assert isinstance(error, NotAuthorised) != allowed, (path, error)
            if error is not None and not allowed:
                assert error.fields["allowed"] == "admin, decode-*"
                assert str(error).startswith(f"{', '.join(names) or 'no name'} may not call {path} here")
        check = health_pb2_grpc.HealthStub(channel).Check
        reply = await check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING

    with_all_services(Gate(("admin", "decode-*")), names, body, tmp_path)


def test_who_may_ask_for_the_status_may_do_nothing_else(tmp_path: Path) -> None:
    async def body(channel: grpc.aio.Channel, node: FakePrefill) -> None:
        for path, method in METHODS.items():
            kind = request_of(method)
            raw = (kind() if kind in ANYBODY else said_by(kind, "router-0")).SerializeToString()
            error = await called(channel, path, raw)
            assert isinstance(error, NotAuthorised) != path.endswith(("/Status", "/Estimate")), (path, error)

    with_all_services(Gate(("decode-*",), ("router-*",)), ("router-0",), body, tmp_path)


def test_in_plain_text_nobody_is_asked_for_a_name() -> None:
    async def body() -> None:
        node = FakePrefill(error=WrongIncarnation("heard"))
        async with served(PlainText(), Services(node), Gate()) as server, dialling(PlainText()) as directory:
            with pytest.raises(WrongIncarnation):
                await directory.peer(server.address).renew_lease(samples.LEASE_CALL)

    run(body)


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_has_so_many_calls_at_once_and_another_one_as_many(tls: bool, tmp_path: Path) -> None:
    """Over however many connections; a call that has ended makes room."""

    async def body() -> None:
        files = Files(tmp_path)
        own: Any = files.client if tls else PlainText()
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        gate = Gate(calls_per_peer=2)
        async with (
            served(files.server if tls else PlainText(), Services(node), gate) as server,
            AsyncExitStack() as stack,
        ):
            directories = [await stack.enter_async_context(dialling(own)) for _ in range(3)]
            peers = [directory.peer(server.address) for directory in directories]
            streams = [peer.prefill(samples.prefill_request()) for peer in peers[:2]]
            for stream in streams:
                await anext(stream)
            for peer in peers:
                seen, error = await failure(peer.prefill(samples.prefill_request()))
                assert (seen, type(error)) == ([], LimitReached)
                assert error.fields["calls_per_peer"] == "2"
                assert error.fields["peer"] == (DECODE if tls else "ipv4:127.0.0.1")
                with pytest.raises(LimitReached):
                    await peer.status()
            if tls:
                other = await stack.enter_async_context(dialling(files.of("other", "decode-9")))
                assert (await other.peer(server.address).status()).role == "prefill"
            await streams[0].aclose()
            await soon(node.stream.ended)
            node.stream = Stream(samples.ACCEPTED)
            for _ in range(5):
                assert await collect(peers[2].prefill(samples.prefill_request())) == [samples.ACCEPTED]
            await streams[1].aclose()

    run(body)


def test_calls_of_a_peer_run_over_so_many_connections_and_over_others_once_those_have_none() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with (
            served(PlainText(), Services(node), Gate(connections_per_peer=2)) as server,
            AsyncExitStack() as stack,
        ):
            directories = [await stack.enter_async_context(dialling(PlainText())) for _ in range(3)]
            peers = [directory.peer(server.address) for directory in directories]
            streams = [peer.prefill(samples.prefill_request()) for peer in peers[:2]]
            for stream in streams:
                await anext(stream)
            with pytest.raises(LimitReached) as refused:
                await peers[2].status()
            assert refused.value.fields["connections_per_peer"] == "2"
            assert (await peers[1].status()).role == "prefill"  # more calls over one that counts already
            await streams[0].aclose()
            await soon(node.stream.ended)
            await until_answered(peers[2])
            await streams[1].aclose()

    async def until_answered(peer: Any) -> None:
        """The server's end of a closed stream comes a moment after the client's."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await peer.status()
                    return
                except LimitReached:
                    await asyncio.sleep(0)

    run(body)


def test_nobody_is_kept_in_mind_who_has_no_call() -> None:
    class Context:
        def peer(self) -> str:
            return "ipv4:10.0.0.1:5"

    guard: Any = Guard(PlainText(), Gate())
    with guard.let_in(Context(), "/pdkv.v1.Prefill/Status"):
        assert guard._running == {"ipv4:10.0.0.1": {"ipv4:10.0.0.1:5": 1}}
    assert not guard._running


def test_a_resumed_session_is_refused_as_its_certificate_was_not_checked_again(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        options = [
            ("grpc.ssl_session_cache", ssl_session_cache_lru(4)),
            ("grpc.ssl_target_name_override", PREFILL),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with served(files.server) as server:
            endings = []
            for _ in range(2):
                async with grpc.aio.secure_channel(
                    server.address, credentials(files.client), options=options
                ) as channel:
                    endings.append(await called(channel, "/pdkv.v1.Prefill/Status", b""))
            assert endings[0] is None
            assert isinstance(endings[1], NotAuthorised)
            assert "a TLS session was resumed" in str(endings[1])

    run(body)


def test_calls_that_a_peer_may_not_make_count_for_nothing(tmp_path: Path) -> None:
    """Refusals give their place back too."""

    async def body() -> None:
        files = Files(tmp_path)
        server_of_one = served(files.server, Services(FakePrefill()), Gate(calls_per_peer=1))
        async with server_of_one as server, dialling(files.of("other", "d9", *HERE)) as directory:
            peer = directory.peer(server.address)
            for _ in range(3):
                with pytest.raises(NotAuthorised, match="is from node 'decode-0', the certificate of d9"):
                    await peer.renew_lease(samples.LEASE_CALL)
            assert (await peer.status()).role == "prefill"

    run(body)
