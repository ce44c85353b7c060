"""A decode group of real processes: leader and rank, each with a pool, a tree and a NIXL agent of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import PeerLost
from tests.e2e.world import World, at_rest, free_address


async def group_of_two(world: World, name: str) -> tuple[NodeProcess, NodeProcess]:
    address = free_address()
    flags = {"prefill_addresses": world.prefill.address, "rank_addresses": address}
    leader, rank = await asyncio.gather(
        world.start("decode", f"{name}-0", **flags), world.start("rank", f"{name}-1", bind=address)
    )
    return leader, rank


def test_two_ranks_answer_as_one_process(world: World) -> None:
    """Every step is computed on both, over pages that each pulled for itself: other bytes would give other logits."""

    async def body() -> None:
        leader, rank = await group_of_two(world, "g")
        for seed, length in ((1, 1), (2, 640), (3, 1000), (3, 1000)):
            asked = world.request(500 + seed, length)
            answer = await world.ask(asked, leader)
            expected = await world.alone(asked.tokens)
            assert tuple(answer.tokens) == expected.tokens
            assert tuple(answer.logits_digests) == expected.logits_digests
        assert answer.whole.shipment.pages_hit == 15
        # an answer over a page's edge is cache on both, and the next turn is computed on from it on both
        asked = world.request(504, 188)
        said = (await world.ask(asked, leader)).tokens
        turn = np.concatenate((asked.tokens, np.array(said), asked.tokens[:50])).astype(np.uint32)
        answer = await world.ask(replace(world.request(0, 1), tokens=turn), leader)
        assert (answer.whole.shipment.pages_hit, len(answer.tokens)) == (3, 8)
        status = await world.nodes.decode(leader.address).status()
        assert at_rest(status)
        rank.kill()
        await rank.wait()
        with pytest.raises(PeerLost, match="g-1"):
            await world.ask(world.request(510, 640), leader)
        with pytest.raises(PeerLost, match="the group is broken"):
            await world.ask(world.request(511, 640), leader)
        assert at_rest(await world.nodes.decode(leader.address).status())
        await leader.stop()

    world.run(body())
