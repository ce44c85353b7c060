"""Where page-table rows land, and what they must say.

Guarantees: rows given out together are nobody else's until they are given back; a page counts as fresh only if both
its generation and its hash are the announced ones.
"""

from __future__ import annotations

import numpy as np

from pdkv.errors import BoundsError
from pdkv.ids import HASH_BYTES, Int32Array, PageHashes, UInt64Array
from pdkv.transfer.orders import BoolArray

ROW = np.dtype([("generation", "<u8"), ("hash", np.uint8, HASH_BYTES)])
"""What a reader needs of a 64-byte page-table row: its first 40 bytes."""
ROW_BYTES = 64


class LandingRows:
    """A private array of 64-byte rows that reads of page-table rows go to."""

    def __init__(self, rows: int) -> None:
        memory = np.zeros(rows * ROW_BYTES + ROW_BYTES, np.uint8)
        skip = -memory.ctypes.data % ROW_BYTES
        self._bytes = memory[skip : skip + rows * ROW_BYTES]
        self._rows = self._bytes.reshape(rows, ROW_BYTES)[:, : ROW.itemsize].view(ROW)[:, 0]
        self._free = np.ones(rows, np.bool_)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    @property
    def length(self) -> int:
        """Bytes."""
        return int(self._bytes.nbytes)

    @property
    def free(self) -> int:
        return int(np.count_nonzero(self._free))

    def table(self) -> UInt64Array:
        """uint64 [1, 5] strided descriptor table; index = row."""
        return np.array([(self.address, ROW_BYTES, 0, ROW_BYTES, self._free.size)], np.uint64)

    def take(self, count: int) -> Int32Array:
        """`count` rows, ascending. Raises `BoundsError` if so many are not free."""
        rows = np.flatnonzero(self._free)[:count].astype(np.int32)
        if rows.size < count:
            raise BoundsError("landing rows", count, f"at most {rows.size} free now")
        self._free[rows] = False
        return rows

    def give_back(self, rows: Int32Array) -> None:
        """Only when nothing can land in them any more."""
        self._free[rows] = True

    def stale(self, rows: Int32Array, generations: UInt64Array, hashes: PageHashes) -> BoolArray:
        """bool [n]: the row that landed is not the announced one."""
        landed = self._rows[rows]
        same_hash = (landed["hash"] == hashes.rows()).all(axis=1)
        fresh: BoolArray = (landed["generation"] == generations) & same_hash
        return ~fresh
