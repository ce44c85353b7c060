"""`pdkv top` as a process: against services by script, in a pipe and in a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdkv.cli.app import run
from pdkv.node.routing import RouterStatus
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, serving
from tests.waiting import DEADLINE_S


class Naming(FakeRouter):
    """Names nodes, one of which is not there."""

    def __init__(self, prefill: str, decode: str) -> None:
        super().__init__()
        self.named = RouterStatus({prefill: "up", "127.0.0.1:1": "PeerLost: gone"}, {decode: "up"}, 4)

    def status(self) -> RouterStatus:
        return self.named


async def fleet(stack: AsyncExitStack) -> tuple[str, str, str]:
    """Addresses of a router, a decode and a prefill node."""
    decode, _ = await stack.enter_async_context(serving(decode=FakeDecode()))
    prefill, _ = await stack.enter_async_context(serving(prefill=FakePrefill()))
    router, _ = await stack.enter_async_context(serving(router=Naming(prefill.address, decode.address)))
    return router.address, decode.address, prefill.address


async def top(*options: str, **process: Any) -> asyncio.subprocess.Process:
    command = ["-m", "pdkv.cli", "top", "--insecure", *options]
    return await asyncio.create_subprocess_exec(sys.executable, *command, **process)


def test_a_router_is_enough_and_json_has_an_object_a_look() -> None:
    async def body() -> list[dict[str, Any]]:
        pipe = asyncio.subprocess.PIPE
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
            router, _, _ = await fleet(stack)
            process = await top("--router", router, "--json", "--every-s", "0.05", stdout=pipe, stderr=pipe)
            assert process.stdout is not None
            looks = [json.loads(await process.stdout.readline()) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            _, said = await process.communicate()
            assert (process.returncode, said) == (130, b"")
            return looks

    first, second = asyncio.run(body())
    assert [node["role"] for node in first["nodes"]] == ["router", "decode", "prefill", "prefill"]
    assert sorted(node["state"] for node in first["nodes"]) == ["draining", "draining", "no answer", "ready"]
    by_role = {node["role"]: node for node in second["nodes"] if node["name"]}
    assert by_role["decode"]["rates"]["in_main_bytes_per_s"] == 0.0
    assert by_role["router"]["peers"] == {"UP": 2, "DOWN": 1}
    assert first["nodes"][1]["rates"] == {}


def test_in_a_terminal_it_is_drawn_in_place_and_ctrl_c_leaves_it_clean() -> None:
    async def body() -> bytes:
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
            router, _, _ = await fleet(stack)
            ours, theirs = pty.openpty()
            environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
            process = await top(router, "--every-s", "0.05", stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
            os.close(theirs)
            os.set_blocking(ours, False)
            said, more = bytearray(), asyncio.Event()

            def read() -> None:
                try:
                    said.extend(os.read(ours, 1 << 16))
                except OSError:  # the other end is closed
                    asyncio.get_running_loop().remove_reader(ours)
                more.set()

            asyncio.get_running_loop().add_reader(ours, read)
            while said.count(b"no answer") < 2:
                more.clear()
                await more.wait()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            await asyncio.sleep(0)
            read()
            os.close(ours)
            return bytes(said)

    said = asyncio.run(body())
    assert said.count(b"\x1b[?1049h") == said.count(b"\x1b[?1049l") == 1, "the other screen is left"
    assert said.rindex(b"\x1b[?25h") > said.index(b"\x1b[?25l"), "the cursor is back"
    assert b"Traceback" not in said


def test_in_a_pipe_a_look_is_lines_that_do_not_wrap() -> None:
    async def body() -> list[str]:
        pipe = asyncio.subprocess.PIPE
        async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
            router, decode, _ = await fleet(stack)
            process = await top(router, decode, "--once", stdout=pipe, stderr=pipe)
            out, said = await process.communicate()
            assert (process.returncode, said) == (0, b"")
            return out.decode().splitlines()

    head, *lines = asyncio.run(body())
    assert head.split()[:4] == ["node", "role", "state", "pool"]
    assert [line.split()[1] for line in lines[:4]] == ["router", "decode", "prefill", "prefill"]
    assert "\x1b" not in "".join(lines)
    assert any("Connection refused" in line for line in lines[4:]), "why is whole"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "ConfigError: ADDRESS: "),
        (("nowhere",), "ConfigError: ADDRESS: "),
        (("127.0.0.1:1", "--every-s", "0"), "ConfigError: every_s: "),
        (("127.0.0.1:1", "--every-s", "nan"), "ConfigError: every_s: "),
        (("127.0.0.1:1", "--once"), "PeerLost: nobody answers at 127.0.0.1:1"),
    ],
)
def test_what_can_not_be_watched(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["top", *args, "--insecure"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"pdkv: {words}")
