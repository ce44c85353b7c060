"""A visitor over gRPC: what it is told, and who may ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkv.errors import NotAuthorised, PeerLost, RemoteError
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import Services
from tests.rpc import samples
from tests.rpc.fakes import FakePrefill, run
from tests.rpc.tls import Files, dialling, served


def test_a_visitor_is_told_who_the_node_is_and_stays_unknown() -> None:
    async def body() -> None:
        node, mine = FakePrefill(), samples.intro()
        services = Services(prefill=node, visit=lambda: mine)
        async with served(PlainText(), services) as server, dialling(PlainText()) as directory:
            assert await directory.visit(server.address).introduce() == mine
            assert node.calls == []

    run(body)


def test_a_service_without_a_pool_has_no_introduction() -> None:
    async def body() -> None:
        async with served(PlainText(), Services(prefill=FakePrefill())) as server, dialling(PlainText()) as directory:
            with pytest.raises(RemoteError) as refused:
                await directory.visit(server.address).introduce()
            assert refused.value.fields["code"] == "UNIMPLEMENTED"

    run(body)


def test_nobody_there_is_a_lost_peer() -> None:
    async def body() -> None:
        async with served(PlainText(), Services(visit=samples.intro)) as server:
            address = server.address
        async with dialling(PlainText()) as directory:
            with pytest.raises(PeerLost):
                await directory.visit(address).introduce()

    run(body)


def test_who_may_only_ask_for_the_status_is_not_told_where_the_memory_is(tmp_path: Path) -> None:
    async def body() -> None:
        files = Files(tmp_path)
        gate = Gate(allow_names=("decode-*",), allow_status=("watch-*",))
        services = Services(prefill=FakePrefill(), visit=samples.intro)
        async with served(files.server, services, gate) as server:
            async with dialling(files.client) as directory:
                assert (await directory.visit(server.address).introduce()).name == samples.intro().name
            async with dialling(files.of("watcher", "watch-1")) as directory:
                assert await directory.peer(server.address).status()
                with pytest.raises(NotAuthorised, match="Introduce"):
                    await directory.visit(server.address).introduce()

    run(body)
