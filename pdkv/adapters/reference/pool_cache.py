"""transformers' cache, kept in the pages of a pool.

Guarantees: the pool is the only memory: whatever attention or an indexer sees, rows just computed included, was read
back from the pages, so a chunk, a decode step and a node that only received the bytes see the same values. Only the
rows of the step's own positions are written. A layer without an indexer has no index-K here either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdkv.adapters.reference.quantize import MainRows, decode_keys, encode_keys
from pdkv.errors import MissingDependency
from pdkv.kvcache.pool import SlotPool

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as e:
    raise MissingDependency("transformers", "the reference engine", extra="reference") from e


@dataclass(frozen=True)
class Window:
    """The positions of one step: [start, stop) are new, [0, stop) are attended to."""

    start: int
    stop: int
    pages: Tensor
    """int64, the pages that hold [0, stop), in order."""
    page: Tensor
    """int64 [stop - start], the page of each new position; `slot` is its place in that page."""
    slot: Tensor

    @classmethod
    def of(cls, start: int, stop: int, pages: Tensor, page_tokens: int) -> Window:
        """`pages`: int64, at least enough for [0, stop)."""
        position = torch.arange(start, stop, device=pages.device)
        index = position.div(page_tokens, rounding_mode="floor")
        return cls(start, stop, pages[: -(-stop // page_tokens)], pages[index], position.remainder(page_tokens))


class LayerRows:
    """One layer's rows of both caches in a pool, written and read by position.

    Raises `ConfigError` for a row format that `MainRows` can't write.
    """

    def __init__(self, pool: SlotPool, layer: int, *, indexed: bool) -> None:
        self.indexed = indexed
        self._codec = MainRows(pool.fmt.main_row)
        # moved as 8-byte words: every row and stride is a multiple, and copies by element are that much faster
        self._main = pool.main_view(layer).view(torch.int64)
        if indexed:
            self._keys = pool.index_keys(layer).view(torch.int64)
            self._scales = pool.index_scales(layer).view(torch.float32)

    def write_main(self, at: Window, latent: Tensor, rope: Tensor) -> None:
        """[n, latents] and [n, rope] of the new positions."""
        self._main[at.page, at.slot] = self._codec.encode(latent, rope).view(torch.int64)

    def read_main(self, at: Window, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[stop, latents] and [stop, rope] of all positions."""
        return self._codec.decode(self._gather(self._main, at).view(torch.uint8), dtype)

    def write_keys(self, at: Window, keys: Tensor) -> None:
        """[n, key width] of the new positions."""
        codes, scales = encode_keys(keys, self._codec.index_rule)
        self._keys[at.page, at.slot] = codes.view(torch.int64)
        self._scales[at.page, at.slot] = scales

    def read_keys(self, at: Window) -> Tensor:
        """float32 [stop, key width] of all positions."""
        return decode_keys(self._gather(self._keys, at).view(torch.uint8), self._gather(self._scales, at))

    @staticmethod
    def _gather(view: Tensor, at: Window) -> Tensor:
        """Rows [0, stop), copied out page by page into fresh memory (so kernels always see the same alignment)."""
        return view.index_select(0, at.pages).flatten(0, 1)[: at.stop]


class PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer's main rows for one step, as transformers wants them: batch 1, one head."""

    is_sliding = False

    def __init__(self, rows: LayerRows, at: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self._at = at
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Latents [1, 1, n, w] and RoPE parts [1, 1, n, r] in; the same of all positions out."""
        self._rows.write_main(self._at, key_states[0, 0], value_states[0, 0])
        latent, rope = self._rows.read_main(self._at, key_states.dtype)
        return latent[None, None], rope[None, None]

    def get_seq_length(self) -> int:
        return self._at.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._at.start + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PoolIndexedLayer(PoolLayer):  # type: ignore[no-untyped-call]
    """A layer that owns an indexer: index-K as well."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keys [1, n, w] in; float32 keys of all positions [1, stop, w] out."""
        self._rows.write_keys(self._at, indexer_key_states[0])
        return self._rows.read_keys(self._at)[None]


def step_cache(layers: tuple[LayerRows, ...], at: Window) -> Cache:
    """The cache of one step over a sequence's pages."""
    return Cache(layers=[(PoolIndexedLayer if rows.indexed else PoolLayer)(rows, at) for rows in layers])
