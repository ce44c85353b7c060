"""The registered array of page-table rows: what a peer reads after a page to learn whether it was still that page.

Guarantees: rows are 64-byte aligned, one cache line each; a generation is published, behind a full store fence, before
`bump` returns, so before any byte of the page can change; a bumped row has neither hash nor state; a hash is written
only into a bumped row, and is complete before the row says sealed. Generations start at a random 64-bit value, so that
two lives of a node don't agree by chance, and wrap at 2^64. Not thread-safe: one owner.

    0         8                              40   41                64
    | gen u64 | page hash, 32 bytes          | st | zero            |

The fence. A reader takes the page first and the row second, so it must be impossible that it sees a new byte and the
old generation: the generation's store has to be visible before any later store into the page. A numpy store is a
plain one. x86 keeps plain stores in order, but a large copy may use non-temporal stores, which are exempt; ARM keeps
none in order. CPython offers no fence, and an interpreter's distance between two stores is luck, not order. `_fence`
releases a lock and takes it again, twice, which is one on both:
x86, because taking or releasing is a locked instruction, and those also drain the write-combining buffers; ARMv8,
because the stores before a release come before it, what follows an acquire comes after it, and a release is ordered
before a later acquire (RCsc; "[L]; po; [A]" in Arm's memory model, which is multi-copy atomic, so the order holds for
every observer, including devices that are I/O-coherent with the cores, as on any server ARM). Whoever writes the page
from elsewhere adds an order of its own: another thread by its queue's lock, a NIC or GPU by its doorbell's barrier.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError
from pdkv.ids import HASH_BYTES, HASH_ITEM, LocalPages, PageHashes, UInt64Array

ROW_BYTES = 64
SEALED = 1
ROW = np.dtype(
    {
        "names": ["generation", "hash", "state"],
        "formats": ["<u8", (np.uint8, (HASH_BYTES,)), np.uint8],
        "offsets": [0, 8, 8 + HASH_BYTES],
        "itemsize": ROW_BYTES,
    }
)
# the same with a hash as one opaque item: numpy moves those three times faster than rows of bytes
_ROW_OF_ITEMS = np.dtype({"names": ["hash"], "formats": [HASH_ITEM], "offsets": [8], "itemsize": ROW_BYTES})
_NAME_ITEM = np.dtype(f"V{HASH_BYTES + 1}")
"""Hash and state at once."""
_ROW_OF_NAMES = np.dtype({"names": ["name"], "formats": [_NAME_ITEM], "offsets": [8], "itemsize": ROW_BYTES})
_NO_NAME = np.zeros((), _NAME_ITEM)
_ONE = np.uint64(1)

_fence_lock = threading.Lock()


def _fence() -> None:
    """Every store before is visible before any store after, to cores and coherent devices; see the module."""
    _fence_lock.acquire()
    _fence_lock.release()
    _fence_lock.acquire()
    _fence_lock.release()


class PageTable:
    """Rows of all pages of a pool, the sink's included (row 0: never sealed, good for a probe)."""

    stride = ROW_BYTES

    def __init__(self, num_pages: int, *, first_generation: int | None = None) -> None:
        """Raises `BoundsError` below one page, or on a first generation outside uint64."""
        if num_pages < 1:
            raise BoundsError("page table rows", num_pages, "at least 1")
        first = secrets.randbits(64) if first_generation is None else first_generation
        if not 0 <= first < 1 << 64:
            raise BoundsError("first generation", first, "an unsigned 64-bit number")
        # Memory of its own, page-aligned: it gets registered, and pinned pages shouldn't hold anybody else's data.
        # Shared, so that a fork doesn't move the owner's side to other physical pages than those a NIC knows.
        memory = mmap.mmap(-1, num_pages * ROW_BYTES)
        self._rows: npt.NDArray[Any] = np.frombuffer(memory, ROW)
        self._generation: UInt64Array = self._rows["generation"]
        self._hash: npt.NDArray[np.void] = self._rows.view(_ROW_OF_ITEMS)["hash"]
        self._state: npt.NDArray[np.uint8] = self._rows["state"]
        self._name: npt.NDArray[np.void] = self._rows.view(_ROW_OF_NAMES)["name"]
        self._generation[:] = first
        _fence()

    @property
    def num_pages(self) -> int:
        return int(self._rows.size)

    @property
    def address(self) -> int:
        """Of row 0; stable for the table's life. The memory goes with the last view of it."""
        return int(self._rows.ctypes.data)

    @property
    def rows(self) -> npt.NDArray[Any]:
        """Read-only view of dtype `ROW`, one entry a page."""
        view = self._rows.view()
        view.flags.writeable = False
        return view

    def generations(self, pages: LocalPages) -> UInt64Array:
        """uint64 [pages], a copy."""
        return self._generation[pages.array]

    def sealed(self, pages: LocalPages) -> npt.NDArray[np.bool_]:
        """bool [pages]."""
        return np.equal(self._state[pages.index], SEALED)

    def hashes(self, pages: LocalPages) -> PageHashes:
        """The rows' hashes; 32 zero bytes for a page that is not sealed."""
        return PageHashes(self._hash[pages.array].tobytes())

    def bump(self, pages: LocalPages) -> None:
        """Void what peers know of these pages. After it, and only after it, may their bytes change."""
        ids = pages.index
        self._generation[ids] += _ONE
        _fence()
        self._name[ids] = _NO_NAME
        _fence()

    def seal(self, pages: LocalPages, hashes: PageHashes) -> None:
        """Name pages whose bytes are final. Raises `BoundsError`, writing nothing, on a page that is sealed already
        (it has to be bumped first) or unless there is one hash a page."""
        if len(pages) != len(hashes):
            raise BoundsError("hashes to seal", len(hashes), f"one for each of {len(pages)} pages")
        ids = pages.index
        already = self._state[ids] == SEALED
        if np.count_nonzero(already):
            raise BoundsError("page to seal", int(pages.array[already][0]), "a page bumped since it was sealed last")
        self._hash[ids] = hashes.column()
        _fence()
        self._state[ids] = SEALED
        _fence()
