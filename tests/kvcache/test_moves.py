"""Moves of pages by themselves; the manager's machine (test_manager_laws.py) makes them in any order."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import CapacityError, IntegrityError
from pdkv.kvcache.moves import PageMoves
from pdkv.kvcache.ownership import CACHED, PageState, claim
from pdkv.replay.pool import pool_without_bytes
from tests.kvcache.chains import long_chain

PAGES = 6


def with_cache(pages: int) -> PageMoves:
    """So many pages sealed in the tree, in the order of their numbers; the others are free."""
    moves = PageMoves(pool_without_bytes(PAGES))
    holder = moves._new_holder()
    taken, hashes = moves._take(pages, holder), long_chain("prompt", pages)
    moves.tree.insert(hashes, taken.array)
    moves.table.seal(taken, hashes)
    moves.ownership.move(taken, claim(PageState.RESERVED, holder), CACHED)
    return moves


def test_free_pages_go_before_cached_ones_and_no_evicted_page_is_what_it_was() -> None:
    moves = with_cache(4)
    cached = moves.tree.match(long_chain("prompt", 4)).pages
    before = moves.table._generation.copy()
    free = moves._take(2, moves._new_holder())
    assert moves.evicted_pages == 0
    assert not set(free) & set(cached.tolist())
    evicted = moves._take(3, moves._new_holder())
    assert (moves.evicted_pages, len(moves.tree)) == (3, 1)
    assert set(evicted) <= set(cached.tolist())
    assert not moves.table.sealed(evicted).any()
    assert (moves.table._generation[evicted.array] != before[evicted.array]).all()
    assert moves.ownership.census()["reserved"] == 5


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    moves = with_cache(4)
    with pytest.raises(CapacityError):
        moves._take(PAGES + 1, moves._new_holder())
    assert (moves.ownership.census()["free"], len(moves.tree)) == (2, 4)


def test_a_sealed_page_that_is_freed_gets_another_generation_and_one_that_is_not_does_not() -> None:
    moves = with_cache(0)
    holder = moves._new_holder()
    pages = moves._take(2, holder)
    moves.table.seal(pages[:1], long_chain("tail", 1))
    before = moves.table._generation.copy()
    moves._free(pages, claim(PageState.RESERVED, holder))
    assert np.flatnonzero(moves.table._generation != before).tolist() == [pages.array[0]]
    assert moves.allocator.free_count == PAGES


def test_a_page_of_somebody_else_is_not_freed() -> None:
    moves = with_cache(0)
    pages = moves._take(2, moves._new_holder())
    with pytest.raises(IntegrityError):
        moves._free(pages, claim(PageState.RESERVED, moves._new_holder()))
    assert moves.allocator.free_count == PAGES - 2
