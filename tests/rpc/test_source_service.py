"""A source of pages over gRPC: what is asked arrives, what it says comes back; a prefill node is one as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.errors import BoundsError, NotAuthorised, RemoteError, StalePages
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import Services
from tests.rpc import samples
from tests.rpc.fakes import FakePrefill, FakeSource, run
from tests.rpc.tls import Files, dialling, served


def test_every_call_of_a_source() -> None:
    async def body() -> None:
        node = FakeSource()
        async with served(PlainText(), Services(source=node)) as server, dialling(PlainText()) as directory:
            peer = directory.sources.peer(server.address)
            assert await peer.connect(samples.intro(samples.D)) == samples.intro()
            assert await peer.locate(samples.LOCATE_CALL) == 2
            assert samples.same(await peer.lend(samples.LEND_CALL), samples.LOAN)
            await peer.release_lease(samples.LEASE_CALL)
            directory.sources.drop(server.address)
            assert await peer.locate(samples.LOCATE_CALL) == 2
            said = [samples.intro(samples.D), samples.LOCATE_CALL, samples.LEND_CALL, samples.LEASE_CALL]
            assert node.calls == [*said, samples.LOCATE_CALL]

    run(body)


def test_a_prefill_node_is_asked_at_the_same_address() -> None:
    async def body() -> None:
        node, source = FakePrefill(), FakeSource()
        services = Services(prefill=node, source=source)
        async with served(PlainText(), services) as server, dialling(PlainText()) as directory:
            peer = directory.peer(server.address)
            assert await peer.locate(samples.LOCATE_CALL) == 2
            assert samples.same(await peer.lend(samples.LEND_CALL), samples.LOAN)
            assert (len(node.calls), len(source.calls)) == (0, 2)

    run(body)


def test_what_it_refuses_arrives_by_name_and_a_node_that_is_none_says_so() -> None:
    async def body() -> None:
        node = FakeSource(error=StalePages("gone", pages=[1]))
        services = Services(source=node)
        async with served(PlainText(), services) as server, dialling(PlainText()) as directory:
            with pytest.raises(StalePages, match="gone"):
                await directory.source(server.address).lend(samples.LEND_CALL)
        async with served(PlainText(), Services(prefill=FakePrefill())) as server, dialling(PlainText()) as directory:
            with pytest.raises(RemoteError) as refused:
                await directory.peer(server.address).locate(samples.LOCATE_CALL)
            assert refused.value.fields["code"] == "UNIMPLEMENTED"

    run(body)


def test_a_reply_that_promises_more_than_was_asked_for_is_not_believed() -> None:
    async def body() -> None:
        services = Services(source=FakeSource())
        async with served(PlainText(), services) as server, dialling(PlainText()) as directory:
            one = replace(samples.LOCATE_CALL, hashes=samples.LOCATE_CALL.hashes.part(0, 1))
            with pytest.raises(BoundsError, match="pages"):
                await directory.source(server.address).locate(one)

    run(body)


def test_only_allowed_names_may_borrow_and_only_in_their_own(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        gate = Gate(allow_names=("decode-*",), allow_status=("watch-*",))
        async with served(files.server, Services(source=FakeSource()), gate) as server:
            async with dialling(files.client) as directory:
                assert await directory.source(server.address).locate(samples.LOCATE_CALL) == 2
            async with dialling(files.of("watcher", "watch-1")) as directory:
                with pytest.raises(NotAuthorised, match="Lend"):
                    await directory.source(server.address).lend(samples.LEND_CALL)
            async with dialling(files.of("other", "decode-9")) as directory:
                with pytest.raises(NotAuthorised, match="decode-0"):
                    await directory.source(server.address).locate(samples.LOCATE_CALL)

    run(body)
