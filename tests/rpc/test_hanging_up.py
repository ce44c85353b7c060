"""Clients of a server that goes, or that ends connections by their age."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import grpc
import pytest

from pdkv.errors import PeerLost
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest
from pdkv.node.ranks import Joining
from pdkv.node.routing import RouterStatus
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.convert import generate
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.v1 import common_pb2, rank_pb2_grpc, router_pb2_grpc
from tests.rpc import samples
from tests.rpc.fakes import LIMIT_S, FakeDecode, FakeRouter, run, serving
from tests.rpc.tls import dialling, served

AGE_S = 0.2


class Named(FakeRouter):
    """A router that says who it is, and holds its stream until it may go on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.may_end = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        yield samples.TOKEN
        await self.may_end.wait()
        yield samples.GENERATE_DONE

    def status(self) -> RouterStatus:  # type: ignore[override]
        return RouterStatus({}, {}, self.number)


def test_who_keeps_a_connection_goes_to_another_router_at_once_and_running_calls_end_well() -> None:
    async def body() -> None:
        routers = [Named(1), Named(2)]
        async with (
            served(PlainText(), Services(router=routers[0])) as first,
            served(PlainText(), Services(router=routers[1])) as second,
            grpc.aio.insecure_channel(f"ipv4:{first.address},{second.address}") as channel,
        ):
            stub = router_pb2_grpc.RouterStub(channel)

            async def number() -> int:
                return int((await stub.Status(common_pb2.StatusRequest(), timeout=LIMIT_S)).requests)

            serving = {1: first, 2: second}[was := await number()]
            call = stub.Generate(generate.generate_request_to_pb(samples.generate_request()))
            events = aiter(call)
            await anext(events)
            serving.hang_up()
            while await _or_refused(number()) == was:
                pass
            assert await number() == 3 - was
            with pytest.raises(PeerLost):
                async with dialling(PlainText()) as directory:
                    await directory.router(serving.address).status()
            routers[was - 1].may_end.set()
            left = [generate.generate_event_from_pb(reply) async for reply in events]
            assert [type(event) for event in left] == [GenerateDone]
            await serving.stop(LIMIT_S)

    run(body)


async def _or_refused(status: Awaitable[int]) -> int:
    """A call that comes while the server hangs up is answered by nobody."""
    try:
        return await status
    except grpc.aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
            raise
        return 0


@asynccontextmanager
async def counted(server: GrpcServer) -> AsyncIterator[tuple[str, list[int]]]:
    """Before the server, somebody who counts connections: its address, and a list that grows."""
    host, _, port = server.address.rpartition(":")
    made: list[int] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(1)
        back, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there), pump(back, writer), return_exceptions=True)

    between = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield "127.0.0.1:" + str(between.sockets[0].getsockname()[1]), made
    finally:
        between.close()


def test_a_connection_ends_by_its_age_and_no_call_to_a_router_is_lost() -> None:
    """gRPC makes those again that no server has seen; ours have no retries otherwise."""

    async def body() -> None:
        async with (
            served(PlainText(), Services(router=FakeRouter()), Gate(connection_age_s=AGE_S)) as server,
            counted(server) as (address, made),
            dialling(PlainText()) as directory,
        ):
            clients = [asyncio.create_task(_asks(directory, address, made)) for _ in range(4)]
            await asyncio.gather(*clients)

    run(body)


async def _asks(directory: GrpcDirectory, address: str, made: list[int]) -> None:
    while len(made) < 5:
        assert (await directory.router(address).status()).requests == 4


def test_without_an_age_a_connection_stays() -> None:
    """The count counts: the same calls over one connection."""

    async def body() -> None:
        async with (
            served(PlainText(), Services(router=FakeRouter())) as server,
            counted(server) as (address, made),
            dialling(PlainText()) as directory,
        ):
            for _ in range(200):
                await directory.router(address).status()
            assert len(made) == 1

    run(body)


def test_calls_that_a_server_throws_away_as_it_ends_are_of_a_lost_peer() -> None:
    """gRPC cancels what has come and was not begun: nobody has asked for that, and another node may serve it."""

    async def thrown_away() -> int:
        """Of many calls that come while a server ends, which is when it has answered one of them."""
        async with serving(None, FakeDecode()) as (server, directory):
            peer = directory.decode(server.address)
            calls = [asyncio.create_task(peer.status()) for _ in range(100)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await server.stop(0)
            errors = [e for e in await asyncio.gather(*calls, return_exceptions=True) if isinstance(e, BaseException)]
            assert {type(error) for error in errors} <= {PeerLost}
            return sum(error.fields["code"] == "CANCELLED" for error in errors)

    async def body() -> None:
        while not await thrown_away():
            pass

    run(body)


def test_what_a_server_cancelled_is_not_asked_of_it_again() -> None:
    """Only where nobody was reached yet is somebody waited for."""

    class Ending(rank_pb2_grpc.RankServicer):
        asked = 0

        async def Join(self, request: object, context: grpc.aio.ServicerContext[object, object]) -> None:
            self.asked += 1
            await context.abort(grpc.StatusCode.CANCELLED)

    async def body() -> None:
        server, servicer = grpc.aio.server(), Ending()
        rank_pb2_grpc.add_RankServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with dialling(PlainText()) as directory:
            with pytest.raises(PeerLost, match="CANCELLED"):
                await directory.rank(f"127.0.0.1:{port}").join(Joining(samples.D, samples.contract(), 16))
        assert servicer.asked == 1
        await server.stop(0)

    run(body)
