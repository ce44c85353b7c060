"""Memory that an engine owns, as a pool: its blocks are the pages.

Guarantees: nothing is copied or moved: the pool's addresses are those of the engine's tensors; a page holds every byte
of its block in every layer, none twice (layers that share a tensor are one) and nothing of another block; a page's
segments come in an order that depends on the layers' names and shapes alone, so that two engines of one configuration
agree on it; block 0, which the engine writes padding to, is the pool's write sink.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, Protocol

import torch

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group, PageFormat, Placement, PlacementKind, Segment, SegmentPlace
from pdkv.geometry.row_format import IndexFormat, RowFormat, RowPart
from pdkv.kvcache.memory import PoolMemory
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.pool import SlotPool


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache: blocks first, or kernel blocks of which a fixed number make a block."""

    name: str
    tensor: torch.Tensor
    group: Group = Group.MAIN

    @property
    def layer(self) -> int:
        """The first number in its name, as in `model.layers.3.self_attn.attn`; 0 without one."""
        found = re.search(r"\.(\d+)(?:\.|$)", self.name)
        return int(found[1]) if found else 0


class GroupSpec(Protocol):
    """vLLM's `KVCacheGroupSpec`, as far as it is needed."""

    layer_names: list[str]
    kv_cache_spec: Any


def layer_caches(tensors: Mapping[str, torch.Tensor], group: GroupSpec) -> list[LayerCache]:
    """Of the group's layers that have one; an indexer's rows are the second group."""
    each: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    made = []
    for name in group.layer_names:
        role = getattr(each.get(name, group.kv_cache_spec), "cache_role", None)
        if name in tensors:
            made.append(LayerCache(name, tensors[name], Group.INDEX if role == "indexer" else Group.MAIN))
    return made


@dataclass(frozen=True, slots=True)
class Runs:
    """A block in one tensor: block b is, for each of `offsets`, `length` bytes from byte `offset + b * stride` on."""

    offsets: tuple[int, ...]
    length: int
    stride: int
    order: str
    """Sizes of a block's axes in the order of memory, outermost first, and the element's bytes: "2x64x128*4"."""


def runs_of(tensor: torch.Tensor, num_blocks: int) -> Runs:
    """Raises `ConfigError` for a tensor that has no such blocks, or whose elements share bytes."""
    item = tensor.element_size()
    if tensor.dim() < 2 or not num_blocks or tensor.shape[0] % num_blocks:
        raise ConfigError("shape of a layer's cache", tuple(tensor.shape), f"{num_blocks} blocks first, or a multiple")
    ratio = tensor.shape[0] // num_blocks
    axes = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if ratio > 1:
        axes.insert(0, (ratio, tensor.stride(0)))
    inner = sorted(((stride * item, size) for size, stride in axes if size > 1), reverse=True)
    length, outer = item, list(inner)
    while outer and outer[-1][0] == length:
        length *= outer.pop()[1]
    for stride, _ in outer:
        if stride < length:
            raise ConfigError("strides of a layer's cache", tensor.stride(), "elements that share no bytes")
    offsets = sorted(sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in outer)))
    order = "x".join(str(size) for _, size in inner) + f"*{item}"
    return Runs(tuple(offsets), length, tensor.stride(0) * ratio * item, order)


def engine_pool(caches: Sequence[LayerCache], num_blocks: int, block_tokens: int) -> SlotPool:
    """The pool of an engine's layers. Raises `ConfigError` for tensors that can't be one, as on several devices."""
    layers = list(_distinct(caches))
    if not layers:
        raise ConfigError("layers with a cache", 0, "at least 1")
    devices = {str(cache.tensor.device) for cache in layers}
    if len(devices) > 1:
        raise ConfigError("devices of the cache", ", ".join(sorted(devices)), "one")
    buffers = _Buffers()
    segments: list[tuple[str, Group, int, int]] = []
    places = []
    for cache in layers:
        runs, buffer = runs_of(cache.tensor, num_blocks), buffers.of(cache.tensor)
        start = int(cache.tensor.storage_offset()) * cache.tensor.element_size()
        for number, offset in enumerate(runs.offsets):
            name = cache.name if len(runs.offsets) == 1 else f"{cache.name}/{number}"
            segments.append((name, cache.group, cache.layer, runs.length))
            places.append(SegmentPlace(buffer, start + offset, runs.stride))
    fmt = _format(segments, block_tokens)
    if any(place.stride < segment.length for place, segment in zip(places, fmt.segments, strict=True)):
        raise ConfigError("strides of the cache", [place.stride for place in places], "blocks that don't overlap")
    memory = PoolMemory("torch", buffers.tensors, [b.data_ptr() for b in buffers.tensors], "the engine's own memory")
    placement = Placement(_kind(fmt, places), num_blocks, memory.buffer_bytes, tuple(places))
    return SlotPool(fmt, placement, memory, PageTable(num_blocks))


def row_order(caches: Sequence[LayerCache], num_blocks: int) -> str:
    """How the bytes of a block are ordered within a layer, each way once: equal for two engines, or their bytes
    differ."""
    return " ".join(dict.fromkeys(runs_of(cache.tensor, num_blocks).order for cache in _distinct(caches)))


class _Buffers:
    """Storages as flat bytes, each once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._number:
            self._number[storage.data_ptr()] = len(self.tensors)
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.tensors.append(flat.set_(storage, 0, (storage.nbytes(),), (1,)))
        return self._number[storage.data_ptr()]


def _distinct(caches: Sequence[LayerCache]) -> Iterator[LayerCache]:
    """Main before index, by layer and name; of those that share a tensor the first."""
    seen = set()
    for cache in sorted(caches, key=lambda c: (c.group is not Group.MAIN, c.layer, c.name)):
        if cache.tensor.data_ptr() not in seen:
            seen.add(cache.tensor.data_ptr())
            yield cache


def _format(segments: Sequence[tuple[str, Group, int, int]], tokens: int) -> PageFormat:
    """Rows are the engine's own affair: they are bytes here, of the first layer of each group."""
    lengths = {group: next((s[3] for s in segments if s[1] is group), 0) for group in Group}
    offsets = accumulate((length for *_, length in segments), initial=0)
    placed = tuple(
        Segment(name, group, layer, length, at)
        for (name, group, layer, length), at in zip(segments, offsets, strict=False)
    )
    main = RowFormat("engine", (RowPart("bytes", lengths[Group.MAIN] // tokens, "u8"),), "engine", "engine")
    index = IndexFormat("engine", lengths[Group.INDEX] // tokens, 0, "engine")
    return PageFormat(tokens, placed, main, index, tokens)


def _kind(fmt: PageFormat, places: Sequence[SegmentPlace]) -> PlacementKind:
    """Whether a page lies in one piece, but for padding."""
    packed = len({place.buffer for place in places}) == 1 and all(p.stride >= fmt.page_bytes for p in places)
    return "page_major" if packed else "layer_major"
