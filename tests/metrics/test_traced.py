"""What a trace has of a request: its stages one after the other, and no token."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from pdkv.errors import PeerLost
from pdkv.metrics.names import FIRST_STEP, TTFT_STAGES
from pdkv.node.messages import GenerateDone
from pdkv.node.stages import Stage
from pdkv.tracing.span import within
from tests.metrics.test_served import metered
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair
from tests.tracing.test_span import Told

STAGES = tuple(f"pdkv.{name}" for name in TTFT_STAGES)


def traced(body: Callable[[Pair, Told], Coroutine[Any, Any, None]]) -> Told:
    root = Told("root")

    async def scenario(pair: Pair) -> None:
        metered(pair)
        with within(root):
            await body(pair, root)

    run(scenario, make_pair())
    return root


def stages(root: Told) -> list[Told]:
    return [child for child in root.children if child.name in (*STAGES, f"pdkv.{FIRST_STEP}")]


def test_stages_follow_one_another_up_to_the_first_token_and_the_first_step() -> None:
    done: list[GenerateDone] = []

    async def body(pair: Pair, root: Told) -> None:
        done.append((await answers(pair.decode.generate(request(300))))[1])

    root = traced(body)
    told = stages(root)
    assert [each.name for each in told] == [*STAGES, f"pdkv.{FIRST_STEP}"]
    for before, after in pairwise(told[:-1]):
        assert before.facts["ended_s"] == pytest.approx(after.facts["began_s"])
    facts, shipment = root.facts, done[0].shipment
    assert facts["gen_ai.usage.input_tokens"] == 300
    assert facts["gen_ai.usage.output_tokens"] == 8
    assert facts["pdkv.finish_reason"] == "length"
    assert facts["pdkv.pages"] == facts["pdkv.pages.shipped"] == shipment.pages_shipped == 5


def test_a_request_that_failed_has_the_stages_that_it_came_to() -> None:
    async def body(pair: Pair, root: Told) -> None:
        hook = pair.decode.parts.at

        def failing(stage: Stage, name: Any) -> None:
            hook(stage, name)
            if stage is Stage.ACCEPTED:
                raise PeerLost("gone")

        object.__setattr__(pair.decode.parts, "at", failing)
        with pytest.raises(PeerLost):
            await answers(pair.decode.generate(request(300)))

    root = traced(body)
    assert [each.name for each in stages(root)] == list(STAGES[:2])
    assert root.facts["gen_ai.usage.input_tokens"] == 300
    assert "gen_ai.usage.output_tokens" not in root.facts


def test_without_a_trace_nothing_is_asked() -> None:
    async def body(pair: Pair) -> None:
        metered(pair)
        pair.decode.timeline.so_far = None  # type: ignore[attr-defined]
        await answers(pair.decode.generate(request(100)))

    run(body, make_pair())
