"""Checksums of a page's bytes, one for each cache.

Guarantees: the digest of a (page, group) covers every byte of that group in the page, in segment order, and nothing
else: so it is the same in any placement, on any device and in a pool of any size, and names the cache that is wrong.
A digest identifies bytes, never tokens, and is no protection against somebody who forges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, UInt64Array
from pdkv.kvcache.device_digest import device_digests
from pdkv.kvcache.pool import SlotPool

ALGORITHMS = ("xxh3_64",)
"""What a contract may offer."""
NO_DIGEST = "none"
"""Zeros for every page, where a pair agreed to check nothing."""
_GROUPS = tuple(Group)


def digest_pages(pool: SlotPool, pages: LocalPages, algorithm: str = "xxh3_64") -> UInt64Array:
    """uint64 [pages, 2]: xxh3_64 of the main bytes, of the index bytes. Raises `ConfigError` on another algorithm.

    In host memory one call a (page, cache) where a group is one run (page-major), else a running hash over its pieces;
    the interpreter is let go for the length of each run. In a device's memory all pages at once, there.
    """
    check_algorithm(algorithm)
    out = np.zeros((len(pages), len(_GROUPS)), np.uint64)
    if algorithm == NO_DIGEST:
        return out
    for column, group in enumerate(_GROUPS):
        out[:, column] = _group_digests(pool, pages, group)
    return out


class PageRows:
    """Pages of a host's pool in which each cache of a page is one run: a few are digested at the cost of their bytes.

    What `digest_pages` does before its first page takes as long as half a page.
    """

    def __init__(self, rows: tuple[npt.NDArray[np.uint8], ...]) -> None:
        """`rows` are uint8 [num_pages, bytes], one array a group."""
        self._rows = rows

    @classmethod
    def of(cls, pool: SlotPool) -> PageRows | None:
        """None for another pool."""
        pieces = [pool.pieces(group) for group in Group]
        if pool.memory.memory != "DRAM" or any(len(each) != 1 for each in pieces):
            return None
        return cls(tuple(pool.piece_view(each[0]).numpy() for each in pieces))

    def digests(self, pages: list[int]) -> Iterator[list[int]]:
        """The columns of `digest_pages`: a row a page would take twice the time for tiny ones."""
        return (list(map(xxhash.xxh3_64_intdigest, map(rows.__getitem__, pages))) for rows in self._rows)


def check_algorithm(algorithm: str) -> None:
    """Raises `ConfigError` unless `digest_pages` knows it."""
    if algorithm not in (*ALGORITHMS, NO_DIGEST):
        raise ConfigError("digest algorithm", algorithm, ", ".join((*ALGORITHMS, NO_DIGEST)))


def _group_digests(pool: SlotPool, pages: LocalPages, group: Group) -> list[int] | UInt64Array:
    views = [pool.piece_view(piece) for piece in pool.pieces(group)]
    if views and pool.memory.memory == "VRAM" and (found := device_digests(views, pages)) is not None:
        return found
    if not views:
        return [xxhash.xxh3_64_intdigest(b"")] * len(pages)  # an engine without a second cache
    columns = [_page_bytes(view, pages) for view in views]
    if len(columns) == 1:
        return list(map(xxhash.xxh3_64_intdigest, columns[0]))
    digests = []
    for runs in zip(*columns, strict=True):
        running = xxhash.xxh3_64()
        for run in runs:
            running.update(run)
        digests.append(running.intdigest())
    return digests


def _page_bytes(view: torch.Tensor, pages: LocalPages) -> Iterator[Any]:
    """Each page's row of a [num_pages, length] view, uint8; a device's come through the host, one page at a time.

    Arrays as they are: a memoryview of each would cost as much again, and mypy takes only those for buffers.
    """
    if view.device.type == "cpu":
        rows, ids = view.numpy(), pages.array.tolist()
        if ids and ids == list(range(ids[0], ids[0] + len(ids))):
            return iter(rows[ids[0] : ids[0] + len(ids)])  # a third less for tiny pages
        return map(rows.__getitem__, ids)
    return (view[page].cpu().numpy() for page in pages)
