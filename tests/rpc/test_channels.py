"""Channels by address: shared, renewed under TLS, and never more than there may be."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from pdkv.errors import ConfigError, PeerLost, TlsRefused
from pdkv.rpc import channels as module
from pdkv.rpc.channels import CHANNEL_AGE_S, Channels
from pdkv.rpc.security import TLS_AGE_S, PlainText
from pdkv.rpc.server import Services
from tests.certificates import HERE, Authority
from tests.rpc import samples
from tests.rpc.fakes import FakePrefill, Stream, collect, failure, run, serving, soon
from tests.rpc.tls import CA, DECODE, PREFILL, Files, Looker, dialling, look, served


def to(channels: Channels, address: str, node: str = "") -> grpc.aio.Channel:
    """What a call that begins now would get."""
    with channels.to(address, node) as channel:
        return channel


def test_one_for_an_address_and_in_plain_text_whatever_node_is_meant() -> None:
    async def body() -> None:
        channels = Channels(PlainText())
        assert not channels.tls
        first = to(channels, "h:1")
        assert to(channels, "h:1", "p0") is to(channels, "h:1", "p1") is first
        assert to(channels, "h:2") is not first
        await channels.close()

    run(body)


def test_one_for_each_node_under_tls(tmp_path: Path) -> None:
    async def body() -> None:
        channels = Channels(Files(tmp_path).client)
        assert channels.tls
        some = [to(channels, "h:1", node) for node in ("", "p0", "p1")]
        assert len(set(map(id, some))) == 3
        assert to(channels, "h:1", "p0") is some[1]
        await channels.close()

    run(body)


@pytest.mark.parametrize("address", ["unix:/run/x", "h", ""])
def test_only_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        to(Channels(PlainText()), address)


def test_a_new_certificate_is_used_by_the_next_call(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        async with Looker(files.server) as looker:
            channels = Channels(files.client)
            for names in ((DECODE,), (DECODE, "renewed"), (DECODE, "again")):
                files.of("client", *names)
                for _ in range(2):
                    await look(to(channels, looker.address))
                    assert looker.seen[-1] == names
            assert len(channels) == 1
            await channels.close()

    run(body)


def test_what_can_not_be_used_is_not_and_the_call_is_made_with_what_was(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        async with Looker(files.server) as looker:
            channels = Channels(files.client)
            old = to(channels, looker.address)
            files.client.certificate.write_bytes(b"half of a cer")
            assert to(channels, looker.address) is old
            await look(old)
            assert "PEM files" in channels.complaint
            await channels.close()

    run(body)


@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_outlives_the_certificate_that_it_began_with_and_not_its_directory(
    closed: bool, tmp_path: Path
) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with served(files.server, Services(node)) as server, dialling(files.client) as directory:
            peer = directory.peer(server.address)
            events = peer.prefill(samples.prefill_request())
            await anext(events)
            files.of("client", DECODE, "renewed")
            await peer.renew_lease(samples.LEASE_CALL)
            last = asyncio.create_task(failure(events))
            await peer.renew_lease(samples.LEASE_CALL)
            assert not last.done()
            assert len(directory._channels) == 2
            await (directory.close() if closed else server.stop(0))
            _, error = await last
            assert ("was closed here" in str(error)) == closed
            await soon(node.stream.ended)

    run(body)


def test_a_channel_is_renewed_before_a_server_would_end_it(tmp_path: Path) -> None:
    async def body() -> None:
        now_s = 0.0
        channels = Channels(Files(tmp_path).client, now_s=lambda: now_s)
        first = to(channels, "h:1")
        now_s = CHANNEL_AGE_S - 1
        assert to(channels, "h:1") is first
        now_s = CHANNEL_AGE_S
        assert to(channels, "h:1") is not first
        await channels.close()

    assert TLS_AGE_S / 2 >= CHANNEL_AGE_S
    run(body)


def test_addresses_that_somebody_makes_up_fill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHANNELS", 3)

    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, samples.pages(2), hangs=True))
        async with serving(node) as (server, directory):
            events = directory.peer(server.address).prefill(samples.prefill_request())
            async with aclosing(events):
                await anext(events)
                for number in range(20):
                    with pytest.raises(PeerLost):
                        await directory.peer(f"127.0.0.1:{number + 1}").status()
                channels = directory._channels
                assert len(channels) == 4  # with that of the stream, which is not kept for others any more
                assert samples.same(await anext(events), samples.pages(2))
            node.stream = Stream(samples.ACCEPTED)
            assert await collect(directory.peer(server.address).prefill(samples.prefill_request()))
            assert len(channels) == 3

    run(body)


def test_a_dropped_address_is_dialled_anew(tmp_path: Path) -> None:
    async def body() -> None:
        channels = Channels(Files(tmp_path).client)
        some = {(address, node): to(channels, address, node) for address in ("h:1", "h:2") for node in ("", "p0")}
        channels.drop("h:1")
        for (address, node), channel in some.items():
            assert (to(channels, address, node) is channel) == (address == "h:2")
        await channels.close()
        assert not len(channels)

    run(body)


def test_a_call_that_is_refused_says_what_is_wrong_with_its_own_certificate(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        both = CA.pem + (other := Authority("other")).pem
        own = files.of("client", DECODE, ca=other, trusted=both)
        async with served(files.server) as server, dialling(own) as directory:
            with pytest.raises(TlsRefused, match="it hangs up on connecting") as refused:
                await directory.peer(server.address).status()
            assert "this side's own" not in str(refused.value)
            own.certificate.unlink()
            _, error = await failure(directory.peer(server.address).prefill(samples.prefill_request()))
            assert isinstance(error, TlsRefused)
            assert "this side's own is bad: tls_certificate: " in str(error)

    run(body)


def test_a_node_is_only_where_the_certificate_says_so(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        async with Looker(files.of("looker", PREFILL, "p1", *HERE)) as looker:
            channels = Channels(files.client)
            for node in ("", PREFILL, "p1"):
                assert await look(to(channels, looker.address, node)) == b"look"
            with pytest.raises(Exception, match="Hostname Verification Check failed"):
                await look(to(channels, looker.address, "p2"))
            await channels.close()

    run(body)
