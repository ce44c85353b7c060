"""Cards, layouts, and what a rank has left for pages."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import usable_pages
from pdkv.geometry.fleet import GPUS, Gpu, GpuMemory, Layout, find_gpu, given_pool, rank_pool, stage_shape, stages
from pdkv.geometry.model_config import load_config, model_shape, weight_shape

GLM = load_config("glm-5.3")
SHAPE, WEIGHTS = model_shape(GLM), weight_shape(GLM)
EIGHT = Layout(gpus=8, tp=8, ep=8)
H200 = GpuMemory(find_gpu("h200"), WEIGHTS)
ROW = "fp8_ds_mla"


def test_cards() -> None:
    # the golden logits budgets are of an H200 and of 80 GiB
    assert find_gpu("H200").memory_bytes == 150_754_820_096
    assert GPUS["h100"].memory_bytes == 85_520_809_984
    assert sorted(GPUS, key=lambda n: GPUS[n].memory_bytes) == list(GPUS)
    with pytest.raises(ConfigError, match="gpu: 'h300'"):
        find_gpu("h300")


def test_one_million_tokens_need_b200s_or_dcp() -> None:
    """As vLLM's recipe for GLM-5.2 says: fp8 on 8 H200, but 8 B200 for the full 1M context."""
    assert rank_pool(SHAPE, ROW, EIGHT, H200).tokens < 1_048_832
    assert rank_pool(SHAPE, ROW, EIGHT, GpuMemory(find_gpu("b200"), WEIGHTS)).tokens > 1_048_832
    assert rank_pool(SHAPE, ROW, Layout(gpus=8, tp=8, ep=8, dcp=2), H200).tokens > 1_048_832


def test_the_budget_adds_up() -> None:
    pool = rank_pool(SHAPE, ROW, EIGHT, GpuMemory(find_gpu("h200"), WEIGHTS, reserve_bytes=10**9))
    budget = pool.budget
    assert budget is not None
    assert budget.static_bytes == 150_754_820_096 * 9 // 10
    assert budget.topk_buffer_bytes == 268_435_456
    assert budget.page_table_bytes == 2_097_152
    parts = budget.weight_bytes + budget.topk_buffer_bytes + budget.page_table_bytes + 10**9
    assert parts + pool.available_bytes == budget.static_bytes
    assert pool.usable_pages == usable_pages(pool.available_bytes, pool.page.total)
    assert pool.tokens == pool.usable_pages * 64


def test_weights_that_do_not_fit_leave_no_pages() -> None:
    pool = rank_pool(SHAPE, ROW, EIGHT, GpuMemory(find_gpu("h100"), WEIGHTS))
    assert (pool.usable_pages, pool.available_bytes) == (0, 0)
    assert pool.budget is not None
    assert pool.budget.left_bytes < 0


def test_a_stage_starts_at_a_full_layer() -> None:
    assert stages(SHAPE, 1) == (range(78),)
    assert stages(SHAPE, 2) == (range(38), range(38, 78))
    assert stages(SHAPE, 4) == (range(18), range(18, 38), range(38, 58), range(58, 78))
    deepseek = model_shape(load_config("deepseek-v3.2"))
    assert stages(deepseek, 2) == (range(30), range(30, 61))


@given(st.integers(1, 16))
def test_stages_cover_the_layers(pp: int) -> None:
    made = stages(SHAPE, pp)
    assert [layer for stage in made for layer in stage] == list(range(78))
    assert {s.start for s in made} <= set(SHAPE.full_layers)


def test_a_stage_has_its_own_caches() -> None:
    drafting = model_shape(GLM, draft_layers=1)
    first, last = (stage_shape(drafting, s) for s in stages(drafting, 2))
    assert (first.num_layers, first.draft_layers, len(first.full_layers)) == (38, 0, 11)
    assert (last.num_layers, last.draft_layers, len(last.full_layers)) == (40, 1, 10)
    two = rank_pool(drafting, ROW, Layout(gpus=16, tp=8, ep=8, pp=2), H200)
    assert two.budget is not None
    assert two.budget.layers == range(38, 78)  # more layers, lm_head, and the draft layer
    assert two.usable_pages > 2 * rank_pool(drafting, ROW, EIGHT, H200).usable_pages


def test_dp_beside_gives_each_its_own_pool_and_shares_experts() -> None:
    both = rank_pool(SHAPE, ROW, Layout(gpus=16, tp=8, dp=2, ep=16), H200)
    assert both.budget is not None
    one = rank_pool(SHAPE, ROW, EIGHT, H200).budget
    assert one is not None
    assert both.budget.weights["routed experts"] * 2 == one.weights["routed experts"]
    assert both.budget.weights["attention"] == one.weights["attention"]


def test_given_memory_is_the_pools() -> None:
    pool = given_pool(SHAPE, ROW, 1, 56 * 10**9)
    assert (pool.usable_pages, pool.tokens, pool.budget) == (16_220, 1_038_080, None)
    assert given_pool(SHAPE, ROW, 2, 56 * 10**9).page_tokens == 128


def gpu_memory(**change: Any) -> GpuMemory:
    return GpuMemory(Gpu("a card", 10**11, 10**12), WEIGHTS, **change)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: Layout(gpus=8, tp=4), "gpus"),
        (lambda: Layout(gpus=0, tp=0), "gpus"),
        (lambda: Layout(gpus=8, tp=8, dcp=3), "dcp"),
        (lambda: Layout(gpus=8, tp=8, ep=3), "ep"),
        (lambda: rank_pool(SHAPE, ROW, Layout(gpus=3, tp=3), H200), "tp"),
        (lambda: stages(SHAPE, 22), "pp"),
        (lambda: stages(SHAPE, 0), "pp"),
        (lambda: rank_pool(SHAPE, ROW, EIGHT, gpu_memory(mem_fraction_static=0.0)), "mem_fraction_static"),
        (lambda: rank_pool(SHAPE, ROW, EIGHT, gpu_memory(mem_fraction_static=float("nan"))), "mem_fraction_static"),
        (lambda: rank_pool(SHAPE, ROW, EIGHT, gpu_memory(reserve_bytes=-1)), "reserve_bytes"),
        (lambda: rank_pool(SHAPE, ROW, EIGHT, gpu_memory(weight_dtype="int3")), "weights"),
        (lambda: rank_pool(SHAPE, "int8", EIGHT, H200), "main_row"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
