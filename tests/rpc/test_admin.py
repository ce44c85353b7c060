"""An operator's calls over gRPC: what they do, how long they wait, and who may make them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, DeadlineExceeded, NotAuthorised
from pdkv.node.control import Control
from pdkv.node.readiness import Readiness
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import Services
from tests.rpc.fakes import LIMIT_S, FakeDecode, run
from tests.rpc.tls import Files, dialling, served


class Drained:
    """A node that drains when it is let."""

    def __init__(self, *, idle: bool = True) -> None:
        self.idle = asyncio.Event()
        if idle:
            self.idle.set()
        self.control = Control(Readiness(), self.drain, self.compact)

    async def drain(self) -> None:
        await self.idle.wait()

    async def compact(self) -> int:
        return 3


@pytest.mark.parametrize("end", [False, True])
def test_a_node_is_drained(end: bool) -> None:
    async def body() -> None:
        node = Drained()
        async with served(PlainText(), Services(admin=node.control)) as server, dialling(PlainText()) as directory:
            await directory.admin(server.address).drain(end=end, wait_s=LIMIT_S)
            assert node.control.told.is_set() == end
            assert await directory.admin(server.address).compact() == 3

    run(body)


def test_a_caller_that_waits_no_longer_takes_nothing_back() -> None:
    async def body() -> None:
        node = Drained(idle=False)
        async with served(PlainText(), Services(admin=node.control)) as server, dialling(PlainText()) as directory:
            with pytest.raises(DeadlineExceeded):
                await directory.admin(server.address).drain(end=True, wait_s=0.2)
            assert node.control.told.is_set()

    run(body)


def test_a_router_has_no_pages() -> None:
    async def body() -> None:
        node = Drained()
        control = Control(Readiness(), node.drain)
        async with served(PlainText(), Services(admin=control)) as server, dialling(PlainText()) as directory:
            with pytest.raises(ConfigError, match="no pages"):
                await directory.admin(server.address).compact()

    run(body)


@pytest.mark.parametrize(
    ("gate", "allowed"),
    [
        (Gate(), False),
        (Gate(allow_names=("decode-*",)), False),
        (Gate(allow_admin=("decode-*",)), True),
        (Gate(allow_names=("router-*",), allow_admin=("decode-*",)), True),
        (Gate(allow_admin=("admin",)), False),
    ],
)
def test_under_tls_only_who_is_named_for_it(gate: Gate, allowed: bool, tmp_path: Path) -> None:
    async def body() -> None:
        files, node = Files(tmp_path), Drained()
        services = Services(decode=FakeDecode(), admin=node.control)
        async with served(files.server, services, gate) as server, dialling(files.client) as directory:
            admin = directory.admin(server.address)
            if allowed:
                await admin.drain(end=False, wait_s=LIMIT_S)
                return
            for call in (admin.drain(end=True, wait_s=LIMIT_S), admin.compact()):
                with pytest.raises(NotAuthorised, match=r"may not call /pdkv\.v1\.Admin/"):
                    await call
            assert not node.control.told.is_set()

    run(body)
