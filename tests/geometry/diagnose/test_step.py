"""Which read makes steps grow; steps that don't grow have nothing wrong."""

from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.diagnose import StepFacts, diagnose_step
from pdkv.geometry.model_config import load_config, model_shape

SHAPE = model_shape(load_config("glm-5.3"))
ROW = "fp8_ds_mla"
M1 = 1_048_576
RATE = 4.8e12
INDEX, MAIN = 2_772, 51_168


def steps(bytes_per_token: float, requests: int = 1) -> StepFacts:
    """Steps of 10 ms and what so many bytes a token take at two thirds of the memory's rate."""
    long, short = (0.010 + n * bytes_per_token * requests / (RATE / 1.5) for n in (M1, 1000))
    return StepFacts(M1, long, 1000, short, RATE, requests)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(
    ("bytes_per_token", "words"),
    [
        (INDEX, "index-K explains it: each of 21 full layers"),
        (INDEX + MAIN, "sparse attention is off"),
        (INDEX * 3.5, "no read of either cache"),
        ((INDEX + MAIN) * 5, "more than all rows of both caches"),
    ],
)
def test_which_read_makes_steps_grow(bytes_per_token: float, words: str, requests: int) -> None:
    # one request at 1M reads 0.6 ms of index-K: to be seen at all, its growth must stand out of the step
    facts = steps(bytes_per_token, requests)
    facts = replace(facts, step_s=facts.step_s - 0.009, short_step_s=facts.short_step_s - 0.009)
    made = diagnose_step(SHAPE, ROW, facts)
    assert made.wrong
    assert words in made.finding
    assert made.numbers["index_read_per_step_bytes"] == INDEX * M1 * requests


@pytest.mark.parametrize("bytes_per_token", [INDEX + MAIN, (INDEX + MAIN) * 5])
def test_an_engine_that_is_dense_by_design_is_named_and_not_blamed(bytes_per_token: float) -> None:
    facts = steps(bytes_per_token, 16)
    made = diagnose_step(SHAPE, ROW, replace(facts, engine="reference"))
    assert not made.wrong
    assert "the reference engine is dense by design" in made.finding
    assert made.numbers["engine"] == "reference"
    # another one should not be, and index-K is read by all of them
    assert diagnose_step(SHAPE, ROW, replace(facts, engine="other")).wrong
    index = replace(steps(INDEX, 16), engine="reference")
    assert "index-K explains it" in diagnose_step(SHAPE, ROW, index).finding


def test_steps_that_do_not_grow_have_nothing_wrong() -> None:
    assert not diagnose_step(SHAPE, ROW, steps(0)).wrong
    assert not diagnose_step(SHAPE, ROW, StepFacts(M1, 0.0101, 1000, 0.01, RATE)).wrong


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: diagnose_step(SHAPE, ROW, replace(steps(0), step_s=float("nan"))), "step_s"),
        (lambda: diagnose_step(SHAPE, ROW, StepFacts(10, 1, 10, 1, RATE)), "short_context_tokens"),
        (
            lambda: diagnose_step(SHAPE, ROW, StepFacts(11, 1, 10, 0, RATE)),
            "step_s, short_step_s, memory_bytes_per_s, requests",
        ),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
