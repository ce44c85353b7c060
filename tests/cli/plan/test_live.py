"""Numbers of nodes behind a real server: by script, and two nodes that really ship pages."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.cli.app import run
from pdkv.cli.plan.live import observe, of_status
from pdkv.errors import ConfigError, PeerLost, ProtocolError
from pdkv.node.messages import GenerateDone, Shipment, Token
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.node.toy import make_pair
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, FakePrefill, FakeRouter, Stream, serving

SHIPMENT = Shipment(prompt_tokens=2048, pages_total=32, pages_hit=30, pages_shipped=2, prefill_s=0.25, ttft_s=0.5)
EVENTS = [*(Token(i, 7, -0.5) for i in range(17)), GenerateDone("length", 17, SHIPMENT)]


def observed(probe: int | None = None, **services: Any) -> Any:
    async def body() -> Any:
        async with serving(**services) as (server, _), asyncio.timeout(30.0):
            return (await observe(server.address, probe, PlainText())).seen

    return asyncio.run(body())


@pytest.mark.parametrize("service", [{"decode": FakeDecode()}, {"prefill": FakePrefill()}])
def test_either_kind_of_node_is_asked_for_its_status(service: dict[str, Any]) -> None:
    status = samples.status("decode")
    seen = observed(**service)
    assert seen == of_status(status)
    assert seen["pool"]["usable_pages"] == status.pages["total"]
    assert seen["pool"]["page_bytes"] == sum(size for _, size in status.contract.segments)
    assert seen["refused"]["free_pages"] == status.pages["free"]


def test_locked_pages_count_where_a_node_tells_them() -> None:
    status = samples.status("decode")
    assert "locked_pages" not in of_status(status)["refused"]
    telling = replace(status, pages={**status.pages, "locked": 3})
    assert of_status(telling)["refused"]["locked_pages"] == 3


def test_a_probe_times_a_hit_and_a_step() -> None:
    stream = Stream(*EVENTS)
    seen = observed(2048, decode=FakeDecode(stream))
    status = samples.status("decode")
    assert seen["ttft"]["hit_tokens"] == 30 * status.contract.page_tokens
    assert (seen["ttft"]["ttft_s"], seen["ttft"]["prefill_s"], seen["ttft"]["shipped_pages"]) == (0.5, 0.25, 2)
    assert (seen["step"]["context_tokens"], seen["step"]["short_context_tokens"]) == (2048, 256)
    assert seen["step"]["step_s"] > 0
    assert len(stream.opened) == 5
    assert len(stream.request.tokens) == 256
    assert np.all(stream.request.tokens < status.contract.vocab_size)


@pytest.mark.parametrize(
    ("probe", "services", "error"),
    [
        (100, {"decode": FakeDecode()}, ConfigError),
        (2048, {"decode": FakeDecode(Stream(EVENTS[0], EVENTS[-1]))}, ProtocolError),
        (None, {"router": FakeRouter()}, ConfigError),
    ],
)
def test_what_can_not_be_asked(probe: int | None, services: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        observed(probe, **services)


def test_nobody_there() -> None:
    with pytest.raises(PeerLost):
        asyncio.run(observe("127.0.0.1:1", None, PlainText()))


def served_pair(command: Callable[[str], Any]) -> Any:
    """`command` with the address of a decode node that has a prefill node beside it."""

    async def body() -> Any:
        pair = make_pair(pages=160)
        server = GrpcServer(Endpoint("127.0.0.1:0"), Services(decode=pair.decode), PlainText())
        await server.start()
        try:
            async with asyncio.timeout(60.0):
                return await asyncio.to_thread(command, server.address)
        finally:
            await server.stop(0)
            pair.close()

    return asyncio.run(body())


def test_four_complaints_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    def command(address: str) -> object:
        # the node knows its model; how long a request is to be asked about it doesn't
        args = ("--node", address, "--insecure", "--context", "16384", "--probe", "1024")
        with pytest.raises(SystemExit) as ended:
            run(["plan", *args, "--given", "memory_bytes_per_s=1e10", "--json"])
        return ended.value.code

    assert served_pair(command) in (0, 3)
    made = json.loads(capsys.readouterr().out)
    pool, refused, ttft, step = (finding["numbers"] for finding in made["findings"])
    assert made["unanswered"] == {}
    assert pool["usable_pages"] == pool["expected_pages"] == 159
    # 16,384 tokens and 256 more are 260 pages
    assert (refused["needed_pages"], refused["total_pages"]) == (260, 159)
    assert "it can never fit: 101 pages short" in made["findings"][1]["finding"]
    assert ttft["hit_tokens"] == 1024
    assert step["context_tokens"] == 1024
