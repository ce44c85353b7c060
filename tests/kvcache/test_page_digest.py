"""Digests see every byte of a page, name the cache, and don't see where the page lies."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group, PlacementKind
from pdkv.kvcache.page_digest import ALGORITHMS, digest_pages
from tests.kvcache.pools import PLACEMENTS, all_pages, page_segments, pages_of, random_pool, tiny_format

FMT = tiny_format(draft_layers=1)
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)


@each_placement
def test_digest_is_xxh3_of_the_group_in_segment_order(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 3, placement=placement)
    found = digest_pages(pool, pages_of(pool, 2))
    assert (found.dtype, found.shape) == (np.uint64, (1, 2))
    for column, group in enumerate(Group):
        joined = np.concatenate(pool.group_bytes(2, group)).tobytes()
        assert int(found[0, column]) == xxhash.xxh3_64_intdigest(joined)


def test_placement_pool_size_and_memory_don_t_matter() -> None:
    one = random_pool(FMT, 4)
    other = random_pool(FMT, 4, placement="layer_major")
    expected = digest_pages(one, all_pages(one))
    assert np.array_equal(digest_pages(other, all_pages(other)), expected)
    assert len(np.unique(expected)) == expected.size
    larger = random_pool(FMT, 6)  # same seed: pages 1 to 3 hold the same bytes
    assert np.array_equal(digest_pages(larger, pages_of(larger, 1, 2, 3)), expected)


@each_placement
def test_rows_follow_the_order_of_the_pages(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    ordered = digest_pages(pool, pages_of(pool, 1, 2, 3, 4))
    for order in ([4, 2, 3], [2, 3, 4], [3, 2], [2]):
        assert np.array_equal(digest_pages(pool, pages_of(pool, *order)), ordered[[page - 1 for page in order]])


@settings(max_examples=40)
@given(st.sampled_from(PLACEMENTS), st.integers(1, 3), st.sampled_from(range(len(FMT.segments))), st.data())
def test_a_flipped_bit_changes_that_page_s_digest_of_that_cache_only(
    placement: PlacementKind, page: int, segment: int, data: st.DataObject
) -> None:
    pool = POOLS[placement]
    before = digest_pages(pool, all_pages(pool))
    target = page_segments(pool, page)[segment]
    byte, bit = data.draw(st.integers(0, target.size - 1)), data.draw(st.integers(0, 7))
    target[byte] ^= 1 << bit
    changed = digest_pages(pool, all_pages(pool)) != before
    target[byte] ^= 1 << bit
    column = list(Group).index(FMT.segments[segment].group)
    assert np.argwhere(changed).tolist() == [[page - 1, column]]
    assert np.array_equal(digest_pages(pool, all_pages(pool)), before)


POOLS = {placement: random_pool(FMT, 4, placement=placement) for placement in PLACEMENTS}


def test_none_is_zeros_and_anything_else_is_refused() -> None:
    pool = POOLS["page_major"]
    assert digest_pages(pool, all_pages(pool), "none").tolist() == [[0, 0]] * 3
    assert digest_pages(pool, pages_of(pool)).shape == (0, 2)
    assert ALGORITHMS == ("xxh3_64",)
    with pytest.raises(ConfigError, match="digest algorithm: 'crc32'"):
        digest_pages(pool, all_pages(pool), "crc32")
