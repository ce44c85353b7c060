"""The server against other clients than ours: health, reflection, sizes, garbage, newer versions."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdkv.errors import BoundsError, ConfigError, ContractMismatch
from pdkv.rpc.convert.checks import MAX_MESSAGE_BYTES
from pdkv.rpc.convert.prefill import prefill_event_from_pb, prefill_request_to_pb
from pdkv.rpc.errors import error_from
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from pdkv.v1 import prefill_pb2, prefill_pb2_grpc
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, Stream, collect, failure, run, serving, soon

PREFILL_METHODS = ("Connect", "Prefill", "RenewLease", "ReleaseLease", "Status")
METHODS = [("Prefill", m) for m in PREFILL_METHODS]
METHODS += [(service, m) for service in ("Decode", "Router") for m in ("Generate", "Status")]


@asynccontextmanager
async def raw(server: GrpcServer, *options: tuple[str, Any]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with none of our clients' manners."""
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        yield channel


async def send(channel: grpc.aio.Channel, service: str, method: str, payload: bytes) -> grpc.StatusCode:
    """The status that a call with these bytes ends with."""
    path = f"/pdkv.v1.{service}/{method}"
    try:
        if method in ("Prefill", "Generate"):
            async for _ in channel.unary_stream(path)(payload, timeout=10):
                pass
        else:
            await channel.unary_unary(path)(payload, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_garbage_ends_its_call_and_never_the_server() -> None:
    async def body() -> None:
        dice = random.Random(1)
        node = FakePrefill(Stream(samples.ACCEPTED))
        async with serving(node, FakeDecode(), FakeRouter()) as (server, directory), raw(server) as channel:
            for service, method in METHODS:
                payloads = [b"", b"\xff" * 9, *(dice.randbytes(dice.randrange(1, 200)) for _ in range(40))]
                codes = await asyncio.gather(*(send(channel, service, method, p) for p in payloads))
                named = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}
                if method == "Connect":
                    named |= {grpc.StatusCode.FAILED_PRECONDITION}
                if method == "Status":
                    named |= {grpc.StatusCode.OK}
                assert set(codes) <= named, (service, method, set(codes))
                assert codes[1] == grpc.StatusCode.INVALID_ARGUMENT
            assert not node.calls or node.calls == [None] * len(node.calls)
            assert await collect(directory.peer(server.address).prefill(samples.prefill_request())) == [
                samples.ACCEPTED
            ]

    run(body)


def test_damaged_requests_end_their_call_and_never_the_server() -> None:
    """Real requests with bytes flipped, so that more than the parser is reached."""

    async def body() -> None:
        dice = random.Random(2)
        whole = prefill_request_to_pb(samples.prefill_request(64)).SerializeToString()
        payloads = []
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
            payloads.append(bytes(damaged))
        async with serving(FakePrefill(Stream(samples.ACCEPTED))) as (server, _), raw(server) as channel:
            codes = {await send(channel, "Prefill", "Prefill", p) for p in payloads}
            assert grpc.StatusCode.OK in codes
            assert codes <= {
                grpc.StatusCode.OK,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.OUT_OF_RANGE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }

    run(body)


def test_a_newer_major_is_refused_with_both_versions() -> None:
    async def body() -> None:
        async with serving(FakePrefill()) as (server, _), raw(server) as channel:
            newer = prefill_pb2.Introduction(protocol_major=2, content_fingerprint=b"x", body=b"\xff of version 2")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await prefill_pb2_grpc.PrefillStub(channel).Connect(newer, timeout=10)
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            error = error_from(caught.value, address="", what="")
            assert isinstance(error, ContractMismatch)
            assert [(d.field, d.mine, d.theirs) for d in error.differences] == [("protocol_major", "1", "2")]

    run(body)


def test_a_prompt_of_a_million_tokens_and_its_pages_fit() -> None:
    async def body() -> None:
        events = [samples.ACCEPTED, samples.pages(16384)]
        node = FakePrefill(Stream(*events))
        async with serving(node) as (server, directory):
            request = samples.prefill_request(1 << 20)
            got = await collect(directory.peer(server.address).prefill(request))
            assert np.array_equal(node.stream.request.tokens, request.tokens)
            assert samples.same(got[1], events[1])

    run(body)


def test_a_message_over_the_limit_ends_its_call_by_name() -> None:
    """From a client that doesn't look at sizes, gRPC itself refuses; from our own server, a named error."""

    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED))
        free = ("grpc.max_send_message_length", -1)
        async with serving(node) as (server, directory), raw(server, free) as channel:
            code = await send(channel, "Prefill", "Prefill", bytes(MAX_MESSAGE_BYTES + 1))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            peer = directory.peer(server.address)
            node.stream = Stream(samples.ACCEPTED, samples.pages(1_200_000))
            seen, error = await failure(peer.prefill(samples.prefill_request()))
            assert seen == [samples.ACCEPTED]
            assert isinstance(error, BoundsError)
            assert str(error).startswith("PrefillEvent, bytes of the message")
            await soon(node.stream.ended)

    run(body)


def test_health_says_what_it_was_told() -> None:
    async def body() -> None:
        async with serving(FakePrefill(), FakeDecode()) as (server, _), raw(server) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def state(service: str) -> str:
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

            names = ("", "pdkv.v1.Prefill", "pdkv.v1.Decode")
            assert [await state(name) for name in names] == ["SERVING"] * 3
            await server.set_serving(serving=False)
            assert [await state(name) for name in names] == ["NOT_SERVING"] * 3
            await server.set_serving(serving=True)
            assert await state("pdkv.v1.Decode") == "SERVING"

    run(body)


def test_reflection_lists_the_services() -> None:
    async def body() -> None:
        async with serving(FakePrefill(), None, FakeRouter()) as (server, _), raw(server) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            async for reply in stub.ServerReflectionInfo(iter([ask]), timeout=10):
                names = {service.name for service in reply.list_services_response.service}
                assert names >= {"pdkv.v1.Prefill", "pdkv.v1.Router", "grpc.health.v1.Health"}
                assert "pdkv.v1.Decode" not in names
                break

    run(body)


def test_remaining_time_bounds_a_stream_whose_client_set_no_deadline() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, _), raw(server) as channel:
            request = prefill_request_to_pb(samples.prefill_request(remaining_s=0.2))
            call: Any = prefill_pb2_grpc.PrefillStub(channel).Prefill(request)
            assert prefill_event_from_pb(await call.read()) == samples.ACCEPTED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert str(error_from(caught.value, address="", what="")) == "Prefill did not end within 1.2 s"
            await soon(node.stream.ended)

    run(body)


def test_a_client_that_goes_away_ends_the_stream() -> None:
    async def body() -> None:
        node = FakePrefill(Stream(samples.ACCEPTED, hangs=True))
        async with serving(node) as (server, _):
            async with raw(server) as channel:
                call: Any = prefill_pb2_grpc.PrefillStub(channel).Prefill(
                    prefill_request_to_pb(samples.prefill_request())
                )
                await call.read()
            await soon(node.stream.ended)
            assert node.stream.end in ("CancelledError", "GeneratorExit")

    run(body)


def test_a_wildcard_is_never_advertised() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match="advertise"):
            GrpcServer(Endpoint("0.0.0.0:0"), Services(), PlainText())

    run(body)
