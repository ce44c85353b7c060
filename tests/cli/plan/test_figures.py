"""From options to figures: contexts, layouts, cards, workspaces."""

from typing import Any

import pytest

from pdkv.cli.plan.figures import find_card, make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.errors import ConfigError
from pdkv.geometry.fleet import Layout


def planned(model: str = "glm-5.3", **options: Any) -> Any:
    return make_plan(PlanOptions(model=model, **options))


def test_contexts_end_where_the_model_does() -> None:
    assert [c.tokens for c in planned().contexts] == [8_192, 131_072, 524_288, 1_048_576]
    assert [c.tokens for c in planned("deepseek-v3.2").contexts] == [8_192, 131_072, 163_840]
    assert [c.tokens for c in planned("tiny", context=[5, 3]).contexts] == [5, 3]


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, Layout()),
        ({"gpus": 8}, Layout(gpus=8, tp=8, ep=8)),
        ({"tp": 4, "dp": 2}, Layout(gpus=8, tp=4, dp=2, ep=8)),
        ({"gpus": 16, "pp": 2, "dcp": 4}, Layout(gpus=16, tp=8, ep=8, pp=2, dcp=4)),
        ({"gpus": 16, "dp": 2, "ep": 4}, Layout(gpus=16, tp=8, dp=2, ep=4)),
    ],
)
def test_what_is_not_said_of_a_layout_follows(options: dict[str, Any], layout: Layout) -> None:
    assert planned(gpu="h200", **options).setup.layout == layout


def test_a_card_by_name_or_memory() -> None:
    assert find_card("H200").memory_bytes == 143_771 * 2**20
    assert find_card("141GiB").memory_bytes == 141 * 2**30
    for text in ("h300", "12XB"):
        with pytest.raises(ConfigError, match="gpu"):
            find_card(text)


def test_workspaces_and_traffic_are_the_golden_ones() -> None:
    plan = planned(gpu="h200", gpus=8, output_tokens=0)
    assert plan.buffers.topk_buffer_bytes == 268_435_456
    assert (plan.buffers.table_row_per_page_bytes, plan.buffers.table_row_per_token_bytes) == (2_097_152, 134_217_728)
    assert plan.buffers.prefill_scores_bytes == 137_438_953_472
    assert (plan.buffers.prefill.budget_bytes, plan.buffers.prefill.rows_per_chunk) == (3_015_096_401, 718)
    assert plan.index.written_per_chunk_bytes == 90_832_896
    assert plan.index.read_per_step_bytes == 2_906_652_672
    assert plan.index.read_over_prefill_bytes == 47_959_769_088
    assert round(plan.index.seconds, 4) == 0.0581
    assert plan.index.score_flops_per_pair == 21 * 8192


def test_drafts_multiply_rows_and_need_room() -> None:
    plain, drafts = planned(memory="56.6GB"), planned(memory="56.6GB", draft_tokens=5)
    assert drafts.buffers.decode_rows == 6 * plain.buffers.decode_rows == 6 * 32
    assert drafts.index.written_per_step_bytes == 16_632
    assert drafts.contexts[-1].fit.needed_pages == 16_389
    assert plain.contexts[-1].fit.needed_pages == 16_388


def test_groups_and_a_pooled_index() -> None:
    assert planned(groups=2).buffers.table_row_per_page_bytes == 2 * planned().buffers.table_row_per_page_bytes
    two = planned(gpu="h200", gpus=8, groups=2).pool.budget
    assert two.page_table_bytes == 2 * planned(gpu="h200", gpus=8).pool.budget.page_table_bytes


def test_hit_and_tails_are_of_the_longest_context() -> None:
    plan = planned(hit=100_000, short_requests=1000)
    assert (plan.hit.pages, plan.hit.bytes.main, plan.hit.bytes.index) == (1_562, 5_115_162_624, 277_111_296)
    assert plan.hit.scores_share == (99_968 / 1_048_576) ** 2
    assert plan.tail.average_bytes == 500 * 3_452_160
    assert (planned().hit, planned().tail) == (None, None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"context": [0]}, "context"),
        ({"requests": 0}, "requests"),
        ({"chunk_tokens": 0}, "max_batched_tokens"),
        ({"hit": 2_000_000}, "hit"),
        ({"short_requests": -1}, "requests"),
        ({"groups": 0}, "groups"),
        ({"dcp": 0}, "gpus"),
        ({"gpu": "h200", "gpus": 7, "tp": 8}, "gpus"),
        ({"gpu": "h200", "gpus": 0}, "gpus"),
        ({"gpu": "h200", "dp": 0}, "dp"),
        ({"gpu": "h200", "reserve": "some"}, "reserve"),
        ({"gpu": "h200", "weights": "int2"}, "weights"),
        ({"draft_tokens": -1}, "draft_tokens"),
    ],
)
def test_errors_name_the_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(**options)
    assert error.value.fields["field"] == field
