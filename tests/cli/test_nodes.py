"""The serving commands as processes. The router stands for all here, as it loads no model; tests/e2e has the others."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdkv.cli.app import run
from pdkv.cli.demo.fleet import Fleet
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from tests.waiting import until

ADDRESSES = {"prefill_addresses": "127.0.0.1:1", "decode_addresses": "127.0.0.1:2,127.0.0.1:3"}


def test_a_router_is_not_ready_before_its_nodes_are_and_ends_well_when_told() -> None:
    async def body() -> None:
        async with Fleet() as fleet, asyncio.timeout(60):
            node = await fleet.start("router", "r0", {**ADDRESSES, "insecure": True})
            async with grpc.aio.insecure_channel(node.address) as channel:
                for service in ("", "pdkv.v1.Router"):
                    watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
                    async for reply in watched:
                        if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                            break
            directory = GrpcDirectory(PlainText())
            asked = directory.router(node.address).status
            status = await until(asked, lambda s: "up" not in {**s.prefill, **s.decode}.values(), "nobody is there")
            assert sorted([*status.prefill, *status.decode]) == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
            assert all("Connection refused" in why for why in status.decode.values())
            await directory.close()
            os.kill(node.pid, signal.SIGTERM)
            assert await node.wait() == 0
            lines = node.log.read_text().splitlines()
            lines = [line for line in lines if "pdkv.router" not in line]
            assert [line.split(": ")[1].split()[0] for line in lines] == ["plain", "serving", "not", "told", "ended"], (
                lines
            )
            assert "no prefill and no decode node is up" in lines[2]
            assert f"role=router name=r0 address={node.address}" in lines[1]

    asyncio.run(body())


@pytest.mark.parametrize("by_operator", [False, True])
def test_a_router_that_ends_serves_what_had_come(*, by_operator: bool) -> None:
    """Here a request whose body is on its way; it learns that there are no nodes, and not that the router ends."""

    async def body() -> None:
        async with Fleet() as fleet, asyncio.timeout(60):
            node = await fleet.start("router", "r0", {**ADDRESSES, "insecure": True, "http_bind": "127.0.0.1:0"})
            host, _, port = node.http.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            said = b'{"model": "pdkv", "prompt": [1]}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {len(said)}"
            writer.write(f"{head}\r\n\r\n".encode())
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n"), "it has begun"
            directory = GrpcDirectory(PlainText())
            if by_operator:
                ending = asyncio.create_task(directory.admin(node.address).drain(end=True, wait_s=30))
            else:
                ending = asyncio.create_task(node.wait())
                node.signal(signal.SIGTERM)
            await until(lambda: asyncio.to_thread(node.log.read_text), lambda log: "told to end" in log, "it drains")
            writer.write(said)
            answer = await reader.read()
            assert b'"code": "PeerLost"' in answer
            assert b"\r\nConnection: close\r\n" in answer
            await ending
            assert await node.wait() == 0
            writer.close()
            await directory.close()

    asyncio.run(body())


def test_a_router_that_an_operator_ends_answers_that_call_though_it_hangs_up() -> None:
    async def body() -> None:
        async with Fleet() as fleet, asyncio.timeout(60):
            node = await fleet.start("router", "r0", {**ADDRESSES, "insecure": True})
            directory = GrpcDirectory(PlainText())
            await directory.admin(node.address).drain(end=True, wait_s=30)
            assert await node.wait() == 0
            await directory.close()

    asyncio.run(body())


def test_an_interrupt_ends_it_as_well() -> None:
    command = [sys.executable, "-m", "pdkv.cli", "router", "--insecure", "--json"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ADDRESSES.items()]
    with subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert '"role": "router"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run(args)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_plain_text_must_be_asked_for_by_name(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    addresses = [f"--{name.replace('_', '-')}={value}" for name, value in ADDRESSES.items()]
    nodes = ["--backend", "loopback", "--pool-pages", "4", "--threads", "1"]
    error = refused(capsys, role, *(addresses if role == "router" else nodes))
    assert error.splitlines()[-1].startswith("pdkv: ConfigError: insecure: not given")


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in ADDRESSES.items()]
        error = refused(capsys, "router", *flags, "--insecure", "--bind", address)
    assert f"pdkv: ConfigError: bind: '{address}' can't be used" in error


def test_one_address_twice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--prefill-addresses", "a:1,a:1", "--decode-addresses", "b:2", "--insecure"]
    assert "pdkv: ConfigError: prefill addresses: " in refused(capsys, "router", *twice)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_help_teaches(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([role, "--help"])
    assert ended.value.code == 0
    assert f"pdkv {role} --" in capsys.readouterr().out
