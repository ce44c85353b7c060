"""Rows as a peer reads them: generations, hashes, states, and the order in which they change."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError
from pdkv.ids import LocalPages, PageHashes
from pdkv.kvcache import page_table
from pdkv.kvcache.page_hash import chain
from pdkv.kvcache.page_table import ROW_BYTES, SEALED, PageTable

HASHES = chain(range(64 * 8))


def pages(*ids: int, of: int = 16) -> LocalPages:
    return LocalPages.checked(np.array(ids, np.int32), of)


def raw_row(table: PageTable, page: int) -> tuple[int, bytes, int, bytes]:
    """(generation, hash, state, padding) as read from memory, not through the table."""
    row = ctypes.string_at(table.address + page * table.stride, ROW_BYTES)
    return struct.unpack("<Q32sB23s", row)


def test_rows_are_aligned_cache_lines() -> None:
    table = PageTable(16)
    assert table.stride == 64
    assert table.address % 64 == 0
    assert table.num_pages == 16


def test_what_is_sealed_is_in_memory() -> None:
    table = PageTable(16, first_generation=41)
    table.bump(pages(3, 9))
    table.seal(pages(3, 9), HASHES.part(0, 2))
    assert raw_row(table, 3) == (42, HASHES.at(0), SEALED, bytes(23))
    assert raw_row(table, 9) == (42, HASHES.at(1), SEALED, bytes(23))
    assert raw_row(table, 4) == (41, bytes(32), 0, bytes(23))
    assert table.hashes(pages(9, 3)) == PageHashes(HASHES.at(1) + HASHES.at(0))
    assert table.sealed(pages(3, 4)).tolist() == [True, False]
    assert table.generations(pages(3, 4)).tolist() == [42, 41]


def test_bump_moves_the_generation_and_clears_hash_and_state() -> None:
    table = PageTable(16, first_generation=7)
    table.seal(pages(5), HASHES.part(0, 1))
    table.bump(pages(5))
    assert raw_row(table, 5) == (8, bytes(32), 0, bytes(23))


def test_generation_wraps() -> None:
    table = PageTable(4, first_generation=2**64 - 1)
    table.bump(pages(1, of=4))
    assert table.generations(pages(1, 2, of=4)).tolist() == [0, 2**64 - 1]


def test_two_lives_start_at_different_generations() -> None:
    assert len({int(PageTable(2).generations(pages(1, of=2))[0]) for _ in range(8)}) == 8


def test_generations_are_a_copy_and_rows_read_only() -> None:
    table = PageTable(16, first_generation=1)
    table.generations(pages(1))[:] = 9
    assert table.generations(pages(1)).tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        table.rows["state"][1] = 1


def test_the_generation_is_fenced_before_anything_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first fence of a bump a reader may see the new generation with the old hash, never the reverse."""
    table = PageTable(16, first_generation=1)
    table.seal(pages(2), HASHES.part(0, 1))
    seen: list[tuple[int, bytes, int]] = []
    monkeypatch.setattr(page_table, "_fence", lambda: seen.append(raw_row(table, 2)[:3]))
    table.bump(pages(2))
    assert seen == [(2, HASHES.at(0), SEALED), (2, bytes(32), 0)]
    seen.clear()
    table.seal(pages(2), HASHES.part(1, 2))
    assert seen == [(2, HASHES.at(1), 0), (2, HASHES.at(1), SEALED)]


def test_a_sealed_page_is_not_sealed_again_without_a_bump() -> None:
    table = PageTable(16)
    table.seal(pages(1, 2), HASHES.part(0, 2))
    with pytest.raises(BoundsError, match=r"page to seal: 2; allowed: a page bumped"):
        table.seal(pages(3, 2), HASHES.part(2, 4))
    assert table.sealed(pages(3)).tolist() == [False]
    table.bump(pages(2))
    table.seal(pages(3, 2), HASHES.part(2, 4))
    assert table.hashes(pages(1, 2, 3)) == PageHashes(HASHES.at(0) + HASHES.at(3) + HASHES.at(2))


def test_one_hash_a_page() -> None:
    with pytest.raises(BoundsError, match="one for each of 2 pages"):
        PageTable(16).seal(pages(1, 2), HASHES.part(0, 1))


def test_impossible_tables_are_refused() -> None:
    with pytest.raises(BoundsError):
        PageTable(0)
    with pytest.raises(BoundsError):
        PageTable(2, first_generation=2**64)


@given(st.lists(st.sets(st.integers(1, 7)), max_size=6))
def test_generations_count_bumps(rounds: list[set[int]]) -> None:
    table = PageTable(8, first_generation=2**64 - 3)
    for ids in rounds:
        table.bump(pages(*ids, of=8))
    counts = [sum(page in ids for ids in rounds) for page in range(1, 8)]
    assert table.generations(pages(*range(1, 8), of=8)).tolist() == [(2**64 - 3 + n) % 2**64 for n in counts]
    assert table.rows["generation"][0] == 2**64 - 3
