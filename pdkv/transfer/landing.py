"""Where page-table rows land, and what they must say.

Guarantees: rows given out together are nobody else's until they are given back; a page counts as fresh only if both
its generation and its hash are the announced ones.
"""

from __future__ import annotations

import numpy as np

from pdkv.errors import BoundsError
from pdkv.ids import HASH_BYTES, Int32Array, PageHashes, UInt64Array
from pdkv.transfer.orders import BoolArray

ROW_BYTES = 64
_WORD = np.dtype("<u8")
_HASH_WORDS = HASH_BYTES // _WORD.itemsize
"""A row begins with its generation, a word; the words of its hash follow."""


class LandingRows:
    """A private array of 64-byte rows that reads of page-table rows go to."""

    def __init__(self, rows: int) -> None:
        memory = np.zeros(rows * ROW_BYTES + ROW_BYTES, np.uint8)
        skip = -memory.ctypes.data % ROW_BYTES
        self._bytes = memory[skip : skip + rows * ROW_BYTES]
        self._words: UInt64Array = self._bytes.view(_WORD).reshape(rows, ROW_BYTES // _WORD.itemsize)
        self._free = np.ones(rows, np.bool_)
        self._free_count = rows
        self._next = 0
        """Where free rows are looked for first: after those that were taken last."""

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    @property
    def length(self) -> int:
        """Bytes."""
        return int(self._bytes.nbytes)

    @property
    def free(self) -> int:
        return self._free_count

    def table(self) -> UInt64Array:
        """uint64 [1, 5] strided descriptor table; index = row."""
        return np.array([(self.address, ROW_BYTES, 0, ROW_BYTES, self._free.size)], np.uint64)

    def take(self, count: int) -> Int32Array:
        """`count` rows (at least 1), ascending, neighbours if those next to the last ones are free.

        Raises `BoundsError` if so many are not free.
        """
        if count > self._free_count:
            raise BoundsError("landing rows", count, f"at most {self._free_count} free now")
        if self._free_count == self._free.size or self._next + count > self._free.size:
            self._next = 0  # the same rows again stay in the caches
        first, last = self._next, self._next + count
        if np.count_nonzero(self._free[first:last]) == count:
            rows = np.arange(first, last, dtype=np.int32)
        else:
            rows = np.flatnonzero(self._free)[:count].astype(np.int32)
        self._next = int(rows[-1]) + 1
        self._free[rows] = False
        self._free_count -= count
        return rows

    def give_back(self, rows: Int32Array) -> None:
        """Only when nothing can land in them any more."""
        self._free_count += int(np.count_nonzero(~self._free[rows]))
        self._free[rows] = True

    def stale(self, rows: Int32Array, generations: UInt64Array, hashes: PageHashes) -> BoolArray:
        """bool [n]: the row that landed is not the announced one."""
        landed, due = self._words[rows.astype(np.intp)], np.frombuffer(hashes.raw, _WORD).reshape(-1, _HASH_WORDS)
        differs: BoolArray = landed[:, 0] != generations
        for word in range(_HASH_WORDS):  # columns: three times as fast as whole rows
            differs |= landed[:, 1 + word] != due[:, word]
        return differs
