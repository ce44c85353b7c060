"""Injected faults: each changes what its name says and nothing else, and digests catch each."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import ConfigError, DigestMismatch
from pdkv.geometry.page_layout import Group, Segment
from pdkv.ids import LocalPages
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.decode import DecodeSettings
from pdkv.node.faults import DRAFT_FAULTS, FAULTS, HANDOFF_FAULTS, fault_named, handoff_fault_named
from pdkv.node.messages import DraftHandoff
from tests.kvcache.pools import all_pages, pages_of, random_pool, tiny_format
from tests.node.scene import alone, answers, recovered, request, rested, run
from tests.node.toy import Pair, make_pair

# pages 2 to 5 of a pool of seven are those of the read
CHANGES = {
    "drop-index": [(2, 1), (3, 1), (4, 1), (5, 1)],
    "zero-page": [(5, 0), (5, 1)],
    "swap-pages": [(2, 0), (2, 1), (5, 0), (5, 1)],
    "flip-bit": [(4, 0)],
}
"""(page, cache) that differ afterwards; cache 0 is main, 1 is index."""


def test_every_fault_is_covered() -> None:
    assert set(CHANGES) == set(CAUGHT) == set(FAULTS)


@pytest.mark.parametrize("placement", ["page_major", "layer_major"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_changes_exactly_what_it_says(name: str, placement: str) -> None:
    pool = random_pool(tiny_format(), 8, placement=placement)  # type: ignore[arg-type]
    every = all_pages(pool)
    before = digest_pages(pool, every)
    FAULTS[name](pool, pages_of(pool, 2, 3, 4, 5))
    changed = np.argwhere(digest_pages(pool, every) != before)
    assert [(page + 1, cache) for page, cache in changed.tolist()] == CHANGES[name]
    if name == "swap-pages":
        np.testing.assert_array_equal(digest_pages(pool, pages_of(pool, 5, 2)), before[[1, 4]])
    if name == "zero-page":
        empty = SlotPool.create(pool.fmt, 2)
        np.testing.assert_array_equal(digest_pages(pool, pages_of(pool, 5)), digest_pages(empty, pages_of(empty, 1)))


def test_one_page_has_nothing_to_change_places_with() -> None:
    pool = random_pool(tiny_format(), 3)
    before = digest_pages(pool, all_pages(pool))
    FAULTS["swap-pages"](pool, LocalPages.checked([1], 3))
    np.testing.assert_array_equal(digest_pages(pool, all_pages(pool)), before)


def test_a_fault_is_named_and_allowed_or_refused() -> None:
    assert fault_named("", allowed=False) is None
    assert fault_named("flip-bit", allowed=True) is FAULTS["flip-bit"]
    with pytest.raises(ConfigError, match="allow-fault-injection"):
        fault_named("flip-bit", allowed=False)
    with pytest.raises(ConfigError, match="drop-index, zero-page"):
        fault_named("flip-bits", allowed=True)


def test_lost_draft_rows_are_those_of_the_draft_layer_in_both_caches() -> None:
    pool = random_pool(tiny_format(draft_layers=1), 4)
    before = {(page, s.name): raw.copy() for page, s, raw in segments_of(pool)}
    DRAFT_FAULTS["drop-draft-rows"](pool, pages_of(pool, 2, 3))
    for page, segment, raw in segments_of(pool):
        lost = page in (2, 3) and segment.name in ("draft_main.8", "draft_index.8")
        np.testing.assert_array_equal(raw, 0 if lost else before[page, segment.name])


def segments_of(pool: SlotPool) -> list[tuple[int, Segment, np.ndarray]]:
    found = []
    for page in range(1, pool.num_pages):
        for group in Group:
            segments = [s for s in pool.fmt.segments if s.group is group]
            found += [(page, s, raw) for s, raw in zip(segments, pool.group_bytes(page, group), strict=True)]
    return found


def test_a_fault_of_the_hand_off_loses_one_part_of_it() -> None:
    whole = DraftHandoff(
        np.ones(2, np.float32), np.ones(1, np.uint32), np.ones(1, np.float32), np.arange(5, dtype=np.int32), 7
    )
    for name, field in {"drop-hidden": "hidden", "drop-draft-tokens": "tokens", "drop-seed": "index_seed"}.items():
        assert fault_named(name, allowed=True) is None
        damaged = handoff_fault_named(name)(whole)
        for other in ("hidden", "tokens", "probabilities", "index_seed", "logits_digest"):
            assert np.array_equal(getattr(damaged, other), getattr(whole, other)) == (other != field)
    assert set(HANDOFF_FAULTS) == {"drop-hidden", "drop-draft-tokens", "drop-seed"}
    assert handoff_fault_named("flip-bit")(whole) is whole
    with pytest.raises(ConfigError, match="allow-fault-injection"):
        fault_named("drop-hidden", allowed=False)


CAUGHT = {"drop-index": (0, "index"), "zero-page": (1, "both"), "swap-pages": (0, "both"), "flip-bit": (1, "main")}
"""What must be named of the first read of a request, which is of two pages."""


@pytest.mark.parametrize("name", CAUGHT)
def test_each_fault_is_caught_before_the_first_token(name: str) -> None:
    async def scenario(pair: Pair) -> None:
        stream = pair.decode.generate(request(300, fault=name))
        with pytest.raises(DigestMismatch) as caught:
            await anext(stream)
        assert CAUGHT[name] in [(bad.index, bad.cache) for bad in caught.value.bad]
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("name", CAUGHT)
def test_without_digests_each_fault_changes_the_tokens(name: str) -> None:
    """The negative control of the controls: what the digests catch does matter."""

    async def scenario(pair: Pair) -> None:
        asked = request(300, fault=name)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) != alone(pair, asked)
        assert done.shipment.digests_verified == 0
        await rested(pair)

    run(scenario, make_pair(digest="none"))


def test_a_fault_needs_a_node_that_allows_it() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ConfigError, match="allow-fault-injection"):
            await answers(pair.decode.generate(request(100, fault="flip-bit")))
        await recovered(pair)

    run(scenario, make_pair(settings=DecodeSettings(prefill_addresses=("p0",))))
