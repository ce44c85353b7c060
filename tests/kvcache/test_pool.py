"""Views of the pool's own memory: they tile each page, copy nothing, and agree with the addresses peers get."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.page_layout import Group, PageFormat, PlacementKind, layer_major, page_major
from pdkv.kvcache.memory import allocate
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.pool import SlotPool
from tests.kvcache.pools import (
    PLACEMENTS,
    all_pages,
    page_segments,
    pages_of,
    random_pool,
    snapshot,
    tiny_format,
)

FORMATS = [
    tiny_format(),
    tiny_format(draft_layers=1),
    tiny_format(kpool=2, draft_layers=1),
    tiny_format(main_row="bf16"),
    tiny_format(kpool=4, rollback=3),
]
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["plain", "draft", "kpool2", "bf16", "kpool4"])


def layer_views(pool: SlotPool) -> list[torch.Tensor]:
    """The view of each segment, in segment order."""
    of = {False: pool.index_view, True: pool.pending_keys}
    return [(pool.main_view if s.group is Group.MAIN else of[s.pending])(s.layer) for s in pool.fmt.segments]


@each_format
@each_placement
def test_views_are_the_memory_that_peers_are_told(fmt: PageFormat, placement: PlacementKind) -> None:
    pool = SlotPool.create(fmt, 4, placement=placement)
    told = pool.map()
    assert (told.num_pages, told.memory, told.table_base) == (4, "DRAM", pool.table.address)
    for view, segment in zip(layer_views(pool), told.segments, strict=True):
        assert (view.data_ptr(), view.stride(0), view[0].numel()) == (segment.base, segment.stride, segment.length)
        assert view[0].is_contiguous()
        view[3].view(-1)[-1] = 201
        last = segment.base + 3 * segment.stride + segment.length - 1
        assert ctypes.string_at(last, 1) == b"\xc9"


@each_format
@each_placement
def test_views_of_all_layers_tile_the_page(fmt: PageFormat, placement: PlacementKind) -> None:
    """Bytes counted through the views, page by page: each byte of the pool once, so no overlap and no gap."""
    pool = SlotPool.create(fmt, 3, placement=placement)
    for view in layer_views(pool):
        view += 1
    assert all(bool((buffer == 1).all()) for buffer in pool.memory.buffers)
    assert sum(view[0].numel() for view in layer_views(pool)) == fmt.page_bytes


@each_placement
def test_keys_and_scales_tile_the_index_page(placement: PlacementKind) -> None:
    pool = SlotPool.create(FORMATS[1], 3, placement=placement)
    for layer in (0, 8):
        pool.index_keys(layer)[2].fill_(1)
        pool.index_scales(layer)[2].fill_(2)
        page = pool.index_view(layer)[2]
        assert page[: 64 * 128].unique().tolist() == [1]
        assert page[64 * 128 :].unique().tolist() == [2]
        assert pool.index_view(layer)[1].sum() == 0
        pool.index_keys(layer)[2, 7, 5] = 9
        pool.index_scales(layer)[2, 7, 3] = 8
        assert (page[7 * 128 + 5], page[8192 + 7 * 4 + 3]) == (9, 8)


def test_layers_without_a_cache_are_refused_by_name() -> None:
    pool = SlotPool.create(FORMATS[0], 2)
    with pytest.raises(ConfigError, match="layer with index rows: 3"):
        pool.index_view(3)
    with pytest.raises(ConfigError, match="layer with main rows: 8"):
        pool.main_view(8)


@each_format
def test_page_major_groups_are_one_piece_each(fmt: PageFormat) -> None:
    pool = SlotPool.create(fmt, 2)
    main, index = (pool.pieces(group) for group in Group)
    assert [(p.offset, p.length) for p in (*main, *index)] == [(0, fmt.main_bytes), (fmt.main_bytes, fmt.index_bytes)]
    layered = SlotPool.create(fmt, 2, placement="layer_major")
    assert [len(layered.pieces(group)) for group in Group] == [len(fmt.group_segments(group)) for group in Group]


@each_placement
def test_group_bytes_are_writable_views_in_segment_order(placement: PlacementKind) -> None:
    pool = random_pool(FORMATS[1], 3, placement=placement)
    views = layer_views(pool)
    found = page_segments(pool, 2)
    assert [f.ctypes.data for f in found] == [v[2].data_ptr() for v in views]
    found[0][5] ^= 1
    assert int(views[0][2].view(-1)[5]) == int(found[0][5])


@each_placement
def test_group_views_are_the_same_memory(placement: PlacementKind) -> None:
    pool = random_pool(tiny_format(), 4, placement=placement)
    for group in Group:
        views, parts = pool.group_views(2, group), pool.group_bytes(2, group)
        assert [view.data_ptr() for view in views] == [part.ctypes.data for part in parts]
        assert [view.numel() for view in views] == [part.size for part in parts]
    with pytest.raises(BoundsError):
        pool.group_views(0, Group.MAIN)


@each_placement
def test_zero_clears_both_caches_of_these_pages_only(placement: PlacementKind) -> None:
    pool = random_pool(FORMATS[2], 5, placement=placement)
    before = [page_segments(pool, page) for page in range(1, 5)]
    kept = [[segment.copy() for segment in segments] for segments in before]
    pool.zero(pages_of(pool, 2, 4))
    for page in range(1, 5):
        for now, then in zip(page_segments(pool, page), kept[page - 1], strict=True):
            assert np.array_equal(now, np.zeros_like(then) if page in (2, 4) else then)


def tail_mask(fmt: PageFormat, from_token: int) -> list[np.ndarray]:
    """Which bytes of each segment belong to tokens from `from_token` on, or to windows that are not whole then, or to
    keys of windows that are, by the layout's definition."""
    row, kpool = fmt.main_row.row_bytes, fmt.page_tokens // fmt.index_tokens
    whole = from_token // kpool
    main = np.repeat(np.arange(fmt.page_tokens) >= from_token, row)
    rows = np.arange(fmt.index_tokens) >= whole
    index = np.concatenate([np.repeat(rows, fmt.index_row.key_bytes), np.repeat(rows, fmt.index_row.scale_bytes)])
    waiting = {token % fmt.pending_rows for token in range(whole * kpool, from_token)}
    pending = np.repeat([row not in waiting for row in range(fmt.pending_rows)], 256)
    return [main if s.group is Group.MAIN else pending if s.pending else index for s in fmt.segments]


@settings(max_examples=12)
@given(st.sampled_from(FORMATS), st.sampled_from(PLACEMENTS), st.integers(1, 3), st.data())
def test_zero_tail_zeroes_the_unwritten_slots_and_touches_nothing_else(
    fmt: PageFormat, placement: PlacementKind, page: int, data: st.DataObject
) -> None:
    pool = random_pool(fmt, 4, placement=placement)
    from_token = data.draw(st.integers(0, fmt.page_tokens))
    expected = SlotPool.create(fmt, 4, placement=placement)
    for ours, theirs in zip(pool.memory.buffers, expected.memory.buffers, strict=True):
        theirs.copy_(ours)
    for segment, mask in zip(page_segments(expected, page), tail_mask(fmt, from_token), strict=True):
        segment[mask] = 0
    pool.zero_tail(page, from_token)
    assert all(np.array_equal(a, b) for a, b in zip(snapshot(pool), snapshot(expected), strict=True))


@pytest.mark.parametrize(("kpool", "rollback"), [(2, 0), (2, 1), (4, 0), (4, 3), (4, 9)])
def test_a_rollback_finds_the_keys_of_its_open_window(kpool: int, rollback: int) -> None:
    """Write n tokens, take back up to `rollback`, at any place of the page: keys left are those of the open window."""
    pool = SlotPool.create(tiny_format(kpool=kpool, rollback=rollback), 2)
    ring = pool.pending_keys(0)[1].numpy()
    lost = 0
    for written in range(1, pool.fmt.page_tokens + 1):
        for left in range(max(written - rollback - 1, 0), written + 1):
            ring[:] = 0
            for token in range(written):
                ring[token % len(ring)] = 1 + token % 255
            pool.zero_tail(1, left)
            window = range(left - left % kpool, left)
            expected = np.zeros(len(ring), np.uint8)
            for token in window:
                expected[token % len(ring)] = 1 + token % 255
            if written - left <= rollback:
                assert np.array_equal(ring[:, 0], expected)
            else:
                lost += not np.array_equal(ring[:, 0], expected)
    assert lost, "one token more than the layout allows for must be able to lose a key"


def test_pending_keys_are_digested_with_the_index() -> None:
    pool = random_pool(FORMATS[4], 3)
    before = digest_pages(pool, all_pages(pool))
    pool.pending_keys(0)[2, -1, -1] ^= 1
    assert (digest_pages(pool, all_pages(pool)) != before).tolist() == [[False, False], [False, True]]


def test_an_index_that_is_not_pooled_has_no_pending_keys() -> None:
    with pytest.raises(ConfigError, match="layer with pending keys"):
        SlotPool.create(FORMATS[0], 2).pending_keys(0)


@each_placement
def test_copy_page_copies_both_caches(placement: PlacementKind) -> None:
    pool = random_pool(FORMATS[1], 4, placement=placement)
    kept = [segment.copy() for segment in page_segments(pool, 2)]
    pool.copy_page(1, 3)
    for source, target in zip(page_segments(pool, 1), page_segments(pool, 3), strict=True):
        assert np.array_equal(source, target)
    assert all(np.array_equal(a, b) for a, b in zip(page_segments(pool, 2), kept, strict=True))


@pytest.mark.parametrize("page", [0, -1, 4])
def test_pages_outside_the_pool_and_the_sink_are_refused(page: int) -> None:
    pool = SlotPool.create(FORMATS[0], 4)
    calls: list[Callable[[], object]] = [
        lambda: pool.group_bytes(page, Group.MAIN),
        lambda: pool.zero_tail(page, 3),
        lambda: pool.copy_page(page, 1),
        lambda: pool.copy_page(1, page),
    ]
    for call in calls:
        with pytest.raises(BoundsError, match="page id"):
            call()


@pytest.mark.parametrize("token", [-1, 65])
def test_tokens_outside_the_page_are_refused(token: int) -> None:
    with pytest.raises(BoundsError, match="first token to zero"):
        SlotPool.create(FORMATS[0], 2).zero_tail(1, token)


def test_parts_that_don_t_fit_together_are_refused() -> None:
    fmt = FORMATS[0]
    place = page_major(fmt, 4)
    with pytest.raises(ConfigError, match="pool buffers"):
        SlotPool(fmt, place, allocate(layer_major(fmt, 4).buffer_bytes), PageTable(4))
    with pytest.raises(ConfigError, match="page table rows"):
        SlotPool(fmt, place, allocate(place.buffer_bytes), PageTable(5))
    with pytest.raises(ConfigError, match="placement"):
        SlotPool.create(fmt, 4, placement="diagonal")  # type: ignore[arg-type]


@each_placement
def test_a_pool_in_torch_memory_is_the_same_pool(placement: PlacementKind) -> None:
    pool = SlotPool.create(FORMATS[1], 3, placement=placement, memory="torch")
    pool.zero(all_pages(pool))
    for view, segment in zip(layer_views(pool), pool.map().segments, strict=True):
        assert view.data_ptr() == segment.base
        assert not bool(view[1:].any())


def test_views_outlive_a_closed_pool() -> None:
    pool = SlotPool.create(FORMATS[0], 3)
    view = pool.main_view(7)
    pool.close()
    with pytest.raises(BoundsError, match="closed"):
        pool.main_view(7)
    del pool
    gc.collect()
    view[2, 63] = 5
    assert int(view[2].sum()) == 5 * 656
