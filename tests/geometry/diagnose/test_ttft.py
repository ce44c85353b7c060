"""Where the time of a hit went; a hit that helps has nothing wrong."""

from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.diagnose import TtftFacts, diagnose_ttft
from pdkv.geometry.model_config import load_config, model_shape

SHAPE = model_shape(load_config("glm-5.3"))
ROW = "fp8_ds_mla"
HIT = TtftFacts(prompt_tokens=100_000, hit_tokens=90_000, cold_ttft_s=10.0, ttft_s=8.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hit_tokens": 30_000, "ttft_s": 9.0}, "30% of the tokens, but only 9% of the scores"),
        ({"prefill_s": 1.0, "exposed_transfer_s": 6.0, "shipped_pages": 1_563}, "1,563 pages still went over the link"),
        ({"prefill_s": 1.5, "exposed_transfer_s": 0.5}, "6 s of 8 s are neither prefill nor transfer"),
        ({"prefill_s": 7.0}, "the hit is not prefill's"),
        ({}, "needs prefill_s and exposed_transfer_s"),
    ],
)
def test_where_the_time_of_a_hit_went(change: dict[str, Any], words: str) -> None:
    made = diagnose_ttft(SHAPE, ROW, replace(HIT, **change))
    assert made.wrong
    assert words in made.finding
    assert made.numbers["ttft_s"] == change.get("ttft_s", 8.0)
    assert made.way_out


def test_the_numbers_of_a_hit() -> None:
    made = diagnose_ttft(SHAPE, ROW, replace(HIT, exposed_transfer_s=6.0, shipped_pages=10))
    assert made.numbers["scores_saved_share"] == 0.81
    assert made.numbers["cross_pairs_left"] == 10_000 * 90_000
    assert made.numbers["shipped_bytes"] == 34_521_600


@pytest.mark.parametrize(("hit", "ttft_s"), [(90_000, 1.0), (90_000, 1.9), (50_000, 7.5), (99_968, 0.3)])
def test_a_hit_that_helps_has_nothing_wrong(hit: int, ttft_s: float) -> None:
    assert not diagnose_ttft(SHAPE, ROW, replace(HIT, hit_tokens=hit, ttft_s=ttft_s)).wrong


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, prefill_s=float("inf"))), "prefill_s"),
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, hit_tokens=100_001)), "hit_tokens"),
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, ttft_s=0.0)), "ttft_s, cold_ttft_s"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
