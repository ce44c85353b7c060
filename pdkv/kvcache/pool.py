"""The slot pool: both caches of every page, and views of them for kernels, digests and peers.

Guarantees: all views are the pool's own memory, never copies; a page's main KV and index-K share its number; what the
pool says of its addresses (`map`) is where its views are; what a method changes has been changed when it returns, also
on a device. Who owns a page is not known here: the cache manager is the
only caller that writes to pages, besides an engine that was given them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.page_layout import (
    Group,
    PageFormat,
    Placement,
    PlacementKind,
    PoolMap,
    Segment,
    layer_major,
    page_major,
    pool_map,
)
from pdkv.geometry.row_format import PENDING_KEY
from pdkv.ids import SINK_PAGE, LocalPages
from pdkv.kvcache.memory import MemoryKind, PoolMemory, allocate
from pdkv.kvcache.page_table import PageTable

_MAKERS = {"page_major": page_major, "layer_major": layer_major}


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of segments that lie end to end: page p is `length` bytes at `offset + p * stride` of a buffer."""

    buffer: int
    offset: int
    stride: int
    length: int


class SlotPool:
    """A page format laid out in memory. Nothing here is thread-safe by itself: pages have one writer at a time."""

    def __init__(self, fmt: PageFormat, placement: Placement, memory: PoolMemory, table: PageTable) -> None:
        """Raises `ConfigError` if memory or page table are not of the placement's size."""
        if memory.buffer_bytes != placement.buffer_bytes:
            raise ConfigError("pool buffers, bytes", memory.buffer_bytes, placement.buffer_bytes)
        if table.num_pages != placement.num_pages:
            raise ConfigError("page table rows", table.num_pages, placement.num_pages)
        self.fmt = fmt
        self.placement = placement
        self.memory = memory
        self.table = table
        self._place_of = {
            (s.group, s.layer, s.pending): at for s, at in zip(fmt.segments, placement.places, strict=True)
        }
        self._pieces = {group: _pieces(fmt, placement, (group,)) for group in Group}
        self._page_pieces = _pieces(fmt, placement, tuple(Group))

    @classmethod
    def create(
        cls,
        fmt: PageFormat,
        num_pages: int,
        *,
        placement: PlacementKind = "page_major",
        memory: MemoryKind = "anonymous",
        path: str | None = None,
        device: str = "cpu",
    ) -> Self:
        """A pool in memory of its own; `path` is for memory "file". Raises `ConfigError` on what can't be had."""
        if placement not in _MAKERS:
            raise ConfigError("placement", placement, ", ".join(_MAKERS))
        place = _MAKERS[placement](fmt, num_pages)
        return cls(
            fmt, place, allocate(place.buffer_bytes, kind=memory, path=path, device=device), PageTable(num_pages)
        )

    @property
    def num_pages(self) -> int:
        """Including page 0, the write sink."""
        return self.placement.num_pages

    def map(self) -> PoolMap:
        """Addresses of everything a peer may read."""
        m, t = self.memory, self.table
        return pool_map(self.fmt, self.placement, m.addresses, t.address, t.stride, m.memory, m.device_index)

    # --- views for an engine --------------------------------------------------------------------------------------

    def main_view(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, page_tokens, row_bytes] of a layer or draft layer. Raises `ConfigError` if unknown."""
        return self._view(Group.MAIN, layer, 0, (self.fmt.page_tokens, self.fmt.main_row.row_bytes))

    def index_view(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, index_page_bytes]: all keys of a page, then all its scales.

        Raises `ConfigError` if the layer has no index cache (a shared layer, or an unknown one).
        """
        length = self.fmt.index_tokens * self.fmt.index_row.row_bytes
        return self._view(Group.INDEX, layer, 0, (length,))

    def index_keys(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, index_tokens, key_bytes]. Raises as `index_view`."""
        return self._view(Group.INDEX, layer, 0, (self.fmt.index_tokens, self.fmt.index_row.key_bytes))

    def index_scales(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, index_tokens, scale_bytes]. Raises as `index_view`."""
        rows, row = self.fmt.index_tokens, self.fmt.index_row
        return self._view(Group.INDEX, layer, rows * row.key_bytes, (rows, row.scale_bytes))

    def pending_keys(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, pending_rows, key_bytes]: unpooled keys, a ring a page (see `page_layout`).

        Raises `ConfigError` if the index is not pooled, or the layer has none.
        """
        return self._view(Group.INDEX, layer, 0, (self.fmt.pending_rows, PENDING_KEY.bytes), pending=True)

    def _view(
        self, group: Group, layer: int, skip: int, shape: tuple[int, ...], *, pending: bool = False
    ) -> torch.Tensor:
        """Strided view, pages first, of `shape` contiguous bytes a page, `skip` bytes into the segment."""
        place = self._place_of.get((group, layer, pending))
        if place is None:
            layers = [at for of, at, kind in self._place_of if of is group and kind == pending]
            raise ConfigError(f"layer with {'pending keys' if pending else f'{group.value} rows'}", layer, layers)
        inner = (1,) if len(shape) == 1 else (shape[1], 1)
        start = self.memory.buffers[place.buffer][place.offset + skip :]
        return start.as_strided((self.num_pages, *shape), (place.stride, *inner))

    # --- whole pages ----------------------------------------------------------------------------------------------

    def pieces(self, group: Group) -> tuple[Piece, ...]:
        """A group's bytes in segment order, segments that lie end to end joined."""
        return self._pieces[group]

    def piece_view(self, piece: Piece) -> torch.Tensor:
        """uint8 [num_pages, piece.length]."""
        start = self.memory.buffers[piece.buffer][piece.offset :]
        return start.as_strided((self.num_pages, piece.length), (piece.stride, 1))

    def group_views(self, page: int, group: Group) -> list[torch.Tensor]:
        """The page's bytes of one group, uint8 [bytes] a segment, in segment order.

        Raises `BoundsError` on a page outside the pool or on the sink.
        """
        self._check(page)
        out = []
        for segment, at in zip(self.fmt.segments, self.placement.places, strict=True):
            if segment.group is group:
                start = at.offset + page * at.stride
                out.append(self.memory.buffers[at.buffer][start : start + segment.length])
        return out

    def group_bytes(self, page: int, group: Group) -> list[npt.NDArray[np.uint8]]:
        """The same as arrays: writable, or copies of a device's. Raises as `group_views`."""
        return [view.cpu().numpy() for view in self.group_views(page, group)]

    def zero(self, pages: LocalPages) -> None:
        """Zero every byte of these pages, in both caches."""
        for piece in self._page_pieces:
            view = self.piece_view(piece)
            if view.device.type == "cpu":
                view.numpy()[pages.array] = 0  # ten times faster than torch's index_fill_ here
            else:
                view.index_fill_(0, torch.from_numpy(pages.array.astype(np.int64)).to(view.device), 0)
        self.memory.settle()

    def zero_tail(self, page: int, from_token: int) -> None:
        """Zero the slots [from_token, page_tokens) of a page: main rows, index keys and index scales of all layers.

        Also what a rollback to `from_token` does to its page. With kpool above 1 an index row goes unless its whole
        window is left, and of the pending keys only those of the open window stay: they are there unless more than
        `rollback_tokens` (see `page_format`) were written after them. Raises `BoundsError` on a page outside
        the pool, on the sink, and on a token outside [0, page_tokens].
        """
        self._check(page)
        if not 0 <= from_token <= self.fmt.page_tokens:
            raise BoundsError("first token to zero", from_token, f"0 to {self.fmt.page_tokens}")
        # numpy where it can be: torch fills runs of this length with threads, which spin and wait for each other
        buffers = [b.numpy() if b.device.type == "cpu" else b for b in self.memory.buffers]
        for segment, at in zip(self.fmt.segments, self.placement.places, strict=True):
            start, buffer = at.offset + page * at.stride, buffers[at.buffer]
            for first, stop in self._past(segment, from_token):
                buffer[start + first : start + stop] = 0
        self.memory.settle()

    def _past(self, segment: Segment, from_token: int) -> Iterator[tuple[int, int]]:
        """Runs of bytes within a segment, [first, stop), of the slots from `from_token` on."""
        fmt = self.fmt
        if segment.group is Group.MAIN:
            yield from_token * fmt.main_row.row_bytes, segment.length
            return
        from_row, open_tokens = divmod(from_token, fmt.kpool)
        if segment.pending:
            closed = np.ones(fmt.pending_rows, np.bool_)
            closed[np.arange(from_token - open_tokens, from_token) % closed.size] = False
            for row in np.flatnonzero(closed).tolist():
                yield row * PENDING_KEY.bytes, (row + 1) * PENDING_KEY.bytes
            return
        keys, index = fmt.index_tokens * fmt.index_row.key_bytes, fmt.index_row
        yield from_row * index.key_bytes, keys
        yield keys + from_row * index.scale_bytes, segment.length

    def copy_page(self, source: int, target: int) -> None:
        """Copy both caches of a page onto another. Raises `BoundsError` as `group_bytes`."""
        self._check(source)
        self._check(target)
        for piece in self._page_pieces:
            view = self.piece_view(piece)
            view[target] = view[source]
        self.memory.settle()

    def copy_pages(self, source: LocalPages, target: LocalPages) -> None:
        """Copy both caches of each page onto the one at its place in `target`; no page is in both.

        Raises `BoundsError` unless they are as many.
        """
        if len(source) != len(target):
            raise BoundsError("pages to copy to", len(target), f"{len(source)}: one for each")
        for piece in self._page_pieces:
            view = self.piece_view(piece)
            if view.device.type == "cpu":
                rows = view.numpy()
                rows[target.array] = rows[source.array]
            else:
                at, to = (torch.from_numpy(p.array.astype(np.int64)).to(view.device) for p in (source, target))
                view[to] = view[at]
        self.memory.settle()

    def close(self) -> None:
        """Give the memory back (see `PoolMemory.close`); views that were handed out stay valid."""
        self.memory.close()

    def _check(self, page: int) -> None:
        if not SINK_PAGE < page < self.num_pages:
            raise BoundsError("page id", page, f"1 to {self.num_pages - 1}")


def _pieces(fmt: PageFormat, placement: Placement, groups: tuple[Group, ...]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for segment, at in zip(fmt.segments, placement.places, strict=True):
        if segment.group not in groups:
            continue
        last = pieces[-1] if pieces else None
        if last and (last.buffer, last.offset + last.length, last.stride) == (at.buffer, at.offset, at.stride):
            pieces[-1] = Piece(last.buffer, last.offset, last.stride, last.length + segment.length)
        else:
            pieces.append(Piece(at.buffer, at.offset, at.stride, segment.length))
    return tuple(pieces)
