"""Steps of a prefill stay within the memory that was planned for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError
from pdkv.geometry.workspaces import LOGITS_NEVER_SPLIT_BELOW, logits_row_bytes
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.workspace import Workspace
from tests.node.scene import alone, answers, recovered, request, run
from tests.node.toy import Pair, make_pair

MIB = 1 << 20
WIDE = Workspace(64, 2048, 32_768)


@given(
    start=st.integers(0, 200_000),
    length=st.integers(1, 300_000),
    chunk=st.integers(1, 512).map(lambda pages: 64 * pages),
    budget=st.integers(1, 2048).map(lambda size: size * MIB),
)
def test_steps_cover_everything_within_the_budget(start: int, length: int, chunk: int, budget: int) -> None:
    steps = replace(WIDE, scores_bytes=budget).steps(start, start + length, chunk)
    assert [s.start for s in steps] == [start, *(s.stop for s in steps[:-1])]
    assert steps[-1].stop == start + length
    for step in steps:
        rows = step.stop - step.start
        assert rows <= chunk
        assert step.stop == start + length or rows % 64 == 0
        small = rows <= 64 or rows * step.stop < LOGITS_NEVER_SPLIT_BELOW
        assert small or rows * logits_row_bytes(step.stop) <= budget


@given(start=st.integers(0, 200_000), budget=st.integers(1, 2048).map(lambda size: size * MIB))
def test_no_step_is_shorter_than_it_must_be(start: int, budget: int) -> None:
    first = replace(WIDE, scores_bytes=budget).steps(start, start + 32_768, 32_768)[0]
    rows = first.stop - first.start + 64
    assert rows > 32_768 or (
        rows * logits_row_bytes(start + rows) > budget and rows * (start + rows) >= LOGITS_NEVER_SPLIT_BELOW
    )


def test_without_a_budget_only_tokens_count() -> None:
    assert WIDE.steps(64, 100_000, 65_536)[0] == slice(64, 64 + 32_768)
    assert [s.start for s in WIDE.steps(0, 300, 128)] == [0, 128, 256]
    assert WIDE.steps(5, 5, 64) == []


def test_the_plan_is_that_of_the_planner() -> None:
    assert WIDE.plan() == {"max_batched_tokens": 32_768, "topk_bytes": 268_435_456}
    assert replace(WIDE, scores_bytes=7).plan()["scores_bytes"] == 7


@pytest.mark.parametrize("tokens", [0, 63, 100])
def test_steps_are_whole_pages(tokens: int) -> None:
    with pytest.raises(BoundsError, match="max_batched_tokens"):
        replace(WIDE, max_batched_tokens=tokens)


def test_a_node_keeps_to_it_and_shows_it() -> None:
    async def scenario(pair: Pair) -> None:
        settings = PrefillSettings(chunk_tokens=256, max_batched_tokens=64, scores_bytes=MIB)
        pair.prefill = pair.directory.peers["p0"] = PrefillNode(pair.prefill.parts, settings)
        asked = request(300)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert done.chunk_starts == (0, 64, 128, 192, 256)
        topk = pair.prefill.parts.contract.index_topk * 64 * 4
        expected = {"max_batched_tokens": 64, "topk_bytes": topk, "scores_bytes": MIB}
        assert pair.prefill.status().workspace == expected
        await recovered(pair)

    run(scenario, make_pair())


def test_it_says_in_words_what_is_planned() -> None:
    assert str(WIDE) == "steps of up to 32,768 tokens, 268,435,456 B for what they select, as many scores as that takes"
    assert str(replace(WIDE, scores_bytes=64 * MIB)).endswith(", 67,108,864 B of scores")
