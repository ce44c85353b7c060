"""Writes rows that follow from tokens and positions, as fast as memory takes them, and computes nothing.

Guarantees: both caches of every layer get every row of a token, so pages are as unlike as a model's and are digested,
read and verified as such; the bytes of a page don't depend on how its tokens were cut into steps; the next token
follows from the bytes of the sequence's last page, so a wrong one there changes the answer. Older pages are proved by
their digests alone; a step takes as long as it is told that a model's would, or longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import ModelShape, load_config, model_shape
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.ports import Computed, Logits

ENGINE_NAME = "synthetic"


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """What is needed of a model: its shape, and a name for what its pages hold."""

    shape: ModelShape
    seed: int

    @property
    def weights_id(self) -> str:
        return f"{ENGINE_NAME}/{self.seed}"


def synthetic_model(source: str, *, seed: int = 0, indexer_types: tuple[str, ...] | None = None) -> SyntheticModel:
    """From a preset or a config.json, of any size: nothing but its shape is used. Raises `ConfigError`."""
    shape = model_shape(load_config(source))
    return SyntheticModel(replace(shape, indexer_types=indexer_types or shape.indexer_types), seed)


class SyntheticEngine:
    """`node.ports.Engine` over a pool. The model's seed takes the place of weights."""

    def __init__(self, model: SyntheticModel, pool: SlotPool, *, token_us: float = 0.0) -> None:
        """A step lasts `token_us` microseconds a token at least, most of it without using the CPU, as if a device
        computed. Raises `ConfigError` for a pool of pooled index keys or of a draft layer, which need a model."""
        fmt = pool.fmt
        if any(s.name.startswith("draft_") for s in fmt.segments) or fmt.index_tokens != fmt.page_tokens:
            raise ConfigError("engine", ENGINE_NAME, "reference, for pages with draft rows or pooled index keys")
        self._pool = pool
        self._vocab_size = model.shape.vocab_size
        self._seed = model.seed
        self._token_s = token_us / 1e6
        self._rows = [
            (segment.layer, rows)
            for segment in fmt.segments
            for rows in (
                [pool.main_view(segment.layer)]
                if segment.group is Group.MAIN
                else [pool.index_keys(segment.layer), pool.index_scales(segment.layer)]
            )
        ]

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        """As `node.ports.Engine`; float32 [vocab], one of them 1, the others 0."""
        ends_s = time.monotonic() + len(tokens) * self._token_s
        stop, size = start + len(tokens), self._pool.fmt.page_tokens
        if stop > len(pages) * size:
            raise BoundsError("positions", stop, f"at most {len(pages) * size}")
        positions = np.arange(start, stop)
        marks = ((tokens.astype(np.int64) * 31 + positions * 7 + self._seed) % 251).astype(np.int32)
        where: tuple[npt.NDArray[Any], ...]
        shape: tuple[int, ...]
        if start % size == 0 == stop % size:  # whole pages take a tenth of the time
            where, shape = (pages.array[start // size : stop // size],), (-1, size, 1)
        else:
            where, shape = (pages.array[positions // size], positions % size), (-1, 1)
        written: dict[int, npt.NDArray[np.uint8]] = {}
        for layer, rows in self._rows:
            if layer not in written:
                written[layer] = ((marks + layer * 3) % 251 + 1).astype(np.uint8).reshape(shape)
            _put(rows, where, written[layer])
        self._pool.memory.settle()
        logits = self._logits(stop, pages)
        time.sleep(max(ends_s - time.monotonic(), 0.0))
        return logits

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        return Computed(self.forward(tokens, start, pages)[None], np.zeros((len(tokens), 0), np.float32))

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        rows = [self.forward(tokens[i : i + 1], start + i, pages) for i in range(len(tokens))]
        return Computed(np.stack(rows), np.zeros((len(tokens), 0), np.float32))

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        size = self._pool.fmt.page_tokens
        last, filled = pages.array[(stop - 1) // size], (stop - 1) % size + 1
        seen = xxhash.xxh3_64(stop.to_bytes(8, "little"))
        for _, rows in self._rows:
            seen.update(rows[last, :filled].cpu().numpy().tobytes())
        logits = np.zeros(self._vocab_size, np.float32)
        logits[seen.intdigest() % self._vocab_size] = 1.0
        return logits


def _put(rows: torch.Tensor, where: tuple[npt.NDArray[Any], ...], values: npt.NDArray[np.uint8]) -> None:
    """Values, uint8 [..., 1], into every byte of the rows there; numpy in host memory, where it is far faster."""
    if rows.device.type == "cpu":
        rows.numpy()[where] = values
    else:
        at = tuple(torch.from_numpy(column.astype(np.int64)).to(rows.device) for column in where)
        rows[at] = torch.from_numpy(values).to(rows.device)
