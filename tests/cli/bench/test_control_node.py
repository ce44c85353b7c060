"""The nodes of the benchmark: tiny pages, and what their process says of itself."""

from __future__ import annotations

import asyncio
import multiprocessing

import numpy as np
import pytest

from pdkv.cli.bench.control_node import PAGE_TOKENS, _scatter, received, tiny_pages
from pdkv.errors import PeerLost
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool


def test_pages_are_tiny_and_have_both_caches():
    fmt = tiny_pages()
    assert (fmt.page_bytes, fmt.main_bytes, fmt.index_bytes) == (512, 256, 256)
    assert fmt.page_tokens == fmt.index_tokens == PAGE_TOKENS
    pool = SlotPool.create(fmt, 4)
    manager = CacheManager(pool)
    pages = manager.allocator.allocate(2)
    before = digest_pages(pool, pages)
    pool.index_scales(0)[int(pages.array[1])] = 1
    assert (digest_pages(pool, pages) != before).tolist() == [[False, False], [False, True]]


def test_scattered_pages_have_no_free_neighbour():
    manager = CacheManager(SlotPool.create(tiny_pages(), 41))
    _scatter(manager)
    manager.check()
    free = np.flatnonzero(manager.allocator._free)
    assert free.size == 20
    assert (np.diff(free) > 1).all()


def test_who_has_ended_is_told():
    async def scenario() -> None:
        ours, theirs = multiprocessing.Pipe()
        theirs.send("address")
        assert await received(ours) == "address"
        theirs.close()
        with pytest.raises(PeerLost, match="has ended"):
            await received(ours)

    asyncio.run(scenario())
