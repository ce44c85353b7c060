"""A prefill process that is killed, and one that is told to end, while a request of theirs runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import Draining, PdkvError, PeerLost
from pdkv.node.messages import PeerStatus
from tests.e2e.world import Answer, World, at_rest, free_address
from tests.waiting import until

LONG = 4000
"""Eight chunks: several seconds of prefill."""


class Spare:
    """A prefill node that tests may end: the next one gets another process of the same name at the same address."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.address = free_address()
        self.node: NodeProcess | None = None

    async def running(self) -> NodeProcess:
        if self.node is None or not self.node.running:
            self.node = await self.world.start("prefill", "spare", bind=self.address)
            assert self.node.address == self.address
        return self.node

    def names(self, peers: dict[str, PeerStatus]) -> dict[str, str]:
        """Lives of this node among `peers`, and their states."""
        return {name: peer.state for name, peer in peers.items() if name.startswith("spare#")}


@pytest.fixture(scope="module")
def spare(world: World) -> Iterator[Spare]:
    made = Spare(world)
    yield made
    if made.node is not None:
        made.node.kill()
        world.run(made.node.wait())


async def under_way(world: World, asked: asyncio.Task[Answer]) -> None:
    """Some pages have come, most have not: prefill is in the middle of the prompt."""
    before = (await world.decode_status()).pages["cached"]
    status = await until(world.decode_status, lambda s: s.pages["cached"] >= before + 8, "the first chunk's pages")
    assert status.requests == 1
    assert status.pages["reserved"] > 40
    assert not asked.done()


def test_prefill_is_killed_and_its_successor_serves(world: World, spare: Spare) -> None:
    async def body() -> None:
        first = await spare.running()
        await world.ask(world.request(30, 100, first))
        asked = asyncio.create_task(world.ask(world.request(31, LONG, first)))
        await under_way(world, asked)
        first.kill()
        await first.wait()
        with pytest.raises(PdkvError) as lost:
            await asyncio.wait_for(asked, 30)
        assert isinstance(lost.value, PeerLost)
        assert lost.value.fields["address"]
        status = await until(world.decode_status, at_rest, "decode has everything back", deadline_s=30)
        ((old, state),) = spare.names(status.peers).items()
        assert state != "READY"

        second = await spare.running()
        request = world.request(32, 700, second)
        assert tuple((await world.ask(request)).tokens) == (await world.alone(request.tokens)).tokens
        ((new, state),) = spare.names((await world.decode_status()).peers).items()
        assert (new != old, state) == (True, "READY")

    world.run(body())


def test_a_prompt_that_was_lost_half_way_is_served_from_what_came(world: World, spare: Spare) -> None:
    """Committed pages of a request that failed are cache like others."""

    async def body() -> None:
        node = await spare.running()
        asked = asyncio.create_task(world.ask(world.request(33, LONG, node)))
        await under_way(world, asked)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(world.decode_status, at_rest, "decode has everything back")
        await until(lambda: world.prefill_status(node), at_rest, "prefill has stopped, and has everything back")
        answer = await world.ask(world.request(33, 512, node))
        assert answer.whole.shipment.pages_hit == 8

    world.run(body())


def test_a_node_that_is_told_to_end_finishes_what_runs_and_takes_nothing_new(world: World, spare: Spare) -> None:
    async def body() -> None:
        node = await spare.running()
        request = world.request(34, 2000, node)
        asked = asyncio.create_task(world.ask(request))
        await until(lambda: world.prefill_status(node), lambda s: s.requests == 1, "prefill runs")
        os.kill(node.pid, signal.SIGTERM)

        async def refused() -> PdkvError | None:
            try:
                await world.ask(world.request(35, 70, node))
            except PdkvError as error:
                return error
            return None

        error = await until(refused, lambda e: e is not None, "new requests are refused")
        assert isinstance(error, Draining)
        answer = await asked
        assert tuple(answer.tokens) == (await world.alone(request.tokens)).tokens
        assert await asyncio.wait_for(node.wait(), 20) == 0
        assert "Traceback" not in node.log.read_text()

    world.run(body())
