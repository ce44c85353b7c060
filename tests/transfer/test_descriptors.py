"""A plan names the same bytes as walking pages and segments one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, ContractMismatch
from pdkv.geometry.page_layout import PlacementKind, PoolMap, Region, SegmentMap, layer_major, page_major, pool_map
from pdkv.ids import LocalPages, RemotePages, UInt64Array
from pdkv.transfer.descriptors import MAX_INDEX, ReadPlan, plan, table_rows
from tests.transfer.pools import tiny_format

FMT = tiny_format()


def tiny_map(kind: PlacementKind, num_pages: int, start: int) -> PoolMap:
    placement = {"page_major": page_major, "layer_major": layer_major}[kind](FMT, num_pages)
    # a gap between buffers, so that neighbours never merge by chance
    addresses = np.cumsum([start, *(size + 4096 for size in placement.buffer_bytes[:-1])]).tolist()
    return pool_map(FMT, placement, addresses, start - 65536, 64, "DRAM", 0)


def described(table: UInt64Array, indices: np.ndarray) -> list[tuple[int, int]]:
    """(address, length) of strided descriptors, counted through row after row."""
    counts = table[:, 4].astype(np.int64)
    row = np.searchsorted(np.cumsum(counts), indices, side="right")
    within = indices - (np.cumsum(counts) - counts)[row]
    return [(int(table[r, 0]) + int(w) * int(table[r, 3]), int(table[r, 1])) for r, w in zip(row, within, strict=True)]


def bytewise(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> set[tuple[int, int, int]]:
    """(local, remote, length) joined wherever both sides go on, so that cuts don't matter."""
    joined: list[list[int]] = []
    for (local, length), (remote, same) in sorted(pairs):
        assert length == same
        if joined and joined[-1][0] + joined[-1][2] == local and joined[-1][1] + joined[-1][2] == remote:
            joined[-1][2] += length
        else:
            joined.append([local, remote, length])
    return {(a, b, n) for a, b, n in joined}


def expected(local: PoolMap, remote: PoolMap, pages: list[tuple[int, int]]) -> set[tuple[int, int, int]]:
    return bytewise(
        [
            ((mine.base + to * mine.stride, mine.length), (theirs.base + source * theirs.stride, theirs.length))
            for to, source in pages
            for mine, theirs in zip(local.segments, remote.segments, strict=True)
        ]
    )


def columns(pages: list[tuple[int, int]], num_pages: int) -> tuple[LocalPages, RemotePages]:
    local, remote = ([p[i] for p in pages] for i in (0, 1))
    return LocalPages.checked(local, num_pages), RemotePages.checked(remote, num_pages)


KINDS = st.sampled_from(["page_major", "layer_major"])
PAIRS = st.tuples(st.permutations(range(1, 12)), st.permutations(range(1, 12)), st.integers(1, 11)).map(
    lambda t: list(zip(t[0], t[1], strict=True))[: t[2]]
)


@given(KINDS, KINDS, PAIRS)
def test_indices_name_the_bytes_of_the_pages(
    mine: PlacementKind, theirs: PlacementKind, pages: list[tuple[int, int]]
) -> None:
    local, remote = tiny_map(mine, 12, 1 << 20), tiny_map(theirs, 13, 1 << 30)
    reading = plan(local, remote)
    local_indices, remote_indices = reading.indices(*columns(pages, 12))
    assert local_indices.dtype == remote_indices.dtype == np.int32
    got = zip(
        described(reading.local_table(), local_indices),
        described(reading.remote_table(), remote_indices),
        strict=True,
    )
    assert bytewise(list(got)) == expected(local, remote, pages)
    assert reading.page_bytes == FMT.page_bytes


@given(KINDS, KINDS, PAIRS)
def test_runs_counts_what_is_left_after_merging(
    mine: PlacementKind, theirs: PlacementKind, pages: list[tuple[int, int]]
) -> None:
    reading = plan(tiny_map(mine, 12, 1 << 20), tiny_map(theirs, 12, 1 << 30))
    local, remote = columns(pages, 12)
    sides = zip(
        described(reading.local_table(), reading.indices(local, remote)[0]),
        described(reading.remote_table(), reading.indices(local, remote)[1]),
        strict=True,
    )
    runs, previous = 0, (0, 0)
    for (address, length), (source, _) in sides:
        runs += previous != (address, source)
        previous = (address + length, source + length)
    assert reading.runs(local, remote) == runs


def test_page_major_on_both_sides_is_one_piece() -> None:
    both = plan(tiny_map("page_major", 8, 1 << 20), tiny_map("page_major", 9, 1 << 30))
    assert len(both.pieces) == 1
    assert both.local_table().tolist() == [[1 << 20, FMT.page_bytes, 0, FMT.page_bytes, 8]]
    mixed = plan(tiny_map("page_major", 8, 1 << 20), tiny_map("layer_major", 8, 1 << 30))
    assert len(mixed.pieces) == len(FMT.segments)


def changed(segments: tuple[SegmentMap, ...], at: int, **facts: object) -> tuple[SegmentMap, ...]:
    old = segments[at]
    new = SegmentMap(str(facts.get("name", old.name)), int(str(facts.get("length", old.length))), old.base, old.stride)
    return (*segments[:at], new, *segments[at + 1 :])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda s: changed(s, 3, name="main.9"), ["segments[3]"]),
        (lambda s: changed(s, 0, length=36864), ["segments[0]"]),
        (lambda s: s[:-1], ["segments[11]"]),
        (lambda s: (*s[:8], s[9], s[8], *s[10:]), ["segments[8]", "segments[9]"]),
    ],
)
def test_segments_that_differ_are_named(spoil: object, named: list[str]) -> None:
    mine, theirs = tiny_map("page_major", 8, 1 << 20), tiny_map("page_major", 8, 1 << 30)
    assert callable(spoil)
    other = PoolMap(8, theirs.page_tokens, spoil(theirs.segments), theirs.table_base, 64, "DRAM", 0, theirs.regions)
    with pytest.raises(ContractMismatch) as caught:
        plan(mine, other)
    assert [d.field for d in caught.value.differences] == named


def test_page_tokens_that_differ_are_named() -> None:
    mine, theirs = tiny_map("page_major", 8, 1 << 20), tiny_map("page_major", 8, 1 << 30)
    other = PoolMap(8, 128, theirs.segments, theirs.table_base, 64, "DRAM", 0, theirs.regions)
    with pytest.raises(ContractMismatch, match="page_tokens: mine 64, theirs 128"):
        plan(mine, other)


def test_more_descriptors_than_an_index_can_name_are_refused() -> None:
    num_pages = MAX_INDEX // 2 + 1
    segments = (SegmentMap("main.0", 8, 0, 16), SegmentMap("main.1", 8, 1 << 50, 16))
    regions = (Region(0, 16 * num_pages), Region(1 << 50, 16 * num_pages))
    huge = PoolMap(num_pages, 64, segments, 0, 64, "DRAM", 0, regions)
    with pytest.raises(BoundsError, match="descriptors of a pool"):
        plan(huge, huge)


@pytest.mark.parametrize(
    ("local", "remote", "match"),
    [([1, 2], [3], "as many as local"), ([1, 9], [1, 2], "local page"), ([1, 2], [1, 9], "remote page")],
)
def test_columns_that_dont_fit_are_refused(local: list[int], remote: list[int], match: str) -> None:
    reading: ReadPlan = plan(tiny_map("page_major", 8, 1 << 20), tiny_map("page_major", 8, 1 << 30))
    with pytest.raises(BoundsError, match=match):
        reading.check(LocalPages.checked(local, 99), RemotePages.checked(remote, 99))


def test_table_rows() -> None:
    pool = tiny_map("page_major", 8, 1 << 20)
    assert table_rows(pool, 64).tolist() == [[pool.table_base, 64, 0, 64, 8]]
    short = PoolMap(8, 64, pool.segments, pool.table_base, 32, "DRAM", 0, pool.regions)
    with pytest.raises(BoundsError, match="page-table row"):
        table_rows(short, 64)
