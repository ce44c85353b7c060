"""`pdkv status` of each of our services, by script: all that is said is shown, and what isn't there is named."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from pdkv.cli.app import run
from pdkv.cli.status import EXPLAINED, status_object, status_text
from pdkv.node.messages import NodeStatus
from pdkv.node.routing import RouterStatus
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, serving

SERVICES: dict[str, Any] = {"decode": FakeDecode(), "prefill": FakePrefill(), "router": FakeRouter()}


def exit_code(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(args)
    return ended.value.code


def asked(role: str, *args: str) -> int | str | None:
    """The command in a thread of its own, the service in this one's loop."""

    async def body() -> int | str | None:
        async with serving(**{role: SERVICES[role]}) as (server, _), asyncio.timeout(30.0):
            return await asyncio.to_thread(exit_code, "status", server.address, "--insecure", *args)

    return asyncio.run(body())


def shown(status: NodeStatus | RouterStatus) -> str:
    from rich.console import Console

    console = Console(width=400, highlight=False)
    with console.capture() as captured:
        for part in status_text(status, "here:1"):
            console.print(part, markup=False)
    return captured.get()


@pytest.mark.parametrize("role", SERVICES)
def test_whatever_is_there_is_asked(
    role: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # nothing is cut off where it is narrow
    assert asked(role) == 0
    out = capsys.readouterr().out
    assert out.startswith(role)
    assert "…" not in out
    status = SERVICES[role].status()
    if isinstance(status, NodeStatus):
        assert status.contract.content_fingerprint.hex() in out
        assert status.contract.fingerprint.hex() in out


@pytest.mark.parametrize("role", SERVICES)
def test_one_json_object_with_all_that_was_said(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(role, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    status = SERVICES[role].status()
    assert set(made) == {field.name for field in fields(status)}
    assert made == json.loads(json.dumps(status_object(status)))


def test_every_number_and_word_of_a_node_is_shown() -> None:
    status = replace(samples.status("decode", samples.D), leases=0)
    out = shown(status)
    lines = [line.split() for line in out.splitlines()]
    for state, count in status.pages.items():
        assert [state, str(count)] in lines
    assert ["requests", str(status.requests)] in lines
    assert ["leases", "0"] in lines
    assert ["queued", str(status.queued)] in lines
    assert ["preemptions", str(status.preemptions)] in lines
    assert str(status.name) in lines[0]
    for reservation, why in status.quarantine.items():
        assert f"{reservation}  {why}" in out
    for name, peer in status.peers.items():
        assert any(line[:1] == [name] and {peer.state, peer.lane} <= set(line) for line in lines)


def test_fields_that_this_command_has_no_name_for_are_shown_too() -> None:
    @dataclass(frozen=True)
    class Rotation:
        ended: bool
        took_s: float

    @dataclass(frozen=True)
    class Later:
        """As a node of a later version would say it."""

        role: str
        agents: int
        why_not: str
        rotations: dict[str, Rotation]
        empty: dict[str, str]

    made = shown(Later("decode", 7_000, "[bold]", {"p0": Rotation(True, 0.25)}, {}))  # type: ignore[arg-type]
    assert made.splitlines()[0] == "decode at here:1"
    words = [line.split() for line in made.splitlines()]
    assert ["agents", "7,000"] in words
    assert ["why", "not", "[bold]"] in words
    assert ["ended", "took", "s"] in words
    assert ["p0", "yes", "0.25"] in words
    assert "empty" not in made


def test_words_of_a_peer_are_no_commands_to_the_terminal() -> None:
    status = replace(samples.status("decode"), quarantine={"7": "\x1b[2J gone"})
    assert "\x1b" not in shown(status)
    assert r"\x1b[2J gone" in shown(status)


def test_it_is_asked_again_and_a_node_that_went_may_come_back() -> None:
    async def body() -> None:
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(router=FakeRouter()), PlainText())
        await server.start()
        command = ["-m", "pdkv.cli", "status", server.address, "--insecure", "--json", "--watch", "0.05"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(60.0):
            await until_line(process.stdout.readline, "prefill")
            await server.stop(0)
            await until_line(process.stderr.readline, "PeerLost")
            again = GrpcServer(Endpoint(server.address), Services(router=Busier()), PlainText())
            await again.start()
            await until_line(process.stdout.readline, '"requests": 77')
            process.send_signal(signal.SIGINT)
            await process.communicate()
            await again.stop(0)
        assert process.returncode == 130

    asyncio.run(body())


class Busier(FakeRouter):
    def status(self) -> RouterStatus:
        return replace(super().status(), requests=77)


async def until_line(read: Callable[[], Awaitable[bytes]], word: str) -> None:
    while word not in (line := (await read()).decode()):
        assert line, f"ended before {word}"


def test_what_is_none_of_ours_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> int | str | None:
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(), PlainText())
        await server.start()
        try:
            return await asyncio.to_thread(exit_code, "status", server.address, "--insecure")
        finally:
            await server.stop(0)

    assert asyncio.run(body()) == 2
    assert capsys.readouterr().err.startswith("pdkv: ConfigError: address: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("127.0.0.1:1", "--insecure"), "PeerLost: Status at 127.0.0.1:1"),
        (("nowhere", "--insecure"), "ConfigError: address: "),
        (("127.0.0.1:1",), "ConfigError: insecure: "),
        (("127.0.0.1:1", "--insecure", "--watch", "0"), "ConfigError: watch: "),
        (("127.0.0.1:1", "--insecure", "--watch", "nan"), "ConfigError: watch: "),
    ],
)
def test_what_can_not_be_asked(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("status", *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pdkv: {words}")


def test_tables_whose_name_says_too_little_are_explained() -> None:
    out = shown(samples.status("decode"))
    (line,) = (line for line in out.splitlines() if line.startswith("claims"))
    assert "pages that requests which have started will need, and have" in line
    assert set(EXPLAINED) <= {field.name for field in fields(NodeStatus)}
