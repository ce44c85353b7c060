"""What a request's priority does on real nodes, through a router: its pages stay on both of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pdkv.node.messages import Sampling
from tests.e2e.world import World, at_rest, free_address
from tests.waiting import until

PAGE = 64
FLUSH, LOW, HIGH = -5, 0, 7


def test_an_unimportant_prefix_is_evicted_first_on_both_nodes(world: World) -> None:
    """Sixteen usable pages a node; of two prompts of 4 pages, 2 pages have to go."""

    async def body() -> None:
        address, small = free_address(), {"pool_pages": 17, "eviction": "priority"}
        prefill, decode = await asyncio.gather(
            world.start("prefill", "prio-p", bind=address, **small),
            world.start("decode", "prio-d", prefill_addresses=address, **small),
        )
        router = await world.start_router("prio-r", prefill, decode)

        async def hits(seed: int, length: int, priority: int) -> tuple[int, int]:
            asked = world.request(seed, length, priority=priority, sampling=Sampling(2))
            done = (await world.ask(replace(asked, prefill_address=""), router)).whole
            await until(lambda: world.prefill_status(prefill), at_rest, "the lease is released")
            return done.shipment.pages_hit, done.chunk_starts[0] // PAGE

        for turn, (old, new, left) in enumerate(((HIGH, LOW, 4), (LOW, HIGH, 2))):
            seed = 700 + 10 * turn
            await hits(seed, 15 * PAGE + 1, FLUSH)  # every page there is
            for of, priority in ((1, old), (2, new)):
                assert await hits(seed + of, 4 * PAGE + 9, priority) == (0, 0)
            await hits(seed + 3, 10 * PAGE - 9, LOW)
            assert await hits(seed + 1, 4 * PAGE + 9, LOW) == (left, left)

    world.run(body())
