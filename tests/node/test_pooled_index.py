"""kpool above 1 between two nodes: the keys of the window that the prompt leaves open travel with its tail page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import DigestMismatch
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, ReservationId
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.verifier import VerifiedPages
from pdkv.node.messages import Sampling
from tests.node.pooled import Pooling, pooled_alone, pooled_pair
from tests.node.scene import answers, request, run
from tests.node.toy import Pair

POOLINGS = (Pooling(2), Pooling(4, placement="layer_major"))


def boundaries(pooling: Pooling) -> list[int]:
    """Around the ends of a window, of a page and of a chunk."""
    edges = [pooling.kpool, 2 * pooling.kpool, pooling.page, 2 * pooling.page, 2 * pooling.page + pooling.kpool]
    around = {edge + by for edge in edges for by in (-pooling.kpool + 1, -1, 0, 1)}
    return sorted(length for length in around if length > 0)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_two_nodes_agree_with_one_process_around_every_boundary(pooling: Pooling) -> None:
    async def scenario(pair: Pair) -> None:
        for length in boundaries(pooling):
            asked = request(length, seed=length, name=f"r{length}")
            tokens, done = await answers(pair.decode.generate(asked))
            assert tuple(tokens) == pooled_alone(pair, asked), length
            assert done.shipment.bytes_index == done.shipment.pages_shipped * pair.decode.parts.pool.fmt.index_bytes

    run(scenario, pooled_pair(pooling))


def test_a_hit_on_both_nodes_leaves_the_tail_to_ship() -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(Pooling(4).page + 3)
        first, _ = await answers(pair.decode.generate(asked))
        again, done = await answers(pair.decode.generate(asked))
        assert (done.shipment.pages_hit, done.shipment.pages_shipped) == (1, 1)
        assert tuple(first) == tuple(again) == pooled_alone(pair, asked)

    run(scenario, pooled_pair(Pooling(4)))


def speculate(pooling: Pooling, drafts: int, length: int) -> tuple[list[int], tuple[int, ...]]:
    """What is answered with drafts of which some are taken back, and what is answered without."""
    asked = replace(request(length, seed=length), sampling=Sampling(max_tokens=24))
    heard: list[int] = []

    async def scenario(pair: Pair) -> None:
        tokens, done = await answers(pair.decode.generate(asked))
        heard.extend(tokens)
        assert done.speculation is not None
        assert done.speculation.rolled_back_tokens > 0

    pair = pooled_pair(pooling, speculation="oracle", draft_tokens=drafts, rollback_tokens=drafts)
    run(scenario, pair)
    return heard, pooled_alone(pair, asked)


@pytest.mark.parametrize("pooling", [Pooling(2, rollback=4), Pooling(4, rollback=4)], ids=str)
def test_drafts_taken_back_over_whole_windows(pooling: Pooling) -> None:
    for length in (1, pooling.kpool + 1, pooling.page - 3, pooling.page):
        tokens, alone = speculate(pooling, 3, length)
        assert tuple(tokens) == alone, length


def test_control_a_layout_that_keeps_too_few_keys_answers_wrongly() -> None:
    """Rolled back further than the layout allows for, a window is made of keys that are not its own."""
    tokens, alone = speculate(Pooling(4), 3, 5)
    assert tuple(tokens) != alone


@pytest.mark.parametrize(("open_tokens", "differs"), [(0, False), (1, True), (3, True)])
def test_control_without_its_pending_keys_the_answer_is_another(open_tokens: int, differs: bool) -> None:
    async def scenario(pair: Pair) -> None:
        manager, pool = pair.decode.parts.manager, pair.decode.parts.pool
        seal = manager.seal_private

        def forget(reservation: Reservation, verified: VerifiedPages) -> None:
            for segment in pool.fmt.segments:
                if segment.pending:
                    pool.pending_keys(segment.layer).numpy()[:] = 0
            seal(reservation, verified)

        manager.seal_private = forget  # type: ignore[method-assign]
        asked = request(Pooling(4).page + 8 + open_tokens)
        tokens, _ = await answers(pair.decode.generate(asked))
        assert (tuple(tokens) != pooled_alone(pair, asked)) == differs

    run(scenario, pooled_pair(Pooling(4), digest="none"))


def test_a_flipped_pending_key_is_caught_and_named() -> None:
    async def scenario(pair: Pair) -> None:
        source = pair.prefill.parts
        seal = source.verifier.seal

        def flip(reservation: ReservationId, first: int, pages: LocalPages, hashes: PageHashes) -> VerifiedPages:
            sealed = seal(reservation, first, pages, hashes)
            source.pool.group_bytes(int(sealed.pages.array[-1]), Group.INDEX)[-1][0] ^= np.uint8(1)
            return sealed

        source.verifier.seal = flip  # type: ignore[method-assign]
        with pytest.raises(DigestMismatch) as error:
            await answers(pair.decode.generate(request(7)))
        assert {(bad.index, bad.cache) for bad in error.value.bad} == {(0, "index")}

    run(scenario, pooled_pair(Pooling(4)))
