"""The four complaints: each cause is found from its numbers, and numbers that are fine find nothing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import slot_page_bytes, usable_pages
from pdkv.geometry.diagnose import (
    NOTHING_WRONG,
    PoolFacts,
    RefusedFacts,
    StepFacts,
    TtftFacts,
    diagnose_pool,
    diagnose_refused,
    diagnose_step,
    diagnose_ttft,
)
from pdkv.geometry.model_config import ModelShape, load_config, model_shape

SHAPE = model_shape(load_config("glm-5.3"))
ROW = "fp8_ds_mla"
GB56 = 56 * 10**9
M1 = 1_048_576


def full_layers(count: int) -> ModelShape:
    return replace(SHAPE, indexer_types=tuple("full" if i < count else "shared" for i in range(78)))


# --- pool -------------------------------------------------------------------------------------------------------------


def pool_of(shape: ModelShape, row: str = ROW, *, dcp: int = 1) -> PoolFacts:
    return PoolFacts(GB56, usable_pages(GB56, slot_page_bytes(shape, main_row=row, dcp=dcp).total))


@pytest.mark.parametrize(
    ("facts", "ratio", "cause"),
    [
        (pool_of(full_layers(39)), 0.95783, "39 layers with index-K instead of 21"),
        (pool_of(full_layers(78)), 0.87756, "78 layers with index-K instead of 21 (all layers treated as full)"),
        (pool_of(SHAPE, "bf16"), 0.58231, "main rows of 1152 B (bf16)"),
        (pool_of(replace(SHAPE, draft_layers=1)), 0.98564, "an MTP layer more"),
        (pool_of(SHAPE, dcp=2), 0.95111, "index-K of dcp 2 instead of 1"),
        (
            pool_of(replace(full_layers(40), draft_layers=1)),
            None,
            "an MTP layer more and 40 layers with index-K instead of 21",
        ),
    ],
)
def test_a_small_pool_is_explained(facts: PoolFacts, ratio: float | None, cause: str) -> None:
    made = diagnose_pool(SHAPE, ROW, facts)
    assert made.wrong
    assert cause in made.finding
    assert ratio is None or made.numbers["ratio"] == ratio
    assert made.numbers["usable_pages"] == facts.usable_pages
    assert made.way_out


def test_39_full_layers_are_the_golden_ratio_in_a_large_pool() -> None:
    memory = 10**15
    facts = PoolFacts(memory, usable_pages(memory, 64 * 56_316))
    assert diagnose_pool(SHAPE, ROW, facts).numbers["ratio"] == 0.95781


def test_a_page_size_that_is_known_is_believed() -> None:
    facts = PoolFacts(GB56, 15_000, page_bytes=64 * 56_316)
    assert "explained by: 39 layers" in diagnose_pool(SHAPE, ROW, facts).finding
    unknown = diagnose_pool(SHAPE, ROW, PoolFacts(GB56, 15_000, page_bytes=64 * 56_316 + 1))
    assert "no change of layers" in unknown.finding
    assert unknown.wrong


def test_a_plan_with_dcp_is_measured_by_its_own_pages() -> None:
    facts = replace(pool_of(SHAPE, dcp=2), dcp=2)
    assert not diagnose_pool(SHAPE, ROW, facts).wrong
    unshared = replace(pool_of(SHAPE, dcp=4), dcp=2)
    assert "index-K of dcp 4 instead of 2" in diagnose_pool(SHAPE, ROW, unshared).finding
    long = RefusedFacts(M1, total_pages=8_192, free_pages=8_192, dcp=2)
    assert not diagnose_refused(SHAPE, ROW, long).wrong
    assert diagnose_refused(SHAPE, ROW, replace(long, dcp=1)).wrong


def test_a_pooled_index_is_measured_with_the_keys_of_its_drafts() -> None:
    pooled = replace(SHAPE, index_kpool=2)
    page = slot_page_bytes(pooled, rollback_tokens=5).total
    facts = PoolFacts(GB56, usable_pages(GB56, page), page)
    assert diagnose_pool(pooled, ROW, facts).wrong
    assert not diagnose_pool(pooled, ROW, replace(facts, rollback_tokens=5)).wrong


def test_less_memory_than_planned_is_told_from_larger_pages() -> None:
    facts = PoolFacts(GB56, 12_000, page_bytes=3_452_160)
    made = diagnose_pool(SHAPE, ROW, facts)
    assert f"the pool got {12_001 * 3_452_160:,} B, not {GB56:,} B" in made.finding


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_a_pool_as_planned_has_nothing_wrong(more: int) -> None:
    made = diagnose_pool(SHAPE, ROW, PoolFacts(GB56, 16_220 + more))
    assert not made.wrong
    assert made.finding.startswith(NOTHING_WRONG)


@given(st.integers(1, 78), st.integers(10**10, 10**13))
def test_the_layers_that_made_the_pool_are_among_the_causes(count: int, memory: int) -> None:
    facts = PoolFacts(memory, usable_pages(memory, slot_page_bytes(full_layers(count)).total))
    made = diagnose_pool(SHAPE, ROW, facts)
    if facts.usable_pages >= usable_pages(memory, 3_452_160):
        assert not made.wrong
    else:
        assert f"{count} layers with index-K" in made.finding or "planned size" in made.finding


# --- refused ----------------------------------------------------------------------------------------------------------


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


# --- ttft -------------------------------------------------------------------------------------------------------------

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


# --- step -------------------------------------------------------------------------------------------------------------

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


def test_steps_that_do_not_grow_have_nothing_wrong() -> None:
    assert not diagnose_step(SHAPE, ROW, steps(0)).wrong
    assert not diagnose_step(SHAPE, ROW, StepFacts(M1, 0.0101, 1000, 0.01, RATE)).wrong


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: diagnose_pool(SHAPE, ROW, PoolFacts(1000, 1)), "memory_bytes"),
        (lambda: diagnose_pool(SHAPE, "int8", PoolFacts(GB56, 1)), "main_row"),
        (lambda: diagnose_pool(SHAPE, ROW, PoolFacts(GB56, -1)), "usable_pages"),
        (lambda: diagnose_refused(SHAPE, ROW, RefusedFacts(-1, 1, 1)), "request_tokens"),
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, prefill_s=float("inf"))), "prefill_s"),
        (lambda: diagnose_step(SHAPE, ROW, replace(steps(0), step_s=float("nan"))), "step_s"),
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, hit_tokens=100_001)), "hit_tokens"),
        (lambda: diagnose_ttft(SHAPE, ROW, replace(HIT, ttft_s=0.0)), "ttft_s, cold_ttft_s"),
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
