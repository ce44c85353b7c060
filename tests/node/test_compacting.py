"""Pages move together while both nodes serve: nobody's answer changes, and what moved is hit where it is now."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.ids import PageHashes, RequestId
from pdkv.kvcache.compaction import compact
from pdkv.node import compacting
from pdkv.node.decode import DecodeNode
from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.node.prefill import PrefillNode
from tests.node import grouped
from tests.node.scene import alone, answers, gated, recovered, request, run
from tests.node.test_matrix import equal_pages
from tests.node.toy import PAGE, Pair, make_pair


def with_a_gap(node: PrefillNode | DecodeNode, pages: int) -> None:
    """Evict the pages unused for longest: the node was filled in order, so they are its first."""
    manager = node.parts.manager
    manager.end(manager.reserve(PageHashes(), manager.census()["free"] + pages, max_hit_pages=0))


async def filled(pair: Pair) -> list[GenerateRequest]:
    """Four prompts of 4 pages in both trees; then the first one's pages are free."""
    asked = [replace(request(4 * PAGE, seed=i, name=f"r{i}"), sampling=Sampling(max_tokens=2)) for i in range(4)]
    for each in asked:
        await answers(pair.decode.generate(each))
    await asyncio.gather(*pair.decode.farewells)
    for node in pair.nodes:
        with_a_gap(node, 4)
        assert node.parts.manager.allocator.extents == 2
    return asked


@pytest.mark.parametrize("part_pages", [1, 3, 100])
def test_what_is_free_is_one_run_again_and_hits_go_on(part_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        monkeypatch.setattr(compacting, "PART_BYTES", part_pages * pair.decode.parts.pool.fmt.page_bytes + 5)
        asked = await filled(pair)
        for node in pair.nodes:
            assert await node.compact() == 4
            assert node.parts.manager.allocator.extents == 1
            node.parts.manager.check()
            assert await node.compact() == 0
        for each in asked[1:]:
            tokens, done = await answers(pair.decode.generate(replace(each, request_id=RequestId("again"))))
            assert (tuple(tokens), done.shipment.pages_hit) == (alone(pair, each), 4)
            await equal_pages(pair, each)
        await recovered(pair)

    run(scenario, make_pair())


def test_requests_that_run_keep_their_pages() -> None:
    """One amid a step on decode, with a hit; one amid a chunk on prefill, with a lease and a hit."""

    async def scenario(pair: Pair) -> None:
        asked = await filled(pair)
        decoding = gated(pair.decode.parts.engine, "forward")
        first = replace(asked[1], request_id=RequestId("first"), sampling=Sampling(max_tokens=9))
        one = asyncio.create_task(answers(pair.decode.generate(first)))
        await decoding.reached()
        computing = gated(pair.prefill.parts.engine, "forward")
        longer = np.concatenate((asked[2].tokens, request(3 * PAGE, seed=9).tokens))
        second = replace(asked[2], tokens=longer, request_id=RequestId("second"))
        two = asyncio.create_task(answers(pair.decode.generate(second)))
        await computing.reached()
        before = [reservation.sequence.array.copy() for reservation in reservations(pair)]
        assert len(before) == 3
        moved = [await node.compact() for node in pair.nodes]
        assert moved == [1, 3]  # pages of the last prompt, which nobody has, into what the two left of the gap
        after = [reservation.sequence.array for reservation in reservations(pair)]
        assert all(map(np.array_equal, before, after))
        for node in pair.nodes:
            node.parts.manager.check()
        decoding.open()
        computing.open()
        assert tuple((await one)[0]) == alone(pair, first)
        assert tuple((await two)[0]) == alone(pair, second)
        await recovered(pair)

    run(scenario, make_pair())


def reservations(pair: Pair) -> list[object]:
    return [each for node in pair.nodes for each in node.parts.manager.reservations.values()]


def test_a_group_refuses_by_name() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        await scene.ask(request(200))
        with pytest.raises(ConfigError, match="compact"):
            await scene.pair.decode.compact()
        with pytest.raises(ConfigError, match="compact"):
            compact(scene.pair.decode.parts.manager)
        await scene.rested()

    grouped.run(scenario)
