"""A prefill process, a decode process and a router, over real NIXL and gRPC: what a client sees."""

import json
import socket
import subprocess
import sys
from dataclasses import replace

import grpc
import pytest

from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.generate import _shown
from pdkv.errors import BoundsError, ConfigError, NeverFits, PdkvError, ProtocolError, RemoteError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.node.messages import Sampling
from pdkv.rpc.convert.checks import MAX_MESSAGE_BYTES
from tests.e2e.world import GREEDY, World, at_rest
from tests.waiting import until

FMT = page_format(model_shape(load_config("tiny")))


def test_tokens_and_logits_equal_one_process(world: World) -> None:
    async def body() -> None:
        for seed, length, sampling in ((1, 1100, GREEDY), (2, 640, Sampling(8, temperature=0.8, top_p=0.95, seed=5))):
            request = world.request(seed, length, sampling=sampling)
            answer, alone = await world.ask(request), await world.alone(request.tokens, sampling)
            assert tuple(answer.tokens) == alone.tokens
            assert tuple(answer.logits_digests) == alone.logits_digests
            assert answer.whole.chunk_starts == alone.chunk_starts
            shipment = answer.whole.shipment
            assert (shipment.pages_hit, shipment.pages_shipped) == (0, -(-length // 64))
            assert shipment.bytes_main == shipment.pages_shipped * FMT.main_bytes
            assert shipment.bytes_index == shipment.pages_shipped * FMT.index_bytes
            assert shipment.bytes_backend == shipment.bytes_main + shipment.bytes_index
            assert shipment.digests_verified == shipment.pages_shipped

    world.run(body())


def test_a_second_request_ships_only_what_is_missing(world: World) -> None:
    async def body() -> None:
        first = world.request(3, 700)
        await world.ask(first)
        again = await world.ask(replace(world.request(3, 700), sampling=GREEDY))
        assert (again.whole.shipment.pages_hit, again.whole.shipment.pages_shipped) == (10, 1)
        assert tuple(again.tokens) == (await world.alone(first.tokens)).tokens
        tenant = replace(world.request(3, 700).namespace, cache_salt="another")
        other = await world.ask(world.request(3, 700, namespace=tenant))
        assert (other.whole.shipment.pages_hit, other.tokens) == (0, again.tokens)

    world.run(body())


def test_everything_is_given_back(world: World) -> None:
    async def body() -> None:
        await world.ask(world.request(4, 300))
        for status in (world.decode_status, world.prefill_status):
            assert (await until(status, at_rest, "both nodes at rest")).pages["cached"] >= 4

    world.run(body())


def test_status_says_who_is_connected_over_what(world: World) -> None:
    async def body() -> None:
        await world.ask(world.request(5, 100))
        decode, prefill = await world.decode_status(), await world.prefill_status()
        assert (decode.role, decode.name.node, prefill.role, prefill.name.node) == ("decode", "d0", "prefill", "p0")
        assert decode.backend == prefill.backend == "nixl UCX"
        for mine, theirs in ((decode, prefill), (prefill, decode)):
            seen = mine.peers[str(theirs.name)]
            assert seen.state == "READY"
            assert seen.lane not in ("", "unknown")
            assert mine.contract == replace(theirs.contract, host=mine.contract.host)
            assert sum(count for name, count in mine.pages.items() if name != "total") == mine.pages["total"]
        router = await world.nodes.router(world.router.address).status()
        assert (router.prefill, router.decode) == ({world.prefill.address: "up"}, {world.decode.address: "up"})

    world.run(body())


def test_the_router_answers_as_the_decode_node_does(world: World) -> None:
    async def body() -> None:
        request = world.request(6, 200)
        answer = await world.ask(replace(request, prefill_address=""), world.router)
        assert tuple(answer.tokens) == (await world.alone(request.tokens)).tokens
        with pytest.raises(ProtocolError, match="prefill_address is the router's to set"):
            await world.ask(request, world.router)

    world.run(body())


def generate(world: World, role: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command as its own process."""
    address = getattr(world, role).address
    command = [sys.executable, "-m", "pdkv.cli", "generate", *args, "--insecure", f"--{role}", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_line_client(world: World) -> None:
    tokens = text_tokens(9007, 150)
    text = tokens.astype("u1").tobytes().decode()
    alone = world.run(world.alone(tokens, Sampling(6)))
    made = generate(world, "decode", text, "--json", "--max-tokens", "6")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert tuple(found["tokens"]) == alone.tokens
    assert (found["pages_hit"], found["pages_shipped"], found["digests_verified"]) == (0, 3, 3)
    shown = generate(world, "router", text, "--max-tokens", "6")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "".join(_shown(token) for token in alone.tokens)
    assert "6 tokens (length); prompt 150 tokens in 3 pages: 2 hit, 1 shipped" in shown.stderr


def test_the_command_line_client_is_told_what_is_wrong(world: World) -> None:
    done = generate(world, "decode", "a prompt", "--max-tokens", str(1 << 20))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pdkv: NeverFits: ")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"fault": "drop-index"}, ConfigError),
        ({"sampling": Sampling(max_tokens=1 << 20)}, NeverFits),
        ({"sampling": Sampling(temperature=-1.0)}, BoundsError),
        ({"remaining_s": 1e9}, BoundsError),
        ({"prefill_address": "unix:/tmp/x"}, ProtocolError),
    ],
)
def test_what_is_wrong_is_named_and_holds_nothing(
    world: World, change: dict[str, object], error: type[PdkvError]
) -> None:
    async def body() -> None:
        with pytest.raises(error):
            await world.ask(replace(world.request(8, 100), **change))  # type: ignore[arg-type]
        await until(world.decode_status, at_rest, "decode at rest")

    world.run(body())


def test_bytes_that_mean_nothing_end_only_their_call(world: World) -> None:
    """Garbage, and more than a message may have, to real nodes; then all is as before."""
    options = [("grpc.max_send_message_length", -1)]
    calls = (
        (world.decode, "/pdkv.v1.Decode/Generate"),
        (world.decode, "/pdkv.v1.Decode/Status"),
        (world.prefill, "/pdkv.v1.Prefill/Connect"),
        (world.prefill, "/pdkv.v1.Prefill/Prefill"),
        (world.prefill, "/pdkv.v1.Prefill/RenewLease"),
    )

    async def body() -> None:
        before = (await world.prefill_status()).name, (await world.decode_status()).name
        for node, method in calls:
            async with grpc.aio.insecure_channel(node.address, options=options) as channel:
                codes = []
                for raw in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", bytes(MAX_MESSAGE_BYTES + 1)):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(method)(raw, timeout=30)
                    codes.append(refused.value.code().name)
                assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"], method
        for node in (world.decode, world.prefill, world.router):
            host, port = node.address.split(":")
            with socket.create_connection((host, int(port))) as raw_socket:
                raw_socket.sendall(bytes(range(256)) * 64)
        request = world.request(9, 200)
        assert tuple((await world.ask(request)).tokens) == (await world.alone(request.tokens)).tokens
        assert ((await world.prefill_status()).name, (await world.decode_status()).name) == before

    world.run(body())


def test_a_service_that_is_not_there(world: World) -> None:
    async def body() -> None:
        with pytest.raises(RemoteError, match="UNIMPLEMENTED"):
            await world.nodes.peer(world.decode.address).status()

    world.run(body())
