"""The oracle is right as often as it was told to be, and wrong otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Sampling
from pdkv.node.oracle import Oracle
from pdkv.node.ports import DraftAsk
from pdkv.node.sampling import sample
from tests.kvcache.pools import all_pages, tiny_format
from tests.node.toy import VOCAB, ToyEngine

SAMPLED = Sampling(temperature=1.0, seed=4)


def engine() -> ToyEngine:
    return ToyEngine(SlotPool.create(tiny_format(), 4))


def truth(token: int, count: int, sampling: Sampling) -> list[int]:
    plain, said = engine(), []
    for place in range(count):
        token = sample(
            plain.forward(np.array([token], np.uint32), place, all_pages(plain.pool)), sampling, place + 1
        ).token
        said.append(token)
    return said


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_a_sure_oracle_says_what_the_model_will_say(sampling: Sampling) -> None:
    model = engine()
    oracle = Oracle(model, VOCAB, acceptance=1.0)
    drafts = oracle.propose(DraftAsk(9, 0, 6, sampling, None), all_pages(model.pool))
    assert drafts.tokens.tolist() == truth(9, 6, sampling)
    assert drafts.tokens.dtype == np.uint32
    assert drafts.logits_digests == ()


def test_a_hopeless_one_is_always_wrong_and_stops_asking() -> None:
    model = engine()
    oracle = Oracle(model, VOCAB, acceptance=0.0)
    drafts = oracle.propose(DraftAsk(9, 0, 6, Sampling(), None), all_pages(model.pool))
    assert len(drafts.tokens) == 6
    assert int(drafts.tokens[0]) != truth(9, 1, Sampling())[0]
    assert model.steps == [(0, 1)]


def test_acceptance_is_drawn_by_place_the_same_in_every_run() -> None:
    right = [Oracle(engine(), VOCAB, acceptance=0.8, seed=1)._right(place) for place in range(2000)]
    assert right == [Oracle(engine(), VOCAB, acceptance=0.8, seed=1)._right(place) for place in range(2000)]
    assert right != [Oracle(engine(), VOCAB, acceptance=0.8, seed=2)._right(place) for place in range(2000)]
    assert abs(np.mean(right) - 0.8) < 0.03


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_an_acceptance_is_a_probability(acceptance: float) -> None:
    with pytest.raises(BoundsError, match="acceptance"):
        Oracle(engine(), VOCAB, acceptance=acceptance)
    with pytest.raises(BoundsError, match="vocabulary"):
        Oracle(engine(), 1, acceptance=1.0)
