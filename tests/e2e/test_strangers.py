"""Nodes that must not be paired, or not over this lane: refused by name, and nothing is harmed."""

import asyncio
import os
import signal
from collections.abc import Awaitable

import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import ContractMismatch, PeerLost
from pdkv.node.messages import NodeStatus
from tests.e2e.world import World, at_rest
from tests.waiting import until

PROMPT_DEADLINE_S = 10.0
LEASE_TTL_S = 30.0
"""The default: what must end sooner than this didn't wait for a lease to expire."""


async def told_to_end(node: NodeProcess) -> list[str]:
    """SIGTERM, and what it logged; it must end by itself, well and soon."""
    os.kill(node.pid, signal.SIGTERM)
    assert await asyncio.wait_for(node.wait(), PROMPT_DEADLINE_S) == 0
    text = node.log.read_text()
    for word in ("Traceback", "ERROR", "never retrieved", "was never awaited"):
        assert word not in text, text
    return text.splitlines()


def test_unequal_contracts_are_refused(world: World) -> None:
    async def body() -> None:
        other = await world.start(
            "decode", "other", rollback_tokens=4, indexer_types="full,full,full,full" + ",shared" * 4
        )
        await _unequal(world, other)
        request = world.request(20, 100)
        assert tuple((await world.ask(request)).tokens) == (await world.alone(request.tokens)).tokens
        lines = await told_to_end(other)
        assert lines[-1].endswith("ended")

    world.run(body())


def test_a_node_that_must_have_rdma_and_cannot_ends_before_it_serves(world: World) -> None:
    """With an RDMA device, too: these transports leave it out."""

    async def body() -> None:
        with pytest.raises(PeerLost, match=r"(?s)ended with 2 before it served.*LaneRefused: RDMA is required, but"):
            await world.start("decode", "strict", require_rdma=True, ucx_tls="tcp,self")

    world.run(body())


async def _unequal(world: World, node: NodeProcess) -> None:
    """The refusal lists every field, seen from the node that was asked."""
    with pytest.raises(ContractMismatch) as refused:
        await world.ask(world.request(21, 100), node)
    differences = {d.field: (d.mine, d.theirs) for d in refused.value.differences}
    assert differences["rollback_tokens"] == ("4", "0")
    assert differences["indexer_types"] == (
        "[full full full full shared shared shared shared]",
        "[full full full shared shared shared full shared]",
    )
    assert "segments" in differences
    assert "rollback_tokens: mine 4, theirs 0" in str(refused.value)
    status = await world.nodes.decode(node.address).status()
    assert at_rest(status)
    assert status.pages["cached"] == 0
    assert not any(name.startswith("other") for name in (await world.prefill_status()).peers)


def test_pages_travel_over_tcp_where_nothing_else_is_allowed(world: World) -> None:
    """And when the decode process of that pair is killed, prefill has everything back at once."""

    async def body() -> None:
        prefill, decode = await asyncio.gather(
            world.start("prefill", "p-tcp", ucx_tls="tcp,self"), world.start("decode", "d-tcp", ucx_tls="tcp,self")
        )
        request = world.request(23, 1100, prefill)
        answer, alone = await world.ask(request, decode), await world.alone(request.tokens)
        assert (tuple(answer.tokens), tuple(answer.logits_digests)) == (alone.tokens, alone.logits_digests)
        shipment = answer.whole.shipment
        assert shipment.bytes_backend == shipment.bytes_main + shipment.bytes_index > 0
        for client in (world.nodes.peer(prefill.address), world.nodes.decode(decode.address)):
            assert [peer.lane for peer in (await client.status()).peers.values()] == ["tcp"]
        cut = asyncio.create_task(world.ask(world.request(24, 4000, prefill), decode))

        def status() -> Awaitable[NodeStatus]:
            return world.prefill_status(prefill)

        await until(status, lambda s: s.requests == 1, "prefill runs")
        decode.kill()
        with pytest.raises(PeerLost):
            await cut
        await until(status, at_rest, "prefill has everything back", deadline_s=LEASE_TTL_S / 2)
        await told_to_end(prefill)

    world.run(body())
