"""A request that can't, can't yet, or could well get its pages."""

from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.diagnose import RefusedFacts, diagnose_refused
from pdkv.geometry.model_config import load_config, model_shape

SHAPE = model_shape(load_config("glm-5.3"))
ROW = "fp8_ds_mla"
M1 = 1_048_576


def test_a_request_larger_than_the_pool() -> None:
    made = diagnose_refused(SHAPE, ROW, RefusedFacts(M1 + 256, total_pages=16_220, free_pages=16_220))
    assert "168 pages short of an empty pool (579,962,880 B)" in made.finding
    assert "index-K was left out" in made.finding
    assert (made.numbers["needed_pages"], made.numbers["needed_index_bytes"]) == (16_388, 16_388 * 177_408)
    far = diagnose_refused(SHAPE, ROW, RefusedFacts(2 * M1, total_pages=16_220, free_pages=0))
    assert "index-K was left out" not in far.finding


def test_a_request_that_others_keep_out() -> None:
    facts = RefusedFacts(M1, total_pages=20_000, free_pages=3_000, cached_pages=5_000, locked_pages=1_000)
    made = diagnose_refused(SHAPE, ROW, replace(facts, quarantined_pages=500))
    assert "9,384 pages are short; running requests hold 12,500, quarantine 500" in made.finding
    assert len(made.way_out) == 2
    assert "quarantine" not in diagnose_refused(SHAPE, ROW, facts).finding


def test_a_request_with_room_has_nothing_wrong() -> None:
    facts = RefusedFacts(M1, total_pages=20_000, free_pages=10_000, cached_pages=6_384)
    assert not diagnose_refused(SHAPE, ROW, facts).wrong
    assert diagnose_refused(SHAPE, ROW, replace(facts, cached_pages=6_383)).wrong


def test_under_dcp_a_page_serves_more_tokens() -> None:
    long = RefusedFacts(M1, total_pages=8_192, free_pages=8_192, dcp=2)
    assert not diagnose_refused(SHAPE, ROW, long).wrong
    assert diagnose_refused(SHAPE, ROW, replace(long, dcp=1)).wrong


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: diagnose_refused(SHAPE, ROW, RefusedFacts(-1, 1, 1)), "request_tokens"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
