"""The demo's prompts: what is hit is known beforehand, from hashing them as a node does."""

from dataclasses import replace

import numpy as np
import pytest

from pdkv.cli.demo.asks import (
    CHUNK_TOKENS,
    FAULT_PROMPT_TOKENS,
    OUTPUT_TOKENS,
    Ask,
    Kind,
    fault_tokens,
    make_asks,
    text_tokens,
)
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.kvcache.page_hash import chain

SHAPE = model_shape(load_config("tiny"))
PAGE = page_format(SHAPE).page_tokens
COUNTS = (6, 7, 9, 12, 16, 40)


def pages_of(tokens: np.ndarray) -> list[bytes]:
    hashes = chain(tokens, page_tokens=PAGE)
    return [hashes.at(i) for i in range(len(hashes))]


def hits(asks: list[Ask]) -> list[int]:
    """The leading pages of each that an earlier one has: what decode's tree gives, where nothing is evicted."""
    known: set[bytes] = set()
    found = []
    for ask in asks:
        pages = pages_of(ask.tokens)
        found.append(next((i for i, page in enumerate(pages) if page not in known), len(pages)))
        known.update(pages)
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_hits_are_the_shared_pages_and_no_others(count: int) -> None:
    asks = make_asks(count, PAGE)
    assert hits(asks) == [ask.hit_pages for ask in asks]
    assert all((ask.hit_pages > 0) == (ask.kind is Kind.SHARED) for ask in asks)


def test_a_wrong_number_of_hits_would_be_found() -> None:
    asks = make_asks(6, PAGE)
    shared = next(i for i, ask in enumerate(asks) if ask.kind is Kind.SHARED)
    asks[shared] = replace(asks[shared], tokens=text_tokens(5000, 700))
    assert hits(asks) != [ask.hit_pages for ask in asks]


@pytest.mark.parametrize("count", COUNTS)
def test_every_kind_is_there(count: int) -> None:
    asks = make_asks(count, PAGE)
    kinds = [ask.kind for ask in asks]
    assert len(asks) == count + 1
    assert kinds[-1] is Kind.KILLED
    assert kinds.count(Kind.KILLED) == 1
    assert {*kinds} == {*Kind}
    assert kinds.count(Kind.TOGETHER) % 4 == 0
    assert len({ask.name for ask in asks}) == len(asks)


@pytest.mark.parametrize("count", COUNTS)
def test_prompts_are_as_long_as_the_demo_says(count: int) -> None:
    asks = make_asks(count, PAGE)
    for ask in asks:
        assert 1000 <= len(ask.tokens) <= 4000, ask.name
        assert len(ask.tokens) + ask.sampling.max_tokens <= load_config("tiny")["max_position_embeddings"]
        assert int(ask.tokens.max()) < SHAPE.vocab_size
        assert ask.tokens.dtype == np.uint32
        if ask.kind is Kind.COLD:
            assert len(ask.tokens) > CHUNK_TOKENS, "at least two chunks"


def test_some_end_on_a_page_edge_and_some_do_not() -> None:
    tails = {len(ask.tokens) % PAGE == 0 for ask in make_asks(9, PAGE)}
    assert tails == {True, False}


@pytest.mark.parametrize("count", COUNTS)
def test_greedy_and_seeded_in_turn(count: int) -> None:
    assert {ask.sampling.temperature for ask in make_asks(count, PAGE)} == {0.0, 0.8}
    assert all(ask.sampling.max_tokens >= OUTPUT_TOKENS for ask in make_asks(count, PAGE))


def test_every_run_asks_the_same() -> None:
    for one, again in zip(make_asks(9, PAGE), make_asks(9, PAGE), strict=True):
        assert np.array_equal(one.tokens, again.tokens)
        assert replace(one, tokens=again.tokens) == again


def test_faults_strike_prompts_of_their_own() -> None:
    prompts = [ask.tokens for ask in make_asks(40, PAGE)] + [fault_tokens(i) for i in (0, 1, 2, 3, 4, 99)]
    firsts = [pages_of(tokens)[0] for tokens in prompts if len(tokens) >= PAGE]
    shared = sum(ask.kind is Kind.SHARED for ask in make_asks(40, PAGE))
    assert len(set(firsts)) == len(firsts) - shared
    assert len(fault_tokens(0)) == FAULT_PROMPT_TOKENS > CHUNK_TOKENS
    assert len(fault_tokens(4, 2000)) == 2000


def test_text_of_any_length() -> None:
    for length in (1, 63, 64, 65, 1000):
        assert len(text_tokens(7, length)) == length
    # one is not the beginning of another
    assert not np.array_equal(text_tokens(1, 64), text_tokens(10, 64))
