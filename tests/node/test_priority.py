"""A request's priority keeps its pages in both trees, and gives it no better place in the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdkv.kvcache.eviction import eviction_order
from pdkv.node.messages import GenerateRequest, Sampling
from tests.node.scene import alone, answers, gated, request, rested, run, until
from tests.node.toy import PAGE, Pair, make_pair


def pressed(eviction: str) -> Pair:
    """Sixteen usable pages on each node."""
    pair = make_pair(pages=17)
    for node in pair.nodes:
        node.parts.manager.tree.order = eviction_order(eviction)
    return pair


async def hits(pair: Pair, asked: GenerateRequest) -> tuple[int, int]:
    """Pages found on decode and on prefill."""
    tokens, done = await answers(pair.decode.generate(replace(asked, sampling=Sampling(max_tokens=2))))
    assert tuple(tokens) == alone(pair, asked)[:2]
    return done.shipment.pages_hit, done.chunk_starts[0] // PAGE


@pytest.mark.parametrize(
    ("eviction", "old", "new", "left"),
    [("priority", 1, 0, (4, 4)), ("priority", 0, 1, (2, 2)), ("priority", 0, 0, (2, 2)), ("lru", 1, 0, (2, 2))],
)
def test_the_pages_of_the_least_important_request_go_first_on_both_nodes(
    eviction: str, old: int, new: int, left: tuple[int, int]
) -> None:
    """Of two prompts of 4 pages the older one stays only if it is the more important one."""

    async def scenario(pair: Pair) -> None:
        first = request(4 * PAGE + 9, seed=1, name="first", priority=old)
        assert await hits(pair, first) == (0, 0)
        await hits(pair, request(4 * PAGE + 9, seed=2, name="second", priority=new))
        await hits(pair, request(10 * PAGE - 9, seed=3, name="wants room"))
        assert await hits(pair, replace(first, priority=0)) == left
        assert [node.parts.manager.evicted_pages for node in pair.nodes] == [2 + 4 - left[0]] * 2
        await rested(pair)

    run(scenario, pressed(eviction))


def test_whose_turn_it_is_does_not_depend_on_it() -> None:
    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.engine, "forward")
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            asked = request(10 * PAGE, seed=ord(name[0]), name=name, priority=priority)
            await answers(pair.decode.generate(asked))
            order.append(name)

        running = [asyncio.create_task(ask("first", 0))]
        await gate.reached()
        for number, (name, priority) in enumerate((("plain", 0), ("important", 9))):
            running.append(asyncio.create_task(ask(name, priority)))
            await until(lambda waiting=number + 1: pair.decode.status().queued == waiting)
        gate.open()
        await asyncio.gather(*running)
        assert order == ["first", "plain", "important"]
        await rested(pair)

    run(scenario, pressed("priority"))
