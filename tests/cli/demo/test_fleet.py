"""Processes of a fleet: they are there when they say so, and gone in whatever way it is left.

A router stands for a node here: it is one to the fleet, and starts without a model.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from pdkv.cli.demo.fleet import Fleet, NodeProcess, command
from pdkv.errors import PeerLost
from tests.waiting import until_ended

FLAGS = {"prefill_addresses": "127.0.0.1:1", "decode_addresses": "127.0.0.1:2", "insecure": True}


def with_fleet(body: Callable[[Fleet], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), Fleet() as fleet:
            await body(fleet)

    asyncio.run(run())


def test_the_command_line() -> None:
    flags = {"model": "tiny", "pool_pages": 9, "insecure": True, "require_rdma": False}
    line = command("prefill", "p0", flags)
    assert line[:4] == [sys.executable, "-m", "pdkv.cli", "prefill"]
    assert " ".join(line[4:]) == f"--node-id p0 --json --exit-with {os.getpid()} --model tiny --pool-pages 9 --insecure"
    assert "--prefill-allow 127.0.0.1:*" in " ".join(command("decode", "d0", flags))
    assert "--prefill-allow 10.0.0.1:*" in " ".join(command("decode", "d0", {**flags, "prefill_allow": "10.0.0.1:*"}))


def test_a_node_is_started_stopped_and_killed() -> None:
    async def body(fleet: Fleet) -> None:
        first, second = await asyncio.gather(fleet.start("router", "r0", FLAGS), fleet.start("router", "r1", FLAGS))
        assert first.address != second.address
        assert (first.name, second.name) == ("r0", "r1")
        assert first.running
        await first.stop()
        assert not first.running
        assert await first.wait() == 0
        second.kill()
        assert await second.wait() == -signal.SIGKILL
        # both are harmless then
        second.kill()
        await second.stop()

    with_fleet(body)


def test_one_that_does_not_hear_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.cli.demo.fleet.STOP_DEADLINE_S", 0.05)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"

    async def body(fleet: Fleet) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        node = NodeProcess("deaf", process, fleet.log("deaf"), {"address": "127.0.0.1:1"})
        await node.stop()
        assert await node.wait() == -signal.SIGKILL

    with_fleet(body)


def test_one_that_ends_while_it_starts_says_why_and_keeps_nobody() -> None:
    others: list[int] = []

    async def body(fleet: Fleet) -> None:
        others.append((await fleet.start("router", "r0", FLAGS)).pid)
        # the name of a port that nobody can take
        await fleet.start("router", "r1", {**FLAGS, "bind": "192.0.2.1:1"})

    with pytest.raises(PeerLost, match=r"r1 ended with 2 before it served:\n(.*\n)*pdkv: ConfigError: bind: ") as error:
        with_fleet(body)
    assert error.value.fields["node"] == "r1"
    until_ended(others)


@pytest.mark.parametrize("how", ["by an error", "by a cancel", "in good order"])
def test_leaving_it_ends_every_process(how: str) -> None:
    started: list[int] = []

    async def body(fleet: Fleet) -> None:
        started.append((await fleet.start("router", "r0", FLAGS)).pid)
        if how == "by an error":
            raise KeyError(how)
        if how == "by a cancel":
            raise asyncio.CancelledError

    if how == "in good order":
        with_fleet(body)
    else:
        with pytest.raises((KeyError, asyncio.CancelledError)):
            with_fleet(body)
    until_ended(started, deadline_s=5)


def test_leaving_it_ends_those_that_have_not_said_anything_yet() -> None:
    async def run() -> list[int]:
        async with asyncio.timeout(60), Fleet() as fleet:
            starting = asyncio.create_task(fleet.start("router", "r0", FLAGS))
            while not fleet.pids:
                await asyncio.sleep(0)
            starting.cancel()
            return fleet.pids

    until_ended(asyncio.run(run()), deadline_s=5)


PARENT = """
import asyncio, sys
from pdkv.cli.demo.fleet import Fleet

async def main():
    async with Fleet() as fleet:
        flags = {"prefill_addresses": "a:1", "decode_addresses": "b:2", "insecure": True}
        node = await fleet.start("router", "r0", flags)
        print(node.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_kernel_ends_them_when_their_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        node = int(parent.stdout.readline())
        parent.kill()
    until_ended([node])
