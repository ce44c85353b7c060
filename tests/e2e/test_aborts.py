"""Requests given up through the router at every stage of their lives, and a router that dies under many of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import DeadlineExceeded, PeerLost
from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.node.stages import Stage
from tests.e2e.world import Answer, World, at_rest, free_address
from tests.waiting import until

NOT_HERE = {Stage.QUEUED, Stage.RECOMPUTING, Stage.LENT, Stage.PULLING, Stage.PULLED}
"""A request only queues where pages are short, only recomputes after a failure, and is only lent pages, or has some
pulled back, if one node has what another lacks: see `test_pull_back`."""
HERE = tuple(stage for stage in Stage if stage not in NOT_HERE)
SLOW_S = 0.15
"""How long a node stands at each stage, once it has told it: the client goes meanwhile."""


class Slow:
    """A router over two nodes without a model, which tell each stage and stand there for a moment."""

    prefill: NodeProcess
    decode: NodeProcess
    router: NodeProcess

    def __init__(self, world: World) -> None:
        self.world = world

    async def open(self) -> None:
        flags = {"engine": "synthetic", "allow_fault_injection": True, "pool_pages": 256}
        address = free_address()
        plans = {
            role: ",".join(f"delay@{stage}:p=1:s={SLOW_S}" for stage in HERE if stage.startswith(role))
            for role in ("prefill", "decode")
        }
        self.prefill, self.decode = await asyncio.gather(
            self.world.start(
                "prefill",
                "slow-p",
                bind=address,
                fault_plan=plans["prefill"],
                lease_ttl_s=5,
                **flags | {"chunk_tokens": 64},
            ),
            self.world.start("decode", "slow-d", prefill_addresses=address, fault_plan=plans["decode"], **flags),
        )
        self.router = await self.world.start_router("slow-r", self.prefill, self.decode)

    def request(self, seed: int, length: int = 300) -> GenerateRequest:
        asked = self.world.request(seed, length)
        return GenerateRequest(asked.request_id, asked.tokens, sampling=Sampling(max_tokens=32))

    async def rested(self) -> None:
        """Neither node holds anything for anybody."""
        await until(lambda: self.world.nodes.decode(self.decode.address).status(), at_rest, "decode at rest")
        await until(lambda: self.world.prefill_status(self.prefill), at_rest, "prefill at rest")


@pytest.fixture(scope="module")
def slow(world: World) -> Iterator[Slow]:
    made = Slow(world)
    world.run(made.open())
    yield made
    for node in (made.router, made.decode, made.prefill):
        node.kill()
        world.run(node.wait())


def told(log: Path, stage: Stage) -> int:
    """How often a node has said that it stands there."""
    faults = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith('{"fault"')]
    return sum(fault["stage"] == stage for fault in faults)


@pytest.mark.parametrize("stage", HERE)
def test_a_client_that_goes_away_at_any_stage_leaves_nothing_behind(slow: Slow, stage: Stage) -> None:
    async def body() -> None:
        node = slow.decode if stage.startswith("decode") else slow.prefill
        before = told(node.log, stage)
        asked = asyncio.create_task(slow.world.ask(slow.request(700 + HERE.index(stage)), slow.router))

        async def count() -> int:
            return told(node.log, stage)

        await until(count, lambda n: n > before, f"a request at {stage}")
        assert not asked.done()
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await slow.rested()

    slow.world.run(body())


def test_a_router_that_dies_takes_its_requests_along_and_leaves_nothing_behind(slow: Slow) -> None:
    """At whatever stage each of them is; the nodes serve on."""

    async def body() -> None:
        router = await slow.world.start_router("mortal", slow.prefill, slow.decode)
        asked = [asyncio.create_task(slow.world.ask(slow.request(800 + i), router)) for i in range(6)]
        await until(
            slow.world.nodes.decode(slow.decode.address).status, lambda s: s.requests == len(asked), "all taken on"
        )
        router.kill()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(end) for end in ended] == [PeerLost] * len(asked)
        await slow.rested()
        answer: Answer = await slow.world.ask(slow.request(900), slow.router)
        assert len(answer.tokens) == 32

    slow.world.run(body())


def test_a_deadline_is_told_by_the_node_that_kept_it(slow: Slow) -> None:
    """Through the router, with what was over; not as a broken stream."""

    async def body() -> None:
        with pytest.raises(DeadlineExceeded) as over:
            await slow.world.ask(replace(slow.request(950), remaining_s=0.4), slow.router)
        assert over.value.fields["what"] in ("the request", "prefill")
        await slow.rested()

    slow.world.run(body())
