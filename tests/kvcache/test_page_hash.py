"""The hash chain against the golden vectors, in this process and in others, and the laws of a chain."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError
from pdkv.ids import PageHashes
from pdkv.kvcache.page_hash import chain, event_ids, extend, namespace_seed, tail_hash

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "page_hash.json").read_text())
TOKENS = {  # the golden file writes its inputs as expressions
    "list(range(130))": list(range(130)),
    "list(range(128))": list(range(128)),
    "list(range(63))": list(range(63)),
    "list(range(64)) + [2**40 + 5] + list(range(65, 128))": [*range(64), 2**40 + 5, *range(65, 128)],
    "[(i * 2654435761) % 154880 for i in range(1048576)]": np.arange(1 << 20, dtype=np.uint64) * 2654435761 % 154880,
}
WIDE = (1 << 32) + 7

columns = st.lists(st.integers(0, 300) | st.sampled_from([(1 << 32) - 1, 1 << 32, (1 << 64) - 1]), max_size=40)


def column(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint64)


def by_definition(tokens: list[int], page: int, seed: bytes, *, bigram: bool) -> bytes:
    """The chain as the formula says it, a token at a time."""
    units = list(pairwise(tokens)) if bigram else [(t,) for t in tokens]
    last, out = seed, b""
    for at in range(0, len(units) // page * page, page):
        flat = [t for unit in units[at : at + page] for t in unit]
        if max(flat) < 1 << 32:
            body = b"".join(t.to_bytes(4, "little") for t in flat)
        else:
            body = b"\xff" + b"".join(t.to_bytes(8, "little") for t in flat)
        last = hashlib.sha256(last + body).digest()
        out += last
    return out


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda v: v["name"])
def test_golden_vectors(vector: dict[str, Any]) -> None:
    hashes = chain(TOKENS[vector["tokens"]], page_tokens=GOLDEN["page_tokens"], bigram=vector["bigram"])
    assert len(hashes) == vector["pages"]
    ends = [hashes.at(0).hex(), hashes.at(len(hashes) - 1).hex()] if len(hashes) else [None, None]
    assert ends == [vector["first"], vector["last"]]
    assert event_ids(hashes)[: len(vector["event_ids"])] == vector["event_ids"]


def test_negative_control_one_token_changes_its_page_and_all_after() -> None:
    tokens = np.arange(256, dtype=np.uint32)
    other = tokens.copy()
    other[70] += 1
    a, b = chain(tokens), chain(other)
    assert [a.at(i) == b.at(i) for i in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_another_process_computes_the_same(hash_seed: str) -> None:
    program = (
        "import numpy as np; from pdkv.kvcache.page_hash import chain, namespace_seed; "
        "seed = namespace_seed(bytes(range(32)), 'tenant', 'salt'); "
        "print(chain(np.arange(130, dtype=np.uint32)).raw.hex(), chain(np.arange(130), seed=seed).raw.hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.check_output([sys.executable, "-c", program], env=env, text=True, timeout=60)
    plain, seeded = printed.split()
    vector = GOLDEN["vectors"][0]
    assert (plain[:64], plain[64:]) == (vector["first"], vector["last"])
    assert seeded == chain(range(130), seed=namespace_seed(bytes(range(32)), "tenant", "salt")).raw.hex()


@given(columns, st.integers(1, 5), st.booleans(), st.sampled_from([b"", b"s" * 32]))
def test_chain_is_its_definition(tokens: list[int], page: int, bigram: bool, seed: bytes) -> None:
    hashes = chain(column(tokens), page_tokens=page, seed=seed or None, bigram=bigram)
    assert hashes.raw == by_definition(tokens, page, seed, bigram=bigram)


@given(columns, st.integers(1, 5), st.booleans(), st.data())
def test_extension_equals_the_chain_at_once(tokens: list[int], page: int, bigram: bool, data: st.DataObject) -> None:
    whole = chain(column(tokens), page_tokens=page, bigram=bigram)
    known = data.draw(st.integers(1, len(whole))) if len(whole) else 0
    if known:
        further = extend(whole.at(known - 1), column(tokens[known * page :]), page_tokens=page, bigram=bigram)
        assert whole.part(0, known).raw + further.raw == whole.raw


@given(columns, st.integers(1, 5), st.booleans())
def test_prefix_of_tokens_is_prefix_of_hashes(tokens: list[int], page: int, bigram: bool) -> None:
    whole = chain(column(tokens), page_tokens=page, bigram=bigram)
    part = chain(column(tokens[: len(tokens) // 2]), page_tokens=page, bigram=bigram)
    assert whole.part(0, len(part)) == part


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">u4"])
def test_hashes_are_of_values_not_of_dtypes(dtype: str) -> None:
    assert chain(np.arange(127).astype(dtype)) == chain(range(127))


def test_a_strided_column_is_hashed_as_it_reads() -> None:
    assert chain(np.arange(256, dtype=np.uint32)[::2]) == chain(list(range(0, 256, 2)))


def test_bigram_of_a_wide_lookahead_makes_the_page_wide() -> None:
    tokens = [*range(64), WIDE]
    assert chain(column(tokens), bigram=True).raw == by_definition(tokens, 64, b"", bigram=True)
    assert chain(column(tokens)).raw == by_definition(tokens, 64, b"", bigram=False)


def test_seed_comes_before_the_first_page_only() -> None:
    seed = namespace_seed(bytes(32), "", "")
    assert chain(range(128), seed=seed).raw == by_definition(list(range(128)), 64, seed, bigram=False)


def test_tail_hash_covers_last_hash_and_every_tail_token() -> None:
    last = chain(range(64)).at(0)
    assert tail_hash(last, [1, 2, 3]) == hashlib.sha256(last + np.array([1, 2, 3], "<u4").tobytes()).digest()
    assert tail_hash(last, [WIDE]) == hashlib.sha256(last + b"\xff" + WIDE.to_bytes(8, "little")).digest()
    assert tail_hash(last, []) == hashlib.sha256(last).digest()
    assert tail_hash(b"", [5]) == hashlib.sha256(np.array([5], "<u4").tobytes()).digest()
    assert len({tail_hash(last, t) for t in ([1, 2], [2, 1], [1], [])} | {tail_hash(b"", [1, 2])}) == 5


@given(st.tuples(st.text(max_size=5), st.text(max_size=5)), st.tuples(st.text(max_size=5), st.text(max_size=5)))
def test_namespace_seed_is_unambiguous(a: tuple[str, str], b: tuple[str, str]) -> None:
    assert (namespace_seed(bytes(32), *a) == namespace_seed(bytes(32), *b)) == (a == b)


def test_namespace_seed_moves_no_text_between_its_parts() -> None:
    seeds = {namespace_seed(bytes(32), *parts) for parts in (("ab", ""), ("a", "b"), ("", "ab"), ("ab\0", ""))}
    assert len(seeds) == 4
    assert namespace_seed(bytes(31) + b"\1", "ab", "") not in seeds
    assert len(namespace_seed(bytes(32), "\ud800", "")) == 32


def test_event_ids_are_big_endian_and_signed() -> None:
    assert event_ids(PageHashes(b"\xff" * 32 + b"\0" * 7 + b"\1" + b"\xff" * 24)) == [-1, 1]
    assert event_ids(PageHashes()) == []


@pytest.mark.parametrize(
    "tokens", [[-1], [0.5, 1.0], np.zeros((2, 2), np.uint32), ["a"], np.ones(3, bool)], ids=["neg", "f", "2d", "s", "b"]
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    for call in (lambda: chain(tokens), lambda: tail_hash(bytes(32), tokens), lambda: extend(bytes(32), tokens)):
        with pytest.raises(BoundsError, match="token"):
            call()


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(BoundsError, match="seed"):
        chain([1], seed=b"short")
    with pytest.raises(BoundsError, match="page tokens"):
        chain([1], page_tokens=0)
    with pytest.raises(BoundsError, match="last page hash"):
        tail_hash(b"short", [1])
    with pytest.raises(BoundsError, match="content fingerprint"):
        namespace_seed(b"short", "", "")
    with pytest.raises(BoundsError, match="seed"):
        extend(b"", [1])
