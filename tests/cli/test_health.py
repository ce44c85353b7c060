"""`pdkv health`, against services in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.cli.app import run
from pdkv.config import host_name
from pdkv.rpc.security import MutualTls, PlainText, Security
from tests.rpc.tls import CA, Files, served


def asked(*args: str, serving: bool = True, security: Security | None = None) -> int | str | None:
    """Exit code; `{address}` and `{port}` in the arguments are the service's."""

    async def body() -> int | str | None:
        async with served(security or PlainText()) as server, asyncio.timeout(60):
            await server.set_serving(serving=serving)
            facts = {"address": server.address, "port": server.address.rpartition(":")[2]}
            return await asyncio.to_thread(exit_code, *(arg.format(**facts) for arg in args))

    return asyncio.run(body())


def exit_code(*args: str) -> int | str | None:
    try:
        run(args)
    except SystemExit as ended:
        return ended.code
    raise AssertionError("a command ends by SystemExit")


def keys(files: MutualTls) -> list[str]:
    return [f"--tls-{name}={getattr(files, name)}" for name in ("ca", "certificate", "key")]


@pytest.mark.parametrize(
    ("serving", "more", "code"),
    [(True, [], 0), (True, ["--live"], 0), (False, [], 1), (False, ["--live"], 0)],
)
def test_ready_and_alive_are_different_things(
    serving: bool, more: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("health", "{address}", "--insecure", *more, serving=serving) == code
    assert ("NOT_SERVING" in capsys.readouterr().err) is (code == 1)


def test_who_does_not_answer_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("health", "127.0.0.1:1", "--insecure", "--within", "0.5") == 1
    assert "PeerLost" in capsys.readouterr().err


def test_so_is_whoever_is_asked_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("health", "127.0.0.1:1") == 1
    assert "insecure" in capsys.readouterr().err


def test_without_an_address_it_is_the_service_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with served(PlainText()) as server, asyncio.timeout(60):
            monkeypatch.setenv("PDKV_BIND", f"0.0.0.0:{server.port}")
            assert await asyncio.to_thread(exit_code, "health", "--insecure") == 0
            monkeypatch.setenv("PDKV_BIND", "0.0.0.0:1")
            assert await asyncio.to_thread(exit_code, "health", "--insecure", "--within", "0.5") == 1

    asyncio.run(body())


@pytest.mark.parametrize(("named", "code"), [(host_name(), 0), ("another", 1)])
def test_its_certificate_names_this_node_and_not_localhost(
    named: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDKV_NODE_ID", raising=False)
    certified = CA.files(tmp_path / "certified", named)

    async def body() -> int | str | None:
        async with served(certified) as server, asyncio.timeout(60):
            monkeypatch.setenv("PDKV_BIND", f"0.0.0.0:{server.port}")
            return await asyncio.to_thread(exit_code, "health", *keys(Files(tmp_path).client))

    assert asyncio.run(body()) == code


def test_it_is_cheap() -> None:
    """A probe runs it every few seconds, beside a node that has better things to do."""
    heavy = "{'torch', 'nixl', 'transformers', 'zmq'}"
    words = f"import sys; from pdkv.cli import app; import pdkv.rpc.health; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
