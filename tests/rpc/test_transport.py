"""Addresses, ports, credentials, and how many may connect."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdkv.errors import ConfigError, PdkvError, PeerLost, TlsRefused
from pdkv.rpc.errors import error_from
from pdkv.rpc.security import Gate, MutualTls, PlainText
from pdkv.rpc.server import Services
from pdkv.rpc.transport import Endpoint, advertised, make_server, open_port, require_address, require_free
from tests.certificates import EXPIRED, HERE, NOT_YET, Authority
from tests.rpc import samples
from tests.rpc.fakes import LIMIT_S, FakePrefill, Stream, failure, run, soon
from tests.rpc.tls import CA, DECODE, PREFILL, Files, Looker, credentials, dialling, served


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:0", "a-b.c_d:80"])
def test_addresses(address: str) -> None:
    assert require_address("address", address) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "unix:/run/x", "host:65536", "a b:1", "dns:///a:1", "::1:9"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        require_address("address", address)


def test_advertised_is_what_others_can_reach() -> None:
    assert advertised(Endpoint("127.0.0.1:0"), 41) == "127.0.0.1:41"
    assert advertised(Endpoint("0.0.0.0:0", "pod-1.pool"), 41) == "pod-1.pool:41"
    assert advertised(Endpoint("[::]:0", "[fd00::1]"), 41) == "[fd00::1]:41"
    assert advertised(Endpoint("0.0.0.0:0", "pod-1.pool:7000"), 41) == "pod-1.pool:7000"
    for endpoint in (Endpoint("0.0.0.0:0"), Endpoint("[::]:0"), Endpoint("127.0.0.1:0", "0.0.0.0")):
        with pytest.raises(ConfigError, match="advertise"):
            advertised(endpoint, 41)


def test_whether_an_address_is_free_is_known_before_anything_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"free here.*in use"):
            require_free(address)
    for free in (address, "127.0.0.1:0", "localhost:0", "0.0.0.0:0"):
        require_free(free)
    with pytest.raises(ConfigError, match=r"bind: '192\.0\.2\.1:0' .*free here"):
        require_free("192.0.2.1:0")


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    async def body() -> None:
        first, second = (make_server([], Gate(), PlainText()) for _ in range(2))
        port = open_port(first, "127.0.0.1:0", PlainText())
        assert port > 0
        with pytest.raises(ConfigError, match=f"bind: '127.0.0.1:{port}'"):
            open_port(second, f"127.0.0.1:{port}", PlainText())
        await first.stop(0)
        await second.stop(0)

    run(body)


OTHER = Authority("other")
BOTH = CA.pem + OTHER.pem


async def status_at(address: str, keys: grpc.ChannelCredentials | None) -> PdkvError | None:
    """What a call ends with over a channel of its own."""
    opened = grpc.aio.secure_channel(address, keys) if keys else grpc.aio.insecure_channel(address)
    async with opened as channel:
        try:
            await channel.unary_unary("/pdkv.v1.Prefill/Status")(b"", timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return error_from(error, address=address, what="Status")
    return None


BAD_CLIENTS: dict[str, Callable[[Files], grpc.ChannelCredentials | None]] = {
    "of another CA": lambda f: credentials(f.of("x", DECODE, ca=OTHER, trusted=BOTH)),
    "of another CA of the same name": lambda f: credentials(f.of("x", DECODE, ca=Authority(), trusted=CA.pem)),
    "expired": lambda f: credentials(f.of("x", DECODE, hours=EXPIRED)),
    "not yet valid": lambda f: credentials(f.of("x", DECODE, hours=NOT_YET)),
    "none": lambda f: grpc.ssl_channel_credentials(CA.pem),
    "plain text": lambda f: None,
}


@pytest.mark.parametrize("what", BAD_CLIENTS)
def test_a_client_without_a_good_certificate_is_refused_and_the_server_serves_on(what: str, tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        node = FakePrefill()
        async with served(files.server, Services(node)) as server:
            error = await status_at(server.address, BAD_CLIENTS[what](files))
            assert isinstance(error, TlsRefused), error
            assert "hangs up on connecting" in str(error)
            assert "look at tls_certificate here, and at tls_ca there" in str(error)
            assert node.calls == []
            assert await status_at(server.address, credentials(files.client)) is None

    run(body)


BAD_SERVERS: dict[str, tuple[Callable[[Files], MutualTls], str]] = {
    "of another CA": (lambda f: f.of("x", PREFILL, *HERE, ca=OTHER, trusted=CA.pem), "unable to get local issuer"),
    "expired": (lambda f: f.of("x", PREFILL, *HERE, hours=EXPIRED), "certificate has expired"),
    "not yet valid": (lambda f: f.of("x", PREFILL, *HERE, hours=NOT_YET), "certificate is not yet valid"),
    "of another host": (lambda f: f.of("x", PREFILL, "host-9"), "no name for who was dialled"),
}


@pytest.mark.parametrize("what", BAD_SERVERS)
def test_a_server_without_a_good_certificate_is_not_talked_with(what: str, tmp_path: Path) -> None:
    """Whoever dials it by our client hears at once what is wrong, and isn't kept waiting for it to come up."""

    async def body() -> None:
        files = Files(tmp_path)
        made, words = BAD_SERVERS[what]
        async with Looker(made(files)) as looker, dialling(files.client) as directory:
            peer = directory.peer(looker.address)
            if what != "of another host":  # a stream is for the node, wherever it is
                _, error = await failure(peer.prefill(samples.prefill_request(remaining_s=LIMIT_S)))
                assert isinstance(error, TlsRefused)
            began = time.monotonic()
            for attempt in (peer.status(), peer.connect(samples.intro(samples.D))):
                with pytest.raises(TlsRefused, match=words) as refused:
                    await attempt
                assert refused.value.fields["address"] == looker.address
            assert time.monotonic() - began < LIMIT_S / 2

    run(body)


def test_plain_text_and_tls_do_not_meet(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        servers, ways = [], []
        async with AsyncExitStack() as stack:
            for serves, dials in ((PlainText(), PlainText()), (files.server, files.client)):
                servers.append(await stack.enter_async_context(served(serves)))
                ways.append(await stack.enter_async_context(dialling(dials)))
            (plain, tls), (in_plain, in_tls) = servers, ways
            with pytest.raises(TlsRefused, match="it speaks plain text, and this side TLS"):
                await in_tls.peer(plain.address).status()
            with pytest.raises(PeerLost, match=r"Does it want TLS, or plain text\?") as hung_up:
                await in_plain.peer(tls.address).status()
            assert not isinstance(hung_up.value, TlsRefused)
            assert (await in_tls.peer(tls.address).status()).role == "prefill"
            assert (await in_plain.peer(plain.address).status()).role == "prefill"

    run(body)


def test_a_server_takes_up_new_files_without_a_restart_and_keeps_old_ones_while_new_ones_are_bad(
    tmp_path: Path,
) -> None:
    """A CA is changed in three steps: everybody takes both, everybody gets a certificate of the new one, the old one
    goes. What runs goes on through all of them."""

    async def body() -> None:
        files = Files(tmp_path)
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        renewed = credentials(files.of("renewed", DECODE, ca=OTHER, trusted=BOTH))
        old = credentials(files.of("old", DECODE, trusted=BOTH))
        async with served(files.server, Services(node)) as server, dialling(files.client) as directory:
            events = directory.peer(server.address).prefill(samples.prefill_request())
            await anext(events)
            assert isinstance(await status_at(server.address, renewed), TlsRefused)
            for half in (b"", files.server.ca.read_bytes()[:200]):
                files.server.ca.write_bytes(half)
                assert await status_at(server.address, old) is None
                assert isinstance(await status_at(server.address, renewed), TlsRefused)
            files.of("server", PREFILL, *HERE, trusted=BOTH)
            for keys in (old, renewed):
                assert await status_at(server.address, keys) is None
            files.of("server", PREFILL, *HERE, ca=OTHER, trusted=OTHER.pem)
            assert await status_at(server.address, renewed) is None
            assert isinstance(await status_at(server.address, old), TlsRefused)
            assert not node.stream.ended.is_set()
            await events.aclose()
            await soon(node.stream.ended)

    run(body)


def test_a_connection_does_not_outlive_its_certificate_by_much(tmp_path: Path) -> None:
    """Its age ends it; then the certificate, which has expired meanwhile, is looked at again."""

    async def body() -> None:
        files = Files(tmp_path)
        short = files.of("short", DECODE, hours=(-1.0, 1.5 / 3600))
        gate = Gate(connection_age_s=0.5)
        async with served(files.server, Services(FakePrefill()), gate) as server, dialling(short) as directory:
            peer = directory.peer(server.address)
            answered = 0
            error: PdkvError | None = None
            while error is None or not isinstance(error, TlsRefused):
                try:
                    await peer.status()
                    answered += 1
                except PeerLost as lost:
                    error = lost
            assert answered > 0
            assert "certificate has expired" in str(error)

    run(body)


def test_so_many_may_connect_and_one_more_when_one_has_gone(tmp_path: Path) -> None:
    async def body() -> None:
        async with served(PlainText(), gate=Gate(connections=2)) as server, AsyncExitStack() as stack:
            ways: list[Any] = [await stack.enter_async_context(dialling(PlainText())) for _ in range(3)]
            peers = [directory.peer(server.address) for directory in ways]
            for peer in peers[:2]:
                assert (await peer.status()).role == "prefill"
            with pytest.raises(PeerLost, match="as many connections as it may have"):
                await peers[2].status()
            await ways[0].close()
            async with asyncio.timeout(LIMIT_S):
                while await status_at(server.address, None) is not None:
                    pass

    run(body)
