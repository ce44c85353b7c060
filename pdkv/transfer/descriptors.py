"""Which bytes a read of pages touches on both sides, as strided tables and index columns.

Guarantees: pure; a plan exists only for two pools with the same segments in the same order; index p * num_pages + page
of a side's table is piece p of that page, so a read of n pages costs numpy work on n x pieces integers and no list of
addresses; segments that follow one another on both sides are one piece (page-major on both sides: the page is one).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from pdkv.errors import BoundsError, ContractMismatch, Difference
from pdkv.geometry.page_layout import PoolMap, SegmentMap
from pdkv.ids import Int32Array, LocalPages, RemotePages, UInt64Array

MAX_INDEX = 2**31 - 1
"""Descriptor indices are int32."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes of every page, contiguous on both sides. Bytes and addresses."""

    length: int
    local_base: int
    local_stride: int
    remote_base: int
    remote_stride: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How pages of one remote pool are read into one local pool."""

    pieces: tuple[Piece, ...]
    local_pages: int
    remote_pages: int
    local_device: int
    remote_device: int
    page_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_bytes", sum(p.length for p in self.pieces))

    def local_table(self) -> UInt64Array:
        """uint64 [pieces, 5]: (address, length, device, stride, count), a row a piece."""
        return _table(
            (p.local_base, p.length, self.local_device, p.local_stride, self.local_pages) for p in self.pieces
        )

    def remote_table(self) -> UInt64Array:
        """uint64 [pieces, 5], the other side of `local_table`."""
        return _table(
            (p.remote_base, p.length, self.remote_device, p.remote_stride, self.remote_pages) for p in self.pieces
        )

    def check(self, local: LocalPages, remote: RemotePages) -> None:
        """Raises `BoundsError` if the columns differ in length or a page lies outside its pool."""
        if len(local) != len(remote):
            raise BoundsError("pages of a read, remote", len(remote), f"as many as local ones, {len(local)}")
        for side, pages, count in (
            ("local", local.array, self.local_pages),
            ("remote", remote.array, self.remote_pages),
        ):
            if pages.size and int(pages.max()) >= count:
                raise BoundsError(f"{side} page of a read", int(pages.max()), f"at most {count - 1}")

    def indices(self, local: LocalPages, remote: RemotePages) -> tuple[Int32Array, Int32Array]:
        """int32 [pieces * n] on either side, page i into page i; for columns that passed `check`.

        Piece after piece, so that runs of pages stand together and can be merged.
        """
        return (
            _spread(local.array, len(self.pieces), self.local_pages),
            _spread(remote.array, len(self.pieces), self.remote_pages),
        )

    def runs(self, local: LocalPages, remote: RemotePages) -> int:
        """Descriptors of that read when runs that are contiguous on both sides are merged."""
        if not len(local):
            return 0
        together = (np.diff(local.array) == 1) & (np.diff(remote.array) == 1)
        breaks = int(together.size - np.count_nonzero(together))
        dense = sum(p.length == p.local_stride == p.remote_stride for p in self.pieces)
        return dense * (breaks + 1) + (len(self.pieces) - dense) * len(local)


def plan(local: PoolMap, remote: PoolMap) -> ReadPlan:
    """Zip the segment lists of two pools.

    Raises `ContractMismatch` naming each segment (or the page tokens) that differs, `BoundsError` for a pool with more
    descriptors than an int32 index can name.
    """
    differences = [
        Difference(f"segments[{i}]", _show(mine), _show(theirs), "content")
        for i, (mine, theirs) in enumerate(zip_longest(local.segments, remote.segments))
        if mine is None or theirs is None or (mine.name, mine.length) != (theirs.name, theirs.length)
    ]
    if local.page_tokens != remote.page_tokens:
        differences.append(Difference("page_tokens", str(local.page_tokens), str(remote.page_tokens), "content"))
    if differences:
        raise ContractMismatch(differences)
    pieces = tuple(_merged(local, remote))
    most = max(local.num_pages, remote.num_pages) * len(pieces)
    if most > MAX_INDEX:
        raise BoundsError("descriptors of a pool (pages x pieces)", most, f"at most {MAX_INDEX}")
    return ReadPlan(pieces, local.num_pages, remote.num_pages, local.device, remote.device)


def table_rows(pool: PoolMap, row_bytes: int) -> UInt64Array:
    """uint64 [1, 5]: the first `row_bytes` of each page-table row of a pool; index = page id.

    Raises `BoundsError` if the rows are shorter than that.
    """
    if pool.table_stride < row_bytes:
        raise BoundsError("page-table row, bytes", pool.table_stride, f"at least {row_bytes}")
    return _table([(pool.table_base, row_bytes, 0, pool.table_stride, pool.num_pages)])


def _merged(local: PoolMap, remote: PoolMap) -> Iterator[Piece]:
    open_piece: Piece | None = None
    for mine, theirs in zip(local.segments, remote.segments, strict=True):
        if open_piece is not None and _follows(open_piece, mine, theirs):
            open_piece = replace(open_piece, length=open_piece.length + mine.length)
            continue
        if open_piece is not None:
            yield open_piece
        open_piece = Piece(mine.length, mine.base, mine.stride, theirs.base, theirs.stride)
    if open_piece is not None:
        yield open_piece


def _follows(piece: Piece, mine: SegmentMap, theirs: SegmentMap) -> bool:
    return (
        mine.base == piece.local_base + piece.length
        and mine.stride == piece.local_stride
        and theirs.base == piece.remote_base + piece.length
        and theirs.stride == piece.remote_stride
    )


def _spread(pages: Int32Array, pieces: int, num_pages: int) -> Int32Array:
    if pieces == 1:
        return pages.copy()
    starts = np.arange(pieces, dtype=np.int32) * np.int32(num_pages)
    return (starts[:, None] + pages[None, :]).reshape(-1)


def _table(rows: Iterable[tuple[int, int, int, int, int]]) -> UInt64Array:
    return np.array(list(rows), np.uint64).reshape(-1, 5)


def _show(segment: SegmentMap | None) -> str:
    return "none" if segment is None else f"{segment.name} of {segment.length} B"
