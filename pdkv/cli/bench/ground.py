"""What a benchmark's source and sink have in common: prompts, the order of page ids, forgetting, CPU time.

Guarantees: nothing of the path that is measured: pages are taken, hashed, read and committed by the code that serves.
"""

from __future__ import annotations

import os
import resource

import numpy as np

from pdkv.ids import LocalPages, PageHashes, UInt32Array
from pdkv.kvcache.allocator import PageAllocator
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.page_digest import ALGORITHMS, NO_DIGEST
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.rpc.bench import BenchPrompt, Usage


class OrderedAllocator(PageAllocator):
    """Hands out the same pages as any other, in random order when it is told to.

    Where page i + 1 hardly ever follows page i, no two pages of a read can be one descriptor.
    """

    def __init__(self, num_pages: int, *, seed: int = 0) -> None:
        super().__init__(num_pages)
        self._random = np.random.default_rng(seed)
        self.scattered = False

    def allocate(self, count: int) -> LocalPages:
        pages = super().allocate(count)
        return LocalPages.kept(self._random.permutation(pages.array)) if self.scattered else pages


def ordered(manager: CacheManager) -> OrderedAllocator:
    """Let a manager that has given out no page yet take pages in either order."""
    manager.allocator = allocator = OrderedAllocator(manager.pool.num_pages)
    return allocator


def prompt_tokens(prompt: BenchPrompt, page_tokens: int, vocab_size: int) -> UInt32Array:
    """uint32: the full pages and one token more, which is the tail. A longer prompt of a seed begins with a shorter."""
    random = np.random.default_rng(prompt.seed)
    return random.integers(0, vocab_size, prompt.pages * page_tokens + 1, dtype=np.uint32)


def forget(manager: CacheManager) -> None:
    """Evict every cached page, as a request for the whole pool would. Raises `CapacityError` if one is in use."""
    manager.end(manager.reserve(PageHashes(b""), manager.pool.num_pages - 1, max_hit_pages=0))


def switch_digests(verifier: Verifier, *, on: bool) -> None:
    """From the next page on."""
    verifier.algorithm = ALGORITHMS[0] if on else NO_DIGEST


def huge_share(pool: SlotPool) -> float:
    """How much of a pool is on huge pages now, 0 to 1: copies over CMA are twice as fast there."""
    return min(pool.memory.huge_page_bytes() / sum(pool.memory.buffer_bytes), 1.0)


def usage() -> Usage:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(used.ru_utime + used.ru_stime, resident)
