"""Two prefill processes behind a router: shared prefixes go where they are cached, and too much at once is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import PdkvError, RouterFull
from pdkv.node.messages import GenerateRequest, NodeStatus
from pdkv.node.routing import RouterStatus
from pdkv.router.registry import UP
from tests.e2e.world import Answer, World, at_rest, free_address
from tests.waiting import until

PREFIX = 192
"""Tokens that the requests of a family share: three pages."""


@dataclass
class Fleet:
    """Two prefill nodes, a decode node that dials both, and a router over all of them."""

    world: World
    prefills: dict[str, NodeProcess]
    decode: NodeProcess
    router: NodeProcess

    def request(self, family: int, member: int) -> GenerateRequest:
        tail = text_tokens(7000 + 100 * family + member, 20)
        tokens = np.concatenate([text_tokens(6000 + family, PREFIX), tail])
        return replace(self.world.request(0, 64), tokens=tokens, prefill_address="")

    async def ask(self, family: int, member: int) -> Answer:
        return await self.world.ask(self.request(family, member), self.router)

    async def status(self) -> RouterStatus:
        return await self.world.nodes.router(self.router.address).status()

    async def decode_status(self) -> NodeStatus:
        return await self.world.nodes.decode(self.decode.address).status()


@pytest.fixture(scope="module")
def fleet(world: World) -> Iterator[Fleet]:
    async def open_() -> Fleet:
        names = {f"routed-{i}": free_address() for i in range(2)}
        at = ",".join(names.values())
        *prefills, decode = await asyncio.gather(
            *(world.start("prefill", name, bind=address) for name, address in names.items()),
            world.start("decode", "routed-d", prefill_addresses=at),
        )
        # on a busy machine answers take their time, and here all are to count
        router = await world.start_router("routed-r", at, decode.address, locate_s="30")
        made = Fleet(world, {node.address: node for node in prefills}, decode, router)
        await until(made.status, lambda s: len(s.contents) == 3, "all have said what they are")
        return made

    made = world.run(open_())
    yield made
    for node in (*made.prefills.values(), made.decode, made.router):
        node.kill()
        world.run(node.wait())


def found(answer: Answer) -> tuple[str, int]:
    """Where the prompt was computed, and how many of its tokens were there already."""
    return answer.whole.shipment.prefill_address, answer.whole.chunk_starts[0]


def test_shared_prefixes_go_where_they_are_cached_and_new_ones_elsewhere(fleet: Fleet) -> None:
    async def body() -> None:
        at: dict[int, str] = {}
        for family in range(2):
            at[family], cached = found(await fleet.ask(family, 0))
            assert cached == 0
        assert set(at.values()) == set(fleet.prefills), "what nobody has goes to all in turn"
        before = (await fleet.status()).choices["prefix"]
        for member in (1, 2):
            for family in range(2):
                request = fleet.request(family, member)
                answer = await fleet.world.ask(request, fleet.router)
                assert found(answer) == (at[family], PREFIX)
                assert tuple(answer.tokens) == (await fleet.world.alone(request.tokens)).tokens
        status = await fleet.status()
        assert status.choices["prefix"] == before + 4
        assert all(node.waiting_tokens == node.requests == 0 for node in status.nodes.values())
        assert {node.trust for node in status.nodes.values()} == {1.0}

    fleet.world.run(body())


def test_too_much_at_once_is_refused_by_name_and_loses_nothing(fleet: Fleet) -> None:
    async def body() -> None:
        limits = {"running_limit": "2", "waiting_limit": "2"}
        narrow = await fleet.world.start_router("narrow", ",".join(fleet.prefills), fleet.decode.address, **limits)
        try:
            asked = [fleet.world.ask(fleet.request(9, member), narrow) for member in range(8)]
            ends = await asyncio.gather(*asked, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, RouterFull)]
            served = [end for end in ends if isinstance(end, Answer)]
            assert len(refused) + len(served) == 8
            assert (len(served), len(refused)) == (4, 4), ends
            assert all(float(error.fields["retry_after_s"]) >= 1 for error in refused)
            assert all(answer.done for answer in served)
            await until(fleet.decode_status, at_rest, "decode has everything back")
            assert (await fleet.world.ask(fleet.request(9, 9), narrow)).done, "and serves again"
        finally:
            narrow.kill()
            await narrow.wait()

    fleet.world.run(body())


def test_what_a_killed_node_had_is_computed_elsewhere_and_then_cached_there(fleet: Fleet) -> None:
    async def body() -> None:
        gone, cached = found(await fleet.ask(20, 0))
        assert cached == 0
        assert found(await fleet.ask(20, 1)) == (gone, PREFIX)
        fleet.prefills[gone].kill()
        await fleet.prefills[gone].wait()
        (stays,) = set(fleet.prefills) - {gone}

        async def served() -> Answer | None:
            """A request that is under way when the router still believes in the node may fail by name, no other."""
            try:
                return await fleet.ask(20, 2)
            except PdkvError:
                return None

        answer = await until(served, lambda a: a is not None, "the other node serves")
        assert answer is not None
        assert answer.whole.shipment.prefill_address == stays
        assert found(await fleet.ask(20, 3)) == (stays, PREFIX)
        status = await until(fleet.status, lambda s: s.prefill[gone] != UP, "the router passes it over")
        assert status.prefill[stays] == UP

    fleet.world.run(body())
