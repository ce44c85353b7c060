"""The identity of a page: a SHA-256 chain over its tokens and all tokens before them.

Guarantees: the chain is SGLang's, bit for bit (the vectors in tests/golden/page_hash.json; `make sglang-interop`), so
that events interoperate, as would storage keys of prompts without a namespace; it depends on nothing but its arguments,
so every process and machine computes the same; equal hashes under one namespace seed mean equal tokens under equal
weights, so pages that may stand for each other. A hash is no checksum of bytes: chunks of other sizes, or decode's
single tokens, are rounded otherwise.

    H_i = SHA-256(H_{i-1} || units of page i as uint32 little-endian),   H_{-1} = seed, or nothing

A unit is a token, or with `bigram` the pair (t_i, t_{i+1}): N tokens are N-1 units. A page with a token above
2^32 - 1 hashes one byte 0xff and then uint64 little-endian instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError
from pdkv.ids import HASH_BYTES, PageHashes

_WIDE = 1 << 32
_WIDE_MARK = b"\xff"
_SEED_DOMAIN = b"pdkv page seed 1"

Tokens = npt.ArrayLike
"""A flat column of non-negative integers; arrays of uint32 are the fast way in."""
_Units = npt.NDArray[np.unsignedinteger[Any]]


def chain(tokens: Tokens, *, page_tokens: int = 64, seed: bytes | None = None, bigram: bool = False) -> PageHashes:
    """Hashes of all full pages of `tokens`, from the start of a request; a started page is not hashed.

    `seed` (32 bytes, see `namespace_seed`) precedes the first page. Raises `BoundsError` on tokens that are no flat
    column of non-negative integers, on a page size below 1 and on a seed of another length.
    """
    if page_tokens < 1:
        raise BoundsError("page tokens", page_tokens, "at least 1")
    last = b"" if seed is None else _hash_bytes("seed", seed)
    units = _units(_column(tokens), bigram=bigram)
    out: list[bytes] = []
    sha256 = hashlib.sha256
    for page in _encoded_pages(units, page_tokens):
        running = sha256(last)
        running.update(page)
        last = running.digest()
        out.append(last)
    return PageHashes(b"".join(out))


def extend(last: bytes, tokens: Tokens, *, page_tokens: int = 64, bigram: bool = False) -> PageHashes:
    """The *further* hashes of a chain whose last hash is `last`, as if it had been computed at once.

    `tokens` starts at the first token after the pages already hashed (with `bigram` that token has been seen as the
    lookahead of the last page; it is given again). Raises `BoundsError` as `chain` does.
    """
    return chain(tokens, page_tokens=page_tokens, seed=last, bigram=bigram)


def tail_hash(last: bytes, tail_tokens: Tokens) -> bytes:
    """SHA-256(`last` || tail tokens): names the partly filled last page, 32 bytes.

    `last` is the last full page's hash or, when the prompt is shorter than a page, the seed, or empty without one.
    Always over tokens, also in a bigram chain, so that it covers the very last token. Raises `BoundsError` as `chain`.
    """
    tail = _column(tail_tokens)
    prefix = _hash_bytes("last page hash", last) if last else b""
    return hashlib.sha256(prefix + b"".join(_encoded_pages(tail, max(1, tail.size)))).digest()


def namespace_seed(content_fingerprint: bytes, extra_key: str, cache_salt: str) -> bytes:
    """The 32 bytes before the first page: whatever separates two requests with equal tokens.

    Each part goes in with its length, so that no two namespaces share an encoding. Raises `BoundsError` unless the
    fingerprint has 32 bytes.
    """
    running = hashlib.sha256(_SEED_DOMAIN + _hash_bytes("content fingerprint", content_fingerprint))
    for text in (extra_key, cache_salt):
        part = text.encode("utf-8", "surrogatepass")
        running.update(len(part).to_bytes(8, "little") + part)
    return running.digest()


def event_ids(hashes: PageHashes) -> list[int]:
    """Signed 64-bit ids as KV events carry them: the first eight bytes of each hash, big-endian."""
    ids: list[int] = hashes.rows()[:, :8].copy().view(">i8").ravel().tolist()
    return ids


def _hash_bytes(what: str, value: bytes) -> bytes:
    if len(value) != HASH_BYTES:
        raise BoundsError(f"{what}, bytes", len(value), HASH_BYTES)
    return value


def _column(tokens: Tokens) -> _Units:
    """Flat uint32, or uint64 if a token needs it."""
    wide = np.asarray(tokens)
    if wide.size == 0:
        return np.empty(0, np.uint32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise BoundsError("tokens", f"{wide.dtype} array of shape {wide.shape}", "a flat integer column")
    if wide.dtype.kind == "i" and int(wide.min()) < 0:
        raise BoundsError("token", int(wide.min()), "at least 0")
    if wide.dtype.itemsize == 8 and int(wide.max()) >= _WIDE:
        return wide.astype("<u8")
    return wide.astype("<u4", copy=False)


def _units(tokens: _Units, *, bigram: bool) -> _Units:
    """[n] tokens, or [n - 1, 2] pairs."""
    if not bigram:
        return tokens
    return np.stack((tokens[:-1], tokens[1:]), axis=1)


def _encoded_pages(units: _Units, page_units: int) -> Iterator[bytes]:
    """What each full page of `units` feeds into its hash."""
    pages = units.shape[0] // page_units
    width = 1 if units.ndim == 1 else units.shape[1]
    table = np.ascontiguousarray(units[: pages * page_units]).reshape(pages, page_units * width)
    if table.dtype.itemsize == 4:
        raw, step = table.tobytes(), table.shape[1] * 4
        yield from (raw[at : at + step] for at in range(0, len(raw), step))
        return
    for row in table:
        yield _WIDE_MARK + row.tobytes() if row.max() >= _WIDE else row.astype("<u4").tobytes()
