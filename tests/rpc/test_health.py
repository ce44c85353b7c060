"""Waiting for a service: until it says so itself, from before it is there, and not for ever."""

import asyncio
import socket

import grpc
import pytest

from pdkv.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteError
from pdkv.rpc.health import LIVE, READY, state_of, until_serving
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.rpc.fakes import LIMIT_S, FakeRouter, run, serving


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_service_that_serves_is_not_waited_for() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (server, _):
            await until_serving(server.address, PlainText(), within_s=LIMIT_S)

    run(body)


def test_one_that_comes_later_is_found() -> None:
    async def body() -> None:
        address = f"127.0.0.1:{free_port()}"
        waiting = asyncio.create_task(until_serving(address, PlainText(), within_s=LIMIT_S))
        with pytest.raises(DeadlineExceeded, match=r"nothing answered|UNAVAILABLE"):
            await until_serving(address, PlainText(), within_s=0.5)
        assert not waiting.done()
        server = GrpcServer(Endpoint(address), Services(router=FakeRouter()), PlainText())
        await server.start()
        await waiting
        await server.stop(0)

    run(body)


def test_an_open_port_is_not_enough() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (server, _):
            await server.set_serving(serving=False)
            with pytest.raises(DeadlineExceeded, match="within 1 s; it answers NOT_SERVING"):
                await until_serving(server.address, PlainText(), within_s=1)
            waiting = asyncio.create_task(until_serving(server.address, PlainText(), within_s=LIMIT_S))
            await server.set_serving(serving=True)
            await waiting

    run(body)


def test_a_server_that_tells_no_health_is_an_error_at_once() -> None:
    async def body() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(RemoteError, match="UNIMPLEMENTED"):
            await until_serving(f"127.0.0.1:{port}", PlainText(), within_s=LIMIT_S)
        await server.stop(0)

    run(body)


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="address"):
        asyncio.run(until_serving("nowhere", PlainText(), within_s=1))


def test_a_process_that_is_not_ready_is_alive_until_it_ends() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (server, _):
            await server.set_serving(serving=False)
            asked = [state_of(server.address, PlainText(), service=s, within_s=LIMIT_S) for s in (READY, LIVE)]
            assert await asyncio.gather(*asked) == ["NOT_SERVING", "SERVING"]
        with pytest.raises(PeerLost):
            await state_of(server.address, PlainText(), service=LIVE, within_s=LIMIT_S)

    run(body)


def test_a_service_that_is_not_there_has_no_state() -> None:
    async def body() -> None:
        async with serving(router=FakeRouter()) as (server, _):
            with pytest.raises(RemoteError, match="NOT_FOUND"):
                await state_of(server.address, PlainText(), service="pdkv.v1.Prefill", within_s=LIMIT_S)

    run(body)
