"""Prompts, orders of pages and forgetting, as source and sink share them."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from pdkv.cli.bench.ground import OrderedAllocator, forget, ordered, prompt_tokens, switch_digests, usage
from pdkv.errors import CapacityError
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.page_hash import chain
from pdkv.kvcache.verifier import Verifier
from pdkv.rpc.bench import BenchPrompt
from tests.kvcache.pools import random_pool, tiny_format

PAGES = 40


def cached(manager: CacheManager, pages: int) -> PageHashes:
    """A prompt in the tree."""
    hashes = chain(prompt_tokens(BenchPrompt(1, pages), 64, 100))
    reservation = manager.reserve(hashes, pages, max_hit_pages=pages)
    manager.commit(Verifier(manager.pool).seal(reservation.id, 0, reservation.sequence, hashes))
    manager.end(reservation)
    return hashes


def test_a_longer_prompt_begins_with_a_shorter_one_of_the_same_seed() -> None:
    long, short = (prompt_tokens(BenchPrompt(7, pages), 64, 150_000) for pages in (16, 3))
    assert (long.size, short.size) == (16 * 64 + 1, 3 * 64 + 1)
    assert (long[: short.size] == short).all()
    assert long.max() < 150_000
    assert (prompt_tokens(BenchPrompt(8, 3), 64, 150_000) != short).any()


def test_pages_come_in_random_order_when_told_and_are_the_same_ones() -> None:
    plain, other = OrderedAllocator(1001), OrderedAllocator(1001)
    other.scattered = True
    in_order, scattered = plain.allocate(1000).array, other.allocate(1000).array
    assert (np.diff(in_order) == 1).all()
    assert sorted(scattered) == in_order.tolist()
    assert np.count_nonzero(np.diff(scattered) == 1) < 10
    other.check()


def test_everything_that_is_cached_can_be_forgotten() -> None:
    manager = CacheManager(random_pool(tiny_format(), PAGES))
    ordered(manager).scattered = True
    hashes = cached(manager, 20)
    forget(manager)
    manager.check()
    assert manager.census()["free"] == PAGES - 1
    assert not manager.tree.match(hashes).pages.size


def test_what_is_in_use_is_not_forgotten() -> None:
    manager = CacheManager(random_pool(tiny_format(), PAGES))
    hashes = cached(manager, 20)
    held = manager.reserve(hashes, 20, max_hit_pages=20)
    with pytest.raises(CapacityError):
        forget(manager)
    manager.end(held)
    forget(manager)


def test_digests_are_switched_from_the_next_page_on() -> None:
    verifier = Verifier(random_pool(tiny_format(), 4))
    switch_digests(verifier, on=False)
    assert not verifier.checks_digests
    switch_digests(verifier, on=True)
    assert verifier.checks_digests


def test_usage_grows_with_what_is_done() -> None:
    # of its own, as the heap may have been that large before
    before, held = usage(), mmap.mmap(-1, 50 << 20)
    held.write(bytes(len(held)))
    while usage().cpu_s <= before.cpu_s:
        held.seek(0)
        held.write(bytes(1 << 20))
    assert usage().resident_bytes > before.resident_bytes + (40 << 20)
    held.close()
