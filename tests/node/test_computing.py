"""A prompt through a node's own engine: what is computed, sealed and left in the tree, and when something breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from pdkv.contract import ContractFacts
from pdkv.errors import BadLogits
from pdkv.ids import LocalPages
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.computing import Computation
from pdkv.node.messages import Namespace, Sampling
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.transfer.backends.loopback import LoopbackNet
from tests.node.scene import LIMIT_S, alone, gated, request, turns
from tests.node.toy import CHUNK, Pair, make_pair, make_parts

GREEDY = Sampling()


class Bench:
    """A node's parts, and a prompt of 300 tokens in chunks of 128."""

    def __init__(self, **facts: str | int) -> None:
        self.parts: NodeParts = make_parts("n", ContractFacts(weights_id="toy", **facts), LoopbackNet())  # type: ignore[arg-type]
        self.prompt: Prompt = plan_prompt(request(300).tokens, Namespace(), self.parts.contract)
        self.heard: list[tuple[int, LocalPages]] = []

    def reserve(self) -> Reservation:
        prompt = self.prompt
        return self.parts.manager.reserve(prompt.hashes, prompt.pages, max_hit_pages=prompt.prefill_hit_pages)

    def computation(self, reservation: Reservation) -> Computation:
        start, stop = len(reservation.hit) * 64, len(self.prompt.tokens)
        steps = [slice(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]
        return Computation(self.parts, steps, self.prompt, reservation, GREEDY)

    def cached(self) -> int:
        self.parts.manager.check()
        return self.parts.manager.census()["cached"]


def play(scenario: Callable[[Bench], Awaitable[None]], **facts: str | int) -> None:
    async def main() -> None:
        bench = Bench(**facts)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(bench)
        finally:
            bench.parts.close()

    asyncio.run(main())


def test_it_gives_what_one_process_says_and_leaves_the_full_pages_in_the_tree() -> None:
    async def scenario(bench: Bench) -> None:
        reservation = bench.reserve()
        computation = bench.computation(reservation)
        logits = await computation.run(lambda: None, lambda *part: bench.heard.append(part))
        assert computation.starts == (0, 128, 256)
        assert bench.heard == [(0, reservation.sequence[:2]), (2, reservation.sequence[2:4])]
        assert computation.sealed == 4
        pair: Pair = make_pair()
        assert (await computation.first(logits)).token == alone(pair, request(300))[0]
        pair.close()
        bench.parts.manager.end(reservation)
        assert bench.cached() == 4
        again = bench.reserve()
        assert bench.computation(again).starts == (256,)
        bench.parts.manager.end(again)

    play(scenario)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_bad_logits_end_it_and_what_made_them_reaches_no_tree(step: int) -> None:
    async def scenario(bench: Bench) -> None:
        def spoil(logits: np.ndarray) -> np.ndarray:
            return logits * np.nan if len(bench.parts.engine.steps) == step else logits  # type: ignore[attr-defined]

        bench.parts.engine.change = spoil  # type: ignore[attr-defined]
        reservation = bench.reserve()
        with pytest.raises(BadLogits):
            await bench.computation(reservation).run(lambda: None, lambda *part: None)
        bench.parts.manager.end(reservation)
        assert bench.cached() <= 2 * (step - 1)

    play(scenario)


def test_who_is_cancelled_waits_for_the_step_that_runs() -> None:
    async def scenario(bench: Bench) -> None:
        gate = gated(bench.parts.engine, "forward", at=2)
        reservation = bench.reserve()
        computing = asyncio.create_task(bench.computation(reservation).run(lambda: None, lambda *part: None))
        await gate.reached()
        computing.cancel()
        await turns()
        assert not computing.done()
        gate.open()
        await asyncio.wait([computing])
        assert computing.cancelled()
        bench.parts.manager.end(reservation)

    play(scenario)


def test_draft_rows_and_state_come_with_a_draft_layer() -> None:
    async def scenario(bench: Bench) -> None:
        reservation = bench.reserve()
        computation = bench.computation(reservation)
        await computation.run(lambda: None, lambda *part: None)
        assert computation.draft is not None
        assert len(computation.draft.tokens) == bench.parts.contract.draft_topk
        bench.parts.manager.end(reservation)

    mtp = {"speculation": "mtp", "eagle_rule": "bigram", "rollback_tokens": 2, "draft_tokens": 2, "draft_topk": 2}
    play(scenario, **mtp)
