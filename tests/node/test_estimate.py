"""What a node says to a router that asks what a request would find."""

from __future__ import annotations

import asyncio

from pdkv.ids import PageHashes
from pdkv.node.messages import GenerateRequest
from pdkv.node.prompt import plan_prompt
from pdkv.node.routing import EstimateCall
from tests.node.scene import answers, gated, request, rested, run, turns, until
from tests.node.toy import CHUNK, Pair, make_pair

NOTHING = EstimateCall(PageHashes())


def call(pair: Pair, asked: GenerateRequest) -> EstimateCall:
    return EstimateCall(plan_prompt(asked.tokens, asked.namespace, pair.prefill.parts.contract).hashes)


def test_the_pages_of_a_prompt_that_are_there() -> None:
    async def scenario(pair: Pair) -> None:
        asked, longer, other = request(300), request(640), request(300, seed=1)
        assert [node.estimate(call(pair, asked)).pages for node in pair.nodes] == [0, 0]
        await answers(pair.decode.generate(asked))
        await rested(pair)
        for node in pair.nodes:
            found = node.estimate(call(pair, asked))
            assert (found.name, found.pages, found.waiting_tokens) == (node.parts.name, 4, 0)
            total = node.parts.manager.census()["total"]
            assert found.available_pages == node.status().available_pages == total, "cached pages can be evicted"
            assert node.estimate(call(pair, longer)).pages == (4 if (longer.tokens[:300] == asked.tokens).all() else 0)
            assert node.estimate(call(pair, other)).pages == 0

    run(scenario, make_pair())


def test_what_is_not_computed_yet_and_what_requests_hold() -> None:
    async def scenario(pair: Pair) -> None:
        length = 2 * CHUNK + 10
        gate = gated(pair.prefill.parts.engine, "forward", at=2)
        asking = asyncio.create_task(answers(pair.decode.generate(request(length))))
        await gate.reached()
        await until(lambda: pair.prefill.estimate(NOTHING).waiting_tokens in (length - CHUNK, length))
        total = pair.decode.parts.manager.census()["total"]
        pages = -(-(length + 8) // 64)
        assert pair.decode.estimate(NOTHING).available_pages == total - pages
        assert pair.prefill.status().waiting_tokens == pair.prefill.estimate(NOTHING).waiting_tokens > 0
        gate.open()
        await asking
        assert pair.prefill.estimate(NOTHING).waiting_tokens == 0

    run(scenario, make_pair())


def test_nothing_is_available_where_requests_wait() -> None:
    async def scenario(pair: Pair) -> None:
        total = pair.decode.parts.manager.census()["total"]
        gate = gated(pair.prefill.parts.engine, "forward")
        big = (total // 2 + 1) * 64 - 8
        first = asyncio.create_task(answers(pair.decode.generate(request(big))))
        await gate.reached()
        assert pair.decode.estimate(NOTHING).available_pages > 0
        second = asyncio.create_task(answers(pair.decode.generate(request(big, seed=1, name="r1"))))
        await turns()
        assert (pair.decode.status().queued, pair.decode.estimate(NOTHING).available_pages) == (1, 0)
        gate.open()
        await asyncio.gather(first, second)

    run(scenario, make_pair())
