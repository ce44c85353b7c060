"""`pdkv drain` and `pdkv compact`, against a service in this process."""

from __future__ import annotations

import asyncio

import pytest

from pdkv.cli.app import run
from pdkv.node.control import Control
from pdkv.node.readiness import Readiness
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import Services
from tests.rpc.tls import served


def told(*args: str, idle: bool = True) -> tuple[int | str | None, Control]:
    async def body() -> tuple[int | str | None, Control]:
        async def drain() -> None:
            if not idle:
                await asyncio.Event().wait()

        async def compact() -> int:
            return 7

        control = Control(Readiness(), drain, compact)
        async with served(PlainText(), Services(admin=control)) as server, asyncio.timeout(60):
            return await asyncio.to_thread(exit_code, args[0], server.address, "--insecure", *args[1:]), control

    return asyncio.run(body())


def exit_code(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(args)
    return ended.value.code


def test_drain(capsys: pytest.CaptureFixture[str]) -> None:
    code, control = told("drain")
    assert code == 0
    assert capsys.readouterr().err.endswith("no request and no lease any more, and takes none until it is ended\n")
    assert not control.told.is_set()


def test_drain_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    code, control = told("drain", "--end")
    assert code == 0
    assert capsys.readouterr().err.endswith("no request and no lease any more, and ends now\n")
    assert control.told.is_set()


def test_a_node_that_is_not_idle_in_time_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = told("drain", "--wait", "0.2", idle=False)
    assert code == 2
    assert "DeadlineExceeded" in capsys.readouterr().err


def test_compact(capsys: pytest.CaptureFixture[str]) -> None:
    assert told("compact")[0] == 0
    assert capsys.readouterr().out == "7 pages moved\n"
