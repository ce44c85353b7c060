"""A model small enough to run thousands of times a second, and what it would answer alone.

Guarantees: a row of either cache follows from its token, its place and the row before it, which is read from the page;
logits follow from every byte of both caches so far. So a page that is lost, swapped, stale or changed, in either cache,
changes every token after it; and what is right (`Truth`) is computed without pages, nodes or a pool.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import Group, PageFormat, Segment
from pdkv.geometry.row_format import IndexFormat, RowFormat, RowPart
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Sampling
from pdkv.node.ports import Computed, Logits

VOCAB = 64
PAGE = 8
"""Tokens."""
ROW = 8
"""Bytes of a row of either cache."""
DRAFT_TOKENS = 3

SHAPE = ModelShape(
    architecture="GlmMoeDsaForCausalLM",
    vocab_size=VOCAB,
    num_layers=2,
    indexer_types=("full", "shared"),
    draft_layers=0,
    kv_lora_rank=ROW,
    rope_dim=0,
    index_head_dim=4,
    index_topk=4,
    index_kpool=1,
)
_MASK = (1 << 64) - 1
_MAIN, _INDEX = PAGE * ROW, PAGE * ROW
FORMAT = PageFormat(
    PAGE,
    (
        Segment("main.0", Group.MAIN, 0, _MAIN, 0),
        Segment("main.1", Group.MAIN, 1, _MAIN, _MAIN),
        Segment("index.0", Group.INDEX, 0, _INDEX, 2 * _MAIN),
    ),
    RowFormat("simulated", (RowPart("latent", ROW, "e4m3"),), "none", "halves"),
    IndexFormat("simulated", key_bytes=4, scale_bytes=4),
    PAGE,
)


@lru_cache(8)
def contract(weights: str = "simulated", speculation: str = "none") -> Contract:
    drafts = DRAFT_TOKENS if speculation != "none" else 0
    facts = ContractFacts(weights, speculation=speculation, rollback_tokens=drafts, draft_tokens=drafts)
    return build_contract(SHAPE, FORMAT, identity=facts)


def rows(tokens: UInt32Array, start: int, before: int) -> np.ndarray:
    """uint64 [tokens]: each a function of all tokens up to its own; `before` is the row before the first."""
    places = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ places * places
    return np.cumsum(mixed * np.uint64(0xD6E8FEB86659FD93), dtype=np.uint64) + np.uint64(before)


def row(token: int, place: int, before: int) -> int:
    """`rows` of one token."""
    mixed = ((token + 1) * 0x9E3779B97F4A7C15 ^ (place + 1) * (place + 1)) & _MASK
    return (mixed * 0xD6E8FEB86659FD93 + before) & _MASK


def logits_of(seen: int) -> Logits:
    logits = np.zeros(VOCAB, np.float32)
    logits[seen % VOCAB] = 4.0
    return logits


class SimulatedEngine:
    """`node.ports.Engine` over a pool in either placement."""

    def __init__(self, pool: SlotPool) -> None:
        self.writes: Callable[[LocalPages], None] = lambda pages: None
        """Told of the pages before they are written to."""
        self.bad_logits = 0
        """So many of the next steps give logits that are no numbers."""
        self._main = [pool.main_view(layer).numpy() for layer in range(2)]
        self._keys = pool.index_keys(0).numpy()
        self._scales = pool.index_scales(0).numpy()

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        self.write(tokens, start, pages)
        if self.bad_logits:
            self.bad_logits -= 1
            return np.full(VOCAB, np.nan, np.float32)
        return logits_of(self.seen(start + len(tokens), pages))

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        return Computed(self.forward(tokens, start, pages)[None], np.zeros((len(tokens), 0), np.float32))

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        logits = [self.forward(tokens[i : i + 1], start + i, pages) for i in range(len(tokens))]
        return Computed(np.stack(logits), np.zeros((len(tokens), 0), np.float32))

    def write(self, tokens: UInt32Array, start: int, pages: LocalPages) -> None:
        self.writes(pages[start // PAGE : -(-(start + len(tokens)) // PAGE)])
        before = 0
        if start:
            last = self._main[0][pages.array[(start - 1) // PAGE], (start - 1) % PAGE]
            before = int.from_bytes(last.tobytes(), "little")
        at: Any
        if len(tokens) == 1:
            at, slots = int(pages.array[start // PAGE]), start % PAGE
            made = np.array([row(int(tokens[0]), start, before)], np.uint64)
            main, other = made.view(np.uint8), (~made).view(np.uint8)
            halves = main.reshape(2, 4)
        else:
            places = np.arange(start, start + len(tokens))
            at, slots = pages.array[places // PAGE], places % PAGE
            made = rows(tokens, start, before)
            main, other = made.view(np.uint8).reshape(-1, ROW), (~made).view(np.uint8).reshape(-1, ROW)
            halves = main.reshape(-1, 2, 4).swapaxes(0, 1)
        self._main[0][at, slots] = main
        self._main[1][at, slots] = other
        self._keys[at, slots] = halves[0]
        self._scales[at, slots] = halves[1]

    def seen(self, stop: int, pages: LocalPages) -> int:
        """A checksum of every byte of [0, stop) in both caches."""
        used = pages.index[: -(-stop // PAGE)]
        views = (*self._main, self._keys, self._scales)
        return mixed(*(zlib.crc32(view[used].reshape(-1, view.shape[2])[:stop]) for view in views))


def mixed(main: int, other: int, keys: int, scales: int) -> int:
    """Of the checksums of the parts."""
    return main * 3 ^ other * 5 ^ keys * 7 ^ scales * 11


class Truth:
    """A prompt and its answer, as one process would have computed them."""

    def __init__(self, tokens: UInt32Array) -> None:
        made = rows(tokens, 0, 0)
        self._place, self._last = len(tokens), int(made[-1])
        halves = made.view(np.uint8).reshape(-1, 2, 4)
        parts = (made, ~made, np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1]))
        self._seen = [zlib.crc32(part) for part in parts]

    def answer(self, sampling: Sampling) -> list[int]:
        """Greedy tokens."""
        said: list[int] = []
        while len(said) < sampling.max_tokens:
            said.append(mixed(*self._seen) % VOCAB)
            if said[-1] in sampling.stop_tokens:
                break
            self._last = row(said[-1], self._place, self._last)
            self._place += 1
            raw, other = self._last.to_bytes(8, "little"), (self._last ^ _MASK).to_bytes(8, "little")
            new = (raw, other, raw[:4], raw[4:])
            self._seen = [zlib.crc32(part, seen) for part, seen in zip(new, self._seen, strict=True)]
        return said


def page_bytes(made: np.ndarray) -> np.ndarray:
    """uint8 [pages, page bytes] of a prompt's `rows`, page-major, zero past its last token."""
    padded = np.zeros(-(-len(made) // PAGE) * PAGE, np.uint64)
    padded[: len(made)] = made
    inverted = ~padded
    inverted[len(made) :] = 0
    main = padded.view(np.uint8).reshape(-1, _MAIN)
    other = inverted.view(np.uint8).reshape(-1, _MAIN)
    halves = padded.view(np.uint8).reshape(-1, PAGE, 2, 4).transpose(0, 2, 1, 3).reshape(-1, _INDEX)
    return np.concatenate((main, other, halves), axis=1)


@cache
def written_bytes(tokens: int) -> np.ndarray:
    """bool [pages, page bytes]: those of a prompt of so many tokens; what lies behind its last one is unsaid."""
    slots = np.arange(-(-tokens // PAGE) * PAGE).reshape(-1, PAGE) < tokens
    rows_ = np.repeat(slots, ROW, axis=1)
    halves = np.repeat(slots, 4, axis=1)
    written = np.concatenate((rows_, rows_, halves, halves), axis=1)
    written.flags.writeable = False
    return written
