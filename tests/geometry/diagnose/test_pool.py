"""A small pool is explained by the page that gives exactly it, and a pool as planned has nothing wrong."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import slot_page_bytes, usable_pages
from pdkv.geometry.diagnose import NOTHING_WRONG, PoolFacts, diagnose_pool
from pdkv.geometry.model_config import ModelShape, load_config, model_shape

SHAPE = model_shape(load_config("glm-5.3"))
ROW = "fp8_ds_mla"
GB56 = 56 * 10**9


def full_layers(count: int) -> ModelShape:
    return replace(SHAPE, indexer_types=tuple("full" if i < count else "shared" for i in range(78)))


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


@pytest.mark.parametrize(
    ("facts", "ways"),
    [
        (pool_of(full_layers(39)), ["indexer_types"]),
        (pool_of(SHAPE, "bf16"), ["--main-row bf16"]),
        (
            pool_of(replace(SHAPE, draft_layers=1)),
            ["without an MTP layer more, as planned, or plan with --draft-layers"],
        ),
        # as many bytes as 42 full layers
        (pool_of(SHAPE, dcp=2), ["indexer_types", "DCP 1, or plan with --dcp 2"]),
        (pool_of(replace(full_layers(40), draft_layers=1)), ["--draft-layers 1", "indexer_types"]),
    ],
)
def test_the_way_out_is_that_of_the_cause(facts: PoolFacts, ways: list[str]) -> None:
    made = diagnose_pool(SHAPE, ROW, facts)
    for way, words in zip(made.way_out, ways, strict=True):
        assert words in way


def test_an_mtp_layer_that_is_missing_has_its_own_way_out() -> None:
    drafting = replace(SHAPE, draft_layers=1)
    facts = replace(pool_of(SHAPE), page_bytes=3_452_160)
    smaller = replace(facts, usable_pages=facts.usable_pages - 2000)
    made = diagnose_pool(drafting, ROW, smaller)
    assert "an MTP layer less" in made.finding
    assert made.way_out == ("start the engine with its MTP layer, as planned, or plan with --draft-layers 0",)


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


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: diagnose_pool(SHAPE, ROW, PoolFacts(1000, 1)), "memory_bytes"),
        (lambda: diagnose_pool(SHAPE, "int8", PoolFacts(GB56, 1)), "main_row"),
        (lambda: diagnose_pool(SHAPE, ROW, PoolFacts(GB56, -1)), "usable_pages"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
