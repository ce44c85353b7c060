"""Where the bytes of a page are: its segments, and the place of each segment in a pool.

Guarantees: a page's segments are an ordered list, all of main KV and then all of index-K, so each group is one run of a
page-major page; placement moves segments about but never changes, drops or reorders them; a `PoolMap`, also one that
a peer sent, has every byte of every page inside one of its regions.

With kpool above 1 an index row stands for a window of kpool tokens, and exists once the window is whole. Keys of the
window that isn't yet live in a *pending* segment a layer, behind the index pages: part of the index group, so that they
are allocated, digested, shipped and zeroed with the page. It is a ring of `pending_rows` keys: the key at position p of
the page has row p % pending_rows. kpool - 1 rows are enough to go forward; each row more lets a step be rolled back by
one token into a window that it had completed. What a full page's ring holds is left over and means nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.row_format import INDEX_FP8, PENDING_KEY, IndexFormat, RowFormat, main_row_format

INDEX_PAGE_ROWS = 64
"""Index-K rows that the paged kernels read a page (GLM-5.3-class models on Hopper)."""

Memory = Literal["DRAM", "VRAM"]
PlacementKind = Literal["page_major", "layer_major"]


class Group(StrEnum):
    """The two caches of a page. They share its number and its fate."""

    MAIN = "main"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's bytes of one group in a page; `offset` is its place in a page-major page. Both in bytes."""

    name: str
    group: Group
    layer: int
    """Draft layers go on counting after the model's last layer."""
    length: int
    offset: int
    pending: bool = False
    """Keys of an open window, not index rows."""


@dataclass(frozen=True)
class PageFormat:
    """A page: its tokens, the row format of each cache and its segments in order."""

    page_tokens: int
    segments: tuple[Segment, ...]
    main_row: RowFormat
    index_row: IndexFormat
    index_tokens: int
    """Rows of an index page: page_tokens // kpool."""
    pending_rows: int = 0
    """Unpooled keys that a page keeps for each layer with an index; 0 without pooling."""

    @property
    def kpool(self) -> int:
        """Tokens of a window, which share an index row."""
        return self.page_tokens // self.index_tokens

    @cached_property
    def page_bytes(self) -> int:
        return self.main_bytes + self.index_bytes

    @cached_property
    def main_bytes(self) -> int:
        return self.group_length(Group.MAIN)

    @cached_property
    def index_bytes(self) -> int:
        return self.group_length(Group.INDEX)

    def group_length(self, group: Group) -> int:
        """Bytes of one group in a page."""
        return sum(s.length for s in self.group_segments(group))

    def group_segments(self, group: Group) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.group is group)

    def segment(self, name: str) -> Segment:
        """Raises `ConfigError` if a page has no segment of that name."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise ConfigError("segment", name, ", ".join(s.name for s in self.segments))

    def layer_segment(self, group: Group, layer: int) -> Segment:
        """The segment of a layer or draft layer. Raises `ConfigError` if it has none, as a shared layer's index-K."""
        for segment in self.segments:
            if segment.group is group and segment.layer == layer and not segment.pending:
                return segment
        layers = [s.layer for s in self.group_segments(group) if not s.pending]
        raise ConfigError(f"layer with {group.value} rows", layer, layers)


def page_format(
    shape: ModelShape, *, main_row: str = "fp8_ds_mla", page_tokens: int | None = None, rollback_tokens: int = 0
) -> PageFormat:
    """Page of a model: all main segments (layers, then draft layers), then all index segments in the same order, then,
    for a pooled index, all pending ones.

    `page_tokens` must be 64 x `shape.index_kpool` (the default). `rollback_tokens` are the most that a step of
    speculation takes back: a pooled index needs their keys. Raises `ConfigError` for another page size, an unknown
    row format, or a model whose latent, RoPE or index width is not the row format's.
    """
    expected = INDEX_PAGE_ROWS * shape.index_kpool
    tokens = expected if page_tokens is None else page_tokens
    if tokens != expected:
        raise ConfigError(
            "page_tokens", tokens, f"{expected} ({INDEX_PAGE_ROWS} index rows x kpool {shape.index_kpool})"
        )
    pending_rows = shape.index_kpool - 1 + rollback_tokens if shape.index_kpool > 1 else 0
    if rollback_tokens < 0 or pending_rows >= tokens:
        raise ConfigError("rollback_tokens", rollback_tokens, f"0 to {tokens - shape.index_kpool}")
    row = _fitting_row(shape, main_row)
    draft = tuple(range(shape.num_layers, shape.num_layers + shape.draft_layers))
    main_bytes, index_bytes = tokens * row.row_bytes, INDEX_PAGE_ROWS * INDEX_FP8.row_bytes
    pending_bytes = pending_rows * PENDING_KEY.bytes
    indexed = [("", i) for i in shape.full_layers] + [("draft_", i) for i in draft]
    wanted = [
        *((f"main.{i}", Group.MAIN, i, main_bytes, False) for i in range(shape.num_layers)),
        *((f"draft_main.{i}", Group.MAIN, i, main_bytes, False) for i in draft),
        *((f"{role}index.{i}", Group.INDEX, i, index_bytes, False) for role, i in indexed),
        *((f"{role}pending.{i}", Group.INDEX, i, pending_bytes, True) for role, i in indexed if pending_bytes),
    ]
    offsets = accumulate((length for *_, length, _ in wanted), initial=0)
    segments = tuple(
        Segment(name, group, layer, length, offset, pending)
        for (name, group, layer, length, pending), offset in zip(wanted, offsets, strict=False)
    )
    return PageFormat(tokens, segments, row, INDEX_FP8, INDEX_PAGE_ROWS, pending_rows)


def _fitting_row(shape: ModelShape, main_row: str) -> RowFormat:
    """The row format of that name, whose widths are the model's, or `ConfigError`."""
    row = main_row_format(main_row)
    for field, have, allowed in (
        ("kv_lora_rank", shape.kv_lora_rank, row.part("latent").count),
        ("qk_rope_head_dim", shape.rope_dim, row.part("rope").count),
        ("index_head_dim", shape.index_head_dim, INDEX_FP8.key_bytes),
    ):
        if have != allowed:
            raise ConfigError(field, have, f"{allowed}, the width of a row of {row.name} and of {INDEX_FP8.name}")
    return row


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Page p of a segment starts at byte `offset + p * stride` of a buffer."""

    buffer: int
    offset: int
    stride: int


@dataclass(frozen=True)
class Placement:
    """Buffers of a pool and where each segment (same order as `PageFormat.segments`) lies in them."""

    kind: PlacementKind
    num_pages: int
    """Including page 0, the write sink."""
    buffer_bytes: tuple[int, ...]
    places: tuple[SegmentPlace, ...]


def page_major(fmt: PageFormat, num_pages: int) -> Placement:
    """One buffer, page after page. Raises `ConfigError` unless there is a page beside the sink."""
    _check_pages(num_pages)
    places = tuple(SegmentPlace(0, s.offset, fmt.page_bytes) for s in fmt.segments)
    return Placement("page_major", num_pages, (num_pages * fmt.page_bytes,), places)


def layer_major(fmt: PageFormat, num_pages: int) -> Placement:
    """A main buffer for each layer, then an index buffer for each layer, draft layers included in both.

    With n layers, buffer[i] holds layer i's main rows, buffer[n + i] its index-K and, for a pooled index only,
    buffer[2n + i] its pending keys: shared layers have buffers of 0 bytes, so that buffers stay aligned with layer
    numbers. Raises `ConfigError` unless there is a page beside the sink.
    """
    _check_pages(num_pages)
    layers = len(fmt.group_segments(Group.MAIN))
    buffer_bytes = [0] * ((3 if fmt.pending_rows else 2) * layers)
    places = []
    for segment in fmt.segments:
        kind = 0 if segment.group is Group.MAIN else 1 + segment.pending
        buffer = kind * layers + segment.layer
        buffer_bytes[buffer] = num_pages * segment.length
        places.append(SegmentPlace(buffer, 0, segment.length))
    return Placement("layer_major", num_pages, tuple(buffer_bytes), tuple(places))


def _check_pages(num_pages: int) -> None:
    if num_pages < 2:
        raise ConfigError("num_pages", num_pages, "at least 2: page 0 is the write sink")


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """Page p of a segment is the `length` bytes at address `base + p * stride`."""

    name: str
    length: int
    base: int
    stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """A run of memory that is registered as one."""

    address: int
    length: int


@dataclass(frozen=True)
class PoolMap:
    """Addresses of a pool and of its page table, as peers exchange them.

    `regions` are the pool's buffers (not the page table, which is `table_region`). Raises `BoundsError` if there are
    not at least 2 pages, if pages of a segment overlap, or if a segment is not inside one region.
    """

    num_pages: int
    page_tokens: int
    segments: tuple[SegmentMap, ...]
    table_base: int
    table_stride: int
    memory: Memory
    device: int
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise BoundsError("pages of a pool", self.num_pages, "at least 2")
        regions = sorted(self.regions, key=lambda r: r.address)
        starts = [r.address for r in regions]
        for s in self.segments:
            if s.length <= 0 or s.stride < s.length:
                raise BoundsError(f"segment {s.name}", f"length {s.length}, stride {s.stride}", "0 < length <= stride")
            end = s.base + (self.num_pages - 1) * s.stride + s.length
            at = bisect_right(starts, s.base) - 1
            if at < 0 or end > regions[at].address + regions[at].length:
                raise BoundsError(f"segment {s.name}", f"[{s.base:#x}, {end:#x})", "inside one region of the pool")

    @property
    def table_region(self) -> Region:
        return Region(self.table_base, self.num_pages * self.table_stride)


def pool_map(
    fmt: PageFormat,
    placement: Placement,
    buffer_addresses: Sequence[int],
    table_base: int,
    table_stride: int,
    memory: Memory,
    device: int,
) -> PoolMap:
    """Addresses of a pool whose buffers lie at `buffer_addresses` (one a buffer; those of 0-byte buffers don't count).

    Raises `BoundsError` if there is not one address a buffer.
    """
    if len(buffer_addresses) != len(placement.buffer_bytes):
        raise BoundsError("buffer addresses", len(buffer_addresses), len(placement.buffer_bytes))
    segments = tuple(
        SegmentMap(s.name, s.length, buffer_addresses[at.buffer] + at.offset, at.stride)
        for s, at in zip(fmt.segments, placement.places, strict=True)
    )
    regions = tuple(
        Region(address, length)
        for address, length in zip(buffer_addresses, placement.buffer_bytes, strict=True)
        if length
    )
    return PoolMap(placement.num_pages, fmt.page_tokens, segments, table_base, table_stride, memory, device, regions)
