"""An answer grows token by token, wherever its logits come from, and ends where plain decoding ends."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.answer import Answer, plain_step
from pdkv.node.messages import Sampling, Token
from pdkv.node.sampling import logits_digest, sample
from tests.kvcache.pools import all_pages, tiny_format
from tests.node.toy import ToyEngine


def answer(sampling: Sampling, *, first: int = 5, want_logits: bool = False) -> Answer:
    return Answer(Token(0, first, -1.0), 10, sampling, pages=LocalPages.none(), want_logits=want_logits)


def logits_for(token: int) -> np.ndarray:
    row = np.zeros(20, np.float32)
    row[token] = 9.0
    return row


def test_a_token_is_drawn_by_the_place_that_it_takes() -> None:
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=3)
    so_far = answer(sampling, want_logits=True)
    flat = np.zeros(20, np.float32)
    said = [so_far.draw(flat) for _ in range(6)]
    assert [t.token for t in said] == [sample(flat, sampling, place).token for place in range(11, 17)]
    assert len({t.token for t in said}) > 1
    assert [t.index for t in said] == [1, 2, 3, 4, 5, 6]
    assert {t.logits_digest for t in said} == {logits_digest(flat)}
    assert (so_far.place, so_far.last, so_far.made, so_far.left) == (16, said[-1].token, 7, 2)


@pytest.mark.parametrize(
    ("sampling", "first", "over", "reason"),
    [
        (Sampling(max_tokens=1), 5, True, "length"),
        (Sampling(max_tokens=2), 5, False, "length"),
        (Sampling(max_tokens=2, stop_tokens=(4, 5)), 5, True, "stop"),
        (Sampling(max_tokens=1, stop_tokens=(5,)), 5, True, "stop"),
    ],
)
def test_it_ends_with_its_last_token_or_a_stop_token(sampling: Sampling, first: int, over: bool, reason: str) -> None:
    assert answer(sampling, first=first).over is over
    assert answer(sampling, first=first).reason == reason


def test_digests_are_made_only_when_asked_for() -> None:
    assert answer(Sampling()).draw(logits_for(3)) == Token(1, 3, pytest.approx(-0.0023, abs=1e-3), 0)


def test_a_plain_step_says_one_token_of_one_engine_step() -> None:
    pool = SlotPool.create(tiny_format(), 3)
    engine = ToyEngine(pool)
    so_far = Answer(Token(0, 7, 0.0), 0, Sampling(), pages=all_pages(pool), want_logits=False)
    first, second = plain_step(engine, so_far)[0], plain_step(engine, so_far)[0]
    assert engine.steps == [(0, 1), (1, 2)]
    logits = engine.forward(np.array([7, first.token], np.uint32), 0, all_pages(pool))
    assert second.token == int(logits.argmax())
