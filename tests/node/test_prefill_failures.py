"""Prefill when something breaks inside it: the engine, its logits, the seal, or another request of the same prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdkv.errors import BadLogits, RequestCancelled
from tests.node.scene import alone, answers, gated, prefill_request, recovered, request, rested, run, said, turns
from tests.node.toy import Pair, make_pair


def nth(count: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes the `count`-th thing only."""
    seen = 0

    def apply(thing: Any) -> Any:
        nonlocal seen
        seen += 1
        return change(thing) if seen == count else thing

    return apply


def explode(_: Any) -> Any:
    raise RuntimeError("the engine broke")


def spoil(logits: Any) -> Any:
    spoiled = logits.copy()
    spoiled[3] = np.nan
    return spoiled


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(("what", "kind"), [(explode, RuntimeError), (spoil, BadLogits)])
def test_a_step_that_fails_ends_the_request_and_reaches_nobody_elses_cache(
    what: Callable[[Any], Any], kind: type[Exception], step: int
) -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(300)
        pair.prefill.parts.engine.change = nth(step, what)  # type: ignore[attr-defined]
        with pytest.raises(kind):
            await answers(pair.decode.generate(asked))
        await rested(pair)
        for node in pair.nodes:
            assert node.parts.manager.census()["cached"] <= 2 * (step - 1)
        assert tuple((await answers(pair.decode.generate(asked)))[0]) == alone(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_seal_that_fails_ends_the_request(at: int) -> None:
    async def scenario(pair: Pair) -> None:
        verifier, count = pair.prefill.parts.verifier, nth(at, explode)
        original = verifier.seal
        verifier.seal = lambda *args: (count(None), original(*args))[1]  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="broke"):
            await answers(pair.decode.generate(request(300)))
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("gone", ["first", "second"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_of_two_requests_of_one_prompt_the_other_goes_on(gone: str, at: int) -> None:
    async def scenario(pair: Pair) -> None:
        gate = gated(pair.prefill.parts.engine, "forward", at=at)
        asked = [request(300), request(300, name="r1")]
        asking = [asyncio.create_task(answers(pair.decode.generate(a))) for a in asked]
        await gate.reached()
        leaver, stayer = asking if gone == "first" else asking[::-1]
        leaver.cancel()
        await turns()
        gate.open()
        assert tuple((await stayer)[0]) == alone(pair, asked[0])
        await asyncio.wait([leaver])
        assert leaver.cancelled()
        await recovered(pair)

    run(scenario, make_pair())


def test_a_request_whose_own_worker_ends_is_not_told_as_the_callers_cancellation() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        gate = gated(pair.prefill.parts.engine, "forward")
        running = asyncio.create_task(said(pair.prefill.prefill(prefill_request(pair, request(300)))))
        await gate.reached()
        queued = asyncio.create_task(said(pair.prefill.prefill(prefill_request(pair, request(300, name="r1")))))
        await turns()
        closing = asyncio.create_task(asyncio.to_thread(pair.prefill.parts.steps.close))
        with pytest.raises(RequestCancelled):
            await queued
        gate.open()
        with pytest.raises(RuntimeError):  # its next step has no worker
            await running
        await closing
        await rested(pair)

    run(scenario, make_pair())
