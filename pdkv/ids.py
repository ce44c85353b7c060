"""Strong types for everything that would be a bare int or bytes.

Guarantees: a page id that reached a `LocalPages` or `RemotePages` was checked against the bounds of the pool it
belongs to (or comes from this node's own allocator or tree, which `check` recounts), is never the write sink (page 0)
and stands there once; local and remote ids are different types, so a
peer's page can't be used as one's own; a `PageHashes` always holds whole 32-byte hashes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType, Self

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError

NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", str)
"""128 random bits as 32 hex digits: one life of a node's process."""
RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
ReservationId = NewType("ReservationId", int)
PageHash = NewType("PageHash", bytes)
"""32 bytes: identity of a page's tokens and of all tokens before them. Not a checksum of its bytes."""

SINK_PAGE = 0
"""Padding tokens are written here; it is never handed out, shipped or read."""
HASH_BYTES = 32
HASH_ITEM = np.dtype((np.void, HASH_BYTES))

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(16))


@dataclass(frozen=True, slots=True)
class PeerName:
    """A node in one of its lives; NIXL agents carry this name, so that a restarted node is a new peer."""

    node: NodeId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.node}#{self.incarnation}"


class _Pages:
    """Checked page ids of one pool, in order: an immutable int32 column."""

    __slots__ = ("_ids", "_index")

    def __init__(self, ids: Int32Array) -> None:
        """Private to this module: outside it, ids come in through `checked`."""
        ids.setflags(write=False)
        self._ids = ids
        self._index: npt.NDArray[np.intp] | None = None

    @classmethod
    def checked(cls, ids: npt.ArrayLike, num_pages: int) -> Self:
        """Raises `BoundsError` on an id outside [1, num_pages), on a repeated one, or on anything not an integer."""
        wide = np.asarray(ids)
        if wide.size == 0:
            return cls(np.empty(0, np.int32))
        if wide.ndim != 1 or wide.dtype.kind not in "iu":
            raise BoundsError("page ids", f"{wide.dtype} array of shape {wide.shape}", "a flat integer column")
        low, high = int(wide.min()), int(wide.max())
        if low <= SINK_PAGE or high >= num_pages:
            raise BoundsError("page id", low if low <= SINK_PAGE else high, f"1 to {num_pages - 1}")
        if wide.size > 1:
            ordered = np.sort(wide)
            repeated = ordered[1:][ordered[1:] == ordered[:-1]]
            if repeated.size:
                raise BoundsError("page id", int(repeated[0]), "each page once")
        return cls(wide.astype(np.int32))

    @classmethod
    def kept(cls, ids: Int32Array) -> Self:
        """Ids that this process's own bookkeeping has kept, under the same guarantees: not checked again."""
        return cls(ids)

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty(0, np.int32))

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Columns of one pool, one after the other. Raises `BoundsError` if a page stands in two of them."""
        columns = [p._ids for p in parts]
        ids = np.concatenate(columns) if columns else np.empty(0, np.int32)
        if len(columns) > 1 and np.unique(ids).size != ids.size:
            raise BoundsError("page ids", "a repeated page", "each page once")
        return cls(ids.astype(np.int32, copy=len(columns) == 1))

    @property
    def array(self) -> Int32Array:
        """Read-only int32 column, one entry a page."""
        return self._ids

    @property
    def index(self) -> npt.NDArray[np.intp]:
        """`array` in numpy's own kind of integer, with which it indexes four times faster; made once."""
        if self._index is None:
            self._index = self._ids.astype(np.intp)
        return self._index

    def __len__(self) -> int:
        return self._ids.size

    def __getitem__(self, part: slice) -> Self:
        some = type(self)(self._ids[part].copy())
        if self._index is not None:
            some._index = self._index[part].copy()
        return some

    def where(self, wanted: npt.NDArray[np.bool_]) -> Self:
        """Those with a true entry in `wanted`, bool [pages]."""
        return type(self)(self._ids[wanted])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        # both int32: equal bytes are equal ids, and far cheaper to compare
        return type(other) is type(self) and self._ids.tobytes() == other._ids.tobytes()

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ids.tolist() if len(self) <= 8 else f'{len(self)} pages'})"


class LocalPages(_Pages):
    """Pages of this node's own pool."""


class RemotePages(_Pages):
    """Pages of a peer's pool: good for reading from, nothing else."""


class PageHashes:
    """The hash chain of consecutive pages as one immutable byte string, 32 bytes a page."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes = b"") -> None:
        """Raises `BoundsError` unless `raw` holds whole hashes."""
        if len(raw) % HASH_BYTES:
            raise BoundsError("page hashes, bytes", len(raw), f"a multiple of {HASH_BYTES}")
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw) // HASH_BYTES

    def at(self, index: int) -> PageHash:
        if not 0 <= index < len(self):
            raise BoundsError("page hash index", index, f"0 to {len(self) - 1}")
        return PageHash(self.raw[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def part(self, start: int, stop: int) -> PageHashes:
        """Hashes [start, stop); raises `BoundsError` if they are not all there."""
        if not 0 <= start <= stop <= len(self):
            raise BoundsError("page hash range", f"[{start}, {stop})", f"within [0, {len(self)})")
        return PageHashes(self.raw[start * HASH_BYTES : stop * HASH_BYTES])

    def column(self) -> npt.NDArray[np.void]:
        """Read-only column of opaque 32-byte items, one a page: numpy moves them three times faster than rows."""
        return np.frombuffer(self.raw, HASH_ITEM)

    def rows(self) -> npt.NDArray[np.uint8]:
        """Read-only uint8 [pages, 32] view."""
        return np.frombuffer(self.raw, np.uint8).reshape(-1, HASH_BYTES)

    def __iter__(self) -> Iterator[PageHash]:
        return (self.at(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageHashes) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"PageHashes({len(self)} pages, last {self.raw[-HASH_BYTES:].hex()[:12] or 'none'})"
