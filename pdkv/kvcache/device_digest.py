"""xxh3_64 of many pages at once, on the device where they lie.

Guarantees: bit for bit what the xxhash library says of the same bytes; no byte of a page leaves its device: 64 B a page
do; what is needed beside the pages is bounded, however many there are.

How: for inputs above 240 B xxh3 keeps eight 64-bit lanes. Within a block of 1 KiB each of 16 stripes adds to them what
depends on that stripe alone, so the additions are one sum a block, of many blocks of all pages at once. After a block
the lanes are scrambled, which only the next block can follow: that is sequential, and done for all pages together. So
the kernels of a call grow with the length of a page and not with how many there are: `KERNELS_A_BLOCK` a KiB of a page,
and some twelve for each `CHUNK_BYTES`. With Triton a chunk's scrambles are one kernel (`scramble_kernel`). torch has no
unsigned 64-bit arithmetic; int64 wraps alike, and a shift that must be logical is masked.

Source: the xxHash specification, and XXH3_64bits in xxhash.h (v0.8), with its secret and without a seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from pdkv.ids import LocalPages, UInt64Array

logger = logging.getLogger(__name__)
Scramble = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
SHORTEST_BYTES = 241
"""Shorter inputs have rules of their own, which aren't here."""
CHUNK_BYTES = 64 << 20
"""Page bytes whose additions are worked out at once; some five times as much is needed for it."""
KERNELS_A_BLOCK = 6
_WORD, _STRIPE, _BLOCK = 8, 64, 1024
_LANES, _STRIPES = 8, 16
_MASK = np.uint64(0xFFFFFFFF)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_AVALANCHE = np.uint64(0x165667919E3779F9)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_STRIPE = len(_SECRET) - _STRIPE - 7
_SCRAMBLE = len(_SECRET) - _STRIPE
_MERGE = 11


def device_digests(views: Sequence[torch.Tensor], pages: LocalPages) -> UInt64Array | None:
    """uint64 [pages]: of each page the digest of its bytes in all views, one after the other.

    `views`: uint8 [num_pages, bytes] of one device, strided. None for bytes that this doesn't do: fewer than
    `SHORTEST_BYTES`, or not in whole words of 8.
    """
    length = sum(view.shape[1] for view in views)
    if length < SHORTEST_BYTES or not all(map(_in_words, views)):
        return None
    if not len(pages):
        return np.zeros(0, np.uint64)
    device = views[0].device
    rows = _Rows([view.view(torch.int64) for view in views], torch.from_numpy(pages.array.astype(np.int64)).to(device))
    return _merged(_Lanes(rows, len(pages), device).of(length).cpu().numpy().view(np.uint64), length)


def _in_words(view: torch.Tensor) -> bool:
    step, offset = view.stride(0), view.storage_offset()
    return view.stride(1) == 1 and not (view.shape[1] % _WORD or step % _WORD or offset % _WORD)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Words of some pages, as if their views were one."""

    views: Sequence[torch.Tensor]
    """int64 [num_pages, words]."""
    pages: torch.Tensor
    """int64 [n], on the device."""

    def words(self, first: int, last: int) -> torch.Tensor:
        """int64 [n, last - first], a copy."""
        starts = accumulate((view.shape[1] for view in self.views), initial=0)
        parts = [
            view[:, max(first - start, 0) : last - start].index_select(0, self.pages)
            for view, start in zip(self.views, starts, strict=False)
            if start < last and start + view.shape[1] > first
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scramble(lanes: torch.Tensor, added: torch.Tensor, key: torch.Tensor, prime: int) -> None:
    """In place: int64 lanes [n, 8] after each block's additions, int64 [n, blocks, 8], and the scramble after them."""
    for block in added.unbind(1):
        lanes += block
        high = lanes >> 47
        high &= (1 << 17) - 1
        lanes ^= high
        lanes ^= key
        lanes *= prime


@cache
def scrambler(device: torch.device) -> Scramble:
    """The one kernel where there is Triton and it says what torch says, otherwise torch's."""
    if device.type != "cuda":
        return scramble
    try:
        from pdkv.kvcache import scramble_kernel
    except ImportError as error:
        logger.info("digests take %d kernels a KiB of a page: no Triton (%s)", KERNELS_A_BLOCK, error)
        return scramble
    try:
        return checked(scramble_kernel.scramble, device)
    except scramble_kernel.ERRORS as error:
        logger.warning("digests take %d kernels a KiB of a page: Triton makes none (%s)", KERNELS_A_BLOCK, error)
        return scramble


def checked(kernel: Scramble, device: torch.device) -> Scramble:
    """`kernel`, or torch's with a warning if they don't agree."""
    dice = np.random.default_rng(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.from_numpy(dice.integers(-(2**63), 2**63, shape)).to(device)

    one, added, key = words(7, _LANES), words(7, 5, _LANES), words(_LANES)
    other = one.clone()
    scramble(one, added, key, _PRIME32[0])
    kernel(other, added, key, _PRIME32[0])
    if torch.equal(one, other):
        return kernel
    logger.warning("the digest's kernel is wrong on %s and isn't used", device)
    return scramble


class _Lanes:
    """int64 [n, 8] while the bytes go by."""

    def __init__(self, rows: _Rows, count: int, device: torch.device) -> None:
        self._rows = rows
        self._count = count
        self._stripe_keys = torch.stack([_key(_WORD * i, device) for i in range(_STRIPES)])
        self._last_key = _key(_LAST_STRIPE, device)
        self._scramble_key = _key(_SCRAMBLE, device)
        self._scramble = scrambler(device)
        start = torch.tensor(np.array(_START, np.uint64).view(np.int64), device=device)
        self._sums = start.repeat(count, 1)

    def of(self, length: int) -> torch.Tensor:
        """After `length` bytes. The last block isn't scrambled, and the last stripe has a key of its own."""
        blocks, words = (length - 1) // _BLOCK, length // _WORD
        for added in self._blocks(blocks):
            self._scramble(self._sums, added, self._scramble_key, _PRIME32[0])
        stripes = (length - 1 - blocks * _BLOCK) // _STRIPE
        if stripes:
            first = blocks * _BLOCK // _WORD
            rest = self._rows.words(first, first + stripes * _LANES).view(self._count, stripes, _LANES)
            self._sums += _additions(rest, self._stripe_keys[:stripes]).sum(1)
        self._sums += _additions(self._rows.words(words - _LANES, words), self._last_key)
        return self._sums

    def _blocks(self, count: int) -> Iterator[torch.Tensor]:
        """int64 [n, blocks, 8]: what each whole block adds, chunk after chunk."""
        step, words = max(CHUNK_BYTES // (_BLOCK * self._count), 1), _BLOCK // _WORD
        for first in range(0, count, step):
            last = min(first + step, count)
            data = self._rows.words(first * words, last * words)
            yield _additions(data.view(self._count, last - first, _STRIPES, _LANES), self._stripe_keys).sum(2)


def _additions(data: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What each word adds, to its own lane and, unkeyed, to its neighbour's. int64 [..., 8], as `data`."""
    mixed = data ^ key
    product = (mixed & 0xFFFFFFFF) * ((mixed >> 32) & 0xFFFFFFFF)
    pairs = data.view(*data.shape[:-1], _LANES // 2, 2)
    return product + pairs.flip(-1).view(data.shape)


def _key(offset: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.frombuffer(_SECRET, np.int64, _LANES, offset), device=device)


def _merged(lanes: UInt64Array, length: int) -> UInt64Array:
    """The digests: uint64 [n] of lanes [n, 8]. In numpy: 64 B a page."""
    keys = np.frombuffer(_SECRET, np.uint64, _LANES, _MERGE)
    mixed = lanes ^ keys
    total: UInt64Array = np.full(len(lanes), length * _PRIME64[0] % 2**64, np.uint64)
    for pair in range(0, _LANES, 2):
        total += _folded(mixed[:, pair], mixed[:, pair + 1])
    total ^= total >> np.uint64(37)
    total *= _AVALANCHE
    total ^= total >> np.uint64(32)
    return total


def _folded(one: UInt64Array, other: UInt64Array) -> UInt64Array:
    """Lower half XOR upper half of the 128-bit products."""
    half = np.uint64(32)
    (low, high), (low_2, high_2) = ((n & _MASK, n >> half) for n in (one, other))
    cross = (low * low_2 >> half) + (high * low_2 & _MASK) + low * high_2
    upper = (high * low_2 >> half) + (cross >> half) + high * high_2
    folded: UInt64Array = (one * other) ^ upper
    return folded
