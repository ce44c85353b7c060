"""Real processes: what breaks while prefill reads pages back from decode costs their computing, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from pdkv.adapters.reference.monolith import Monolith
from pdkv.adapters.synthetic.engine import SyntheticEngine, synthetic_model
from pdkv.cli.assemble import contract_of
from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.config import PrefillConfig
from pdkv.errors import PeerLost
from pdkv.geometry.page_layout import page_format
from pdkv.ids import RequestId, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import GenerateRequest, Sampling
from tests.e2e.world import CHUNK, Answer, World, at_rest, free_address
from tests.waiting import until

FLAGS = {"engine": "synthetic", "pool_pages": 256, "allow_fault_injection": True}
TROUBLE = {
    "fail:p=1": "PeerLost",
    "corrupt:p=1": "DigestMismatch",
    "stale:p=1": "StalePages",
    "hang:nth=1": "DeadlineExceeded",
}
"""Of a prefill node's reads of pages, and what it counts it as."""
ANSWER = 300


class Talk:
    """A decode node after the first turn of a conversation, and prefill nodes that know nothing of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.prefills: dict[str, NodeProcess] = {}
        self._names = iter(range(1_000))
        config = PrefillConfig(model="tiny", engine="synthetic")
        model = synthetic_model("tiny")
        fmt = page_format(model.shape)
        pool = SlotPool.create(fmt, 64)
        self._one = Monolith(SyntheticEngine(model, pool), pool, contract_of(config, model, fmt), CHUNK)

    async def open(self) -> None:
        plans = {"": "", "stop": "stop@prefill.pulling:nth=1", **{plan: plan for plan in TROUBLE}}
        started = [self._prefill(f"pb-p{i}", plan) for i, plan in enumerate(plans.values())]
        *prefills, self.decode = await asyncio.gather(*started, self.start_decode("pb-d0"))
        self.prefills = dict(zip(plans, prefills, strict=True))
        first = text_tokens(9700, 200)
        answer = await self.ask(first, self.prefills[""], ANSWER)
        self.second: UInt32Array = np.concatenate((first, np.array(answer.tokens), text_tokens(9701, 30)))
        self.known_pages = (len(first) + ANSWER - 1) // 64

    async def _prefill(self, name: str, plan: str) -> NodeProcess:
        return await self.world.start(
            "prefill", name, fault_plan=plan, borrow_s=2, fence_after_s=1, bind=free_address(), **FLAGS
        )

    async def start_decode(self, name: str, **more: str | int) -> NodeProcess:
        return await self.world.start("decode", name, **FLAGS, **more)

    async def ask(
        self, tokens: UInt32Array, prefill: NodeProcess, count: int = 8, decode: NodeProcess | None = None
    ) -> Answer:
        """Its tokens are those of one process."""
        asked = GenerateRequest(
            RequestId(f"pb-{next(self._names)}"),
            tokens.astype(np.uint32),
            Sampling(max_tokens=count),
            prefill_address=prefill.address,
        )
        answer = await self.world.ask(asked, decode or self.decode)
        assert tuple(answer.tokens) == self._one.generate(asked.tokens, asked.sampling).tokens
        return answer

    async def rested(self, *prefills: NodeProcess) -> None:
        for node in prefills:
            await until(lambda node=node: self.world.prefill_status(node), at_rest, f"{node.name} at rest")  # type: ignore[misc]
        if self.decode.running:
            await until(lambda: self.world.nodes.decode(self.decode.address).status(), at_rest, "decode at rest")


@pytest.fixture(scope="module")
def talk(world: World) -> Iterator[Talk]:
    made = Talk(world)
    world.run(made.open())
    yield made
    for node in (made.decode, *made.prefills.values()):
        node.kill()
        world.run(node.wait())


def test_a_prefill_node_that_knows_nothing_computes_only_what_decode_lacks(talk: Talk) -> None:
    async def body() -> None:
        answer = await talk.ask(talk.second, talk.prefills[""])
        done = answer.whole
        assert done.shipment.pages_hit == talk.known_pages
        assert done.shipment.pages_pulled_back == talk.known_pages - 200 // 64
        assert done.chunk_starts == (talk.known_pages * 64,)
        await talk.rested(talk.prefills[""])

    talk.world.run(body())


@pytest.mark.parametrize("plan", TROUBLE)
def test_reads_that_go_wrong_are_named_and_the_pages_computed(talk: Talk, plan: str) -> None:
    async def body() -> None:
        prefill = talk.prefills[plan]
        done = (await talk.ask(talk.second, prefill)).whole
        assert (done.shipment.pages_pulled_back, done.chunk_starts) == (0, (0, CHUNK))
        status = await talk.world.prefill_status(prefill)
        assert (status.borrowed_pages, status.borrow_failures) == (0, {TROUBLE[plan]: 1})
        assert "could not be borrowed from pb-d0#" in prefill.log.read_text()
        await talk.rested(prefill)  # also from what was held back

    talk.world.run(body())


def test_another_decode_node_reads_what_the_first_one_has_and_does_without_it_when_it_is_gone(talk: Talk) -> None:
    async def body() -> None:
        world, lender = talk.world, await talk.start_decode("pb-d2")
        second = await talk.start_decode("pb-d3", source_addresses=lender.address, locate_s=20)
        first = text_tokens(9702, 200)
        answer = await talk.ask(first, talk.prefills[""], ANSWER, lender)
        turn = np.concatenate((first, np.array(answer.tokens), text_tokens(9703, 30)))

        async def knows_its_source() -> bool:
            await talk.ask(text_tokens(9704, 10), talk.prefills[""], 1, second)
            peers = (await world.nodes.decode(second.address).status()).peers
            return any(name.startswith("pb-d2#") and peer.state == "READY" for name, peer in peers.items())

        await until(knows_its_source, bool, "the second decode node has met the first")
        done = (await talk.ask(turn, talk.prefills[""], decode=second)).whole
        assert (done.shipment.pages_hit, done.shipment.pages_borrowed) == (0, talk.known_pages)
        # prefill knew the prompt of the first turn, and reads the rest back from who has borrowed it
        assert done.shipment.pages_pulled_back == talk.known_pages - len(first) // 64
        assert done.chunk_starts == (talk.known_pages * 64,)
        await until(world.nodes.decode(lender.address).status, at_rest, "the lender at rest")
        status = await world.nodes.decode(second.address).status()
        assert (status.borrowed_pages, status.borrow_failures) == (talk.known_pages, {})
        lender.kill()
        await lender.wait()
        done = (await talk.ask(text_tokens(9705, 200), talk.prefills[""], decode=second)).whole
        assert done.shipment.pages_borrowed == 0
        await until(world.nodes.decode(second.address).status, at_rest, "the second decode node at rest")
        await second.stop()

    talk.world.run(body())


def test_a_decode_node_that_dies_under_a_pull_back_leaves_prefill_clean(talk: Talk) -> None:
    """The last one here: the conversation's decode node is gone then."""

    async def body() -> None:
        prefill = talk.prefills["stop"]
        asked = asyncio.create_task(talk.ask(talk.second, prefill))

        async def said() -> str:
            return prefill.log.read_text()

        await until(said, lambda log: "prefill.pulling" in log, "a pull back")
        talk.decode.kill()
        await talk.decode.wait()
        os.kill(prefill.pid, signal.SIGCONT)
        with pytest.raises(PeerLost):
            await asked
        await talk.rested(prefill)
        successor = await talk.start_decode("pb-d1")
        done = (await talk.ask(talk.second, prefill, decode=successor)).whole
        assert (done.shipment.pages_hit, done.shipment.pages_pulled_back) == (0, 0)
        await talk.rested(prefill)
        await successor.stop()

    talk.world.run(body())
