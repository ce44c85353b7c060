import math

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BadLogits, BoundsError
from pdkv.node.messages import Sampling
from pdkv.node.sampling import logits_digest, sample

HOT = Sampling(temperature=1.0)


def logits_of(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def test_greedy_takes_the_largest_and_of_ties_the_lowest_id() -> None:
    token = sample(np.array([1, 5, 0, 5], np.float32), Sampling(), 3)
    assert token.token == 1
    assert token.logprob == pytest.approx(5 - math.log(math.exp(1) + 2 * math.exp(5) + 1))


def test_logprob_is_that_of_the_logits_as_they_came() -> None:
    logits = logits_of([0.5, 0.3, 0.2])
    for sampling in (Sampling(), Sampling(temperature=0.2, top_p=0.4), Sampling(temperature=3.0)):
        token = sample(logits + 7, sampling, 0)
        assert math.exp(token.logprob) == pytest.approx([0.5, 0.3, 0.2][token.token], rel=1e-6)


def test_draws_follow_the_probabilities_and_the_temperature() -> None:
    logits = logits_of([0.5, 0.3, 0.2])
    for temperature in (1.0, 2.0):
        drawn = [sample(logits, Sampling(temperature=temperature), p).token for p in range(4000)]
        want = np.array([0.5, 0.3, 0.2]) ** (1 / temperature)
        assert np.bincount(drawn) / 4000 == pytest.approx(want / want.sum(), abs=0.03)


def test_the_draw_is_this_one_on_any_machine() -> None:
    logits = np.linspace(-2, 2, 257, dtype=np.float32)
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=42)
    assert [sample(logits, sampling, p).token for p in range(8)] == [189, 231, 232, 205, 197, 241, 237, 212]


def test_seed_and_position_both_count() -> None:
    logits = np.zeros(1000, np.float32)
    one = [sample(logits, Sampling(temperature=1.0, seed=1), p).token for p in range(20)]
    two = [sample(logits, Sampling(temperature=1.0, seed=2), p).token for p in range(20)]
    assert len(set(one)) > 15
    assert one != two
    assert sample(logits, Sampling(temperature=1.0, seed=2**64 + 1), 0).token == one[0]  # seeds count modulo 2^64
    assert sample(logits, Sampling(temperature=1.0, seed=-1), 0).token in range(1000)


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, {2}), (0.55, {2, 0}), (0.8, {2, 0, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = logits_of([0.25, 0.05, 0.5, 0.2])
    assert {sample(logits, Sampling(temperature=1.0, top_p=top_p), p).token for p in range(300)} == kept


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40),
    st.floats(0, 1e300),
    st.floats(1e-9, 1),
)
def test_any_finite_logits_give_a_token_and_a_logprob(values: list[float], temperature: float, top_p: float) -> None:
    token = sample(np.array(values, np.float32), Sampling(temperature=temperature, top_p=top_p), 5)
    assert 0 <= token.token < len(values)
    assert token.logprob <= 1e-9


def test_a_tiny_temperature_is_greedy() -> None:
    logits = np.array([0.0, 3.0, 2.9], np.float32)
    assert sample(logits, Sampling(temperature=5e-324), 0).token == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    logits = np.zeros(9, np.float32)
    logits[[4, 7]] = bad
    with pytest.raises(BadLogits, match="2 of 9") as caught:
        sample(logits, Sampling(), 11)
    assert caught.value.fields["token"] == "4"
    assert caught.value.fields["position"] == "11"


@pytest.mark.parametrize(
    ("sampling", "position", "named"),
    [
        (Sampling(temperature=-0.1), 0, "temperature"),
        (Sampling(temperature=math.nan), 0, "temperature"),
        (Sampling(temperature=math.inf), 0, "temperature"),
        (Sampling(temperature=1.0, top_p=0.0), 0, "top_p"),
        (Sampling(temperature=1.0, top_p=1.1), 0, "top_p"),
        (Sampling(temperature=1.0, top_p=math.nan), 0, "top_p"),
        (HOT, -1, "position"),
    ],
)
def test_settings_that_mean_nothing_are_refused(sampling: Sampling, position: int, named: str) -> None:
    with pytest.raises(BoundsError, match=named):
        sample(np.zeros(3, np.float32), sampling, position)


@pytest.mark.parametrize("shape", [(0,), (1, 4)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BoundsError, match="logits"):
        sample(np.zeros(shape, np.float32), Sampling(), 0)


def test_digest_is_xxh3_of_the_bytes() -> None:
    logits = np.array([1.5, -2.0], np.float32)
    assert logits_digest(logits) == xxhash.xxh3_64_intdigest(bytes.fromhex("0000c03f000000c0"))
    assert logits_digest(np.nextafter(logits, 9, dtype=np.float32)) != logits_digest(logits)
