"""Whoever asked has enough of an answer: it ends as one that came to its end, whatever it waits for just then."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import BoundsError, UnknownRequest
from pdkv.ids import PageHashes, RequestId
from pdkv.node.messages import GenerateDone, Sampling, Token
from pdkv.node.preemption import PreemptPolicy
from tests.node.scene import alone, answers, gated, recovered, request, rested, run, turns, until
from tests.node.test_answer_pages import FACTS, cached, goes_on, written_pages
from tests.node.test_decoding import GREEDY, POLICIES, Listening, held_at, long_request, tight
from tests.node.test_late import LATE, SMALL
from tests.node.toy import Pair, make_pair


async def ended(listening: Listening) -> GenerateDone:
    await listening.task
    assert listening.done is not None
    return listening.done


@pytest.mark.parametrize("facts", ["none", "bigram", "mtp", "oracle"])
@pytest.mark.parametrize("wanted", [5, 6, 7])
def test_what_follows_counts_for_nothing_and_what_counts_is_cache(facts: str, wanted: int) -> None:
    """A page's edge lies between the counts. The engine is amid a step when it is said: nothing of that is told."""

    async def scenario(pair: Pair) -> None:
        asked = replace(request(59), sampling=Sampling(max_tokens=90))
        engine = pair.decode.parts.engine
        listening, gate = (
            Listening(pair, asked),
            gated(engine, "verify" if facts in ("mtp", "oracle") else "forward", at=8),
        )
        await gate.reached()
        await turns(10)
        told = list(listening.tokens)
        assert len(told) >= 8
        await pair.decode.finish(asked.request_id, wanted)
        gate.open()
        done = await ended(listening)
        assert (listening.tokens, tuple(told)) == (told, alone(pair, asked)[: len(told)])
        assert (done.finish_reason, done.output_tokens) == ("stop", wanted)
        said = told[:wanted]
        assert cached(pair) == written_pages(asked, said) == int(wanted > 5)
        await rested(pair)
        following = goes_on(asked, said)
        tokens, done = await answers(pair.decode.generate(following))
        assert tuple(tokens) == alone(pair, following)
        assert done.shipment.pages_hit == written_pages(asked, said)
        await recovered(pair)

    run(scenario, make_pair(both=FACTS[facts]))


def test_the_smallest_of_two_counts() -> None:
    async def scenario(pair: Pair) -> None:
        asked = replace(request(30), sampling=Sampling(max_tokens=40))
        listening, gate = Listening(pair, asked), held_at(pair, 8)
        await gate.reached()
        for wanted in (4, 3, 6):
            await pair.decode.finish(asked.request_id, wanted)
        gate.open()
        assert (await ended(listening)).output_tokens == 3
        await recovered(pair)

    run(scenario, make_pair())


def test_who_does_not_run_and_what_was_not_said_are_named() -> None:
    async def scenario(pair: Pair) -> None:
        node, asked = pair.decode, replace(request(30), sampling=Sampling(max_tokens=4))
        with pytest.raises(UnknownRequest, match="no request r0 runs here"):
            await node.finish(asked.request_id, 1)
        computing = gated(pair.prefill.parts.engine, "forward")
        listening = Listening(pair, asked)
        await computing.reached()
        with pytest.raises(BoundsError, match=r"output_tokens: 1; allowed: 1 to 0, as many as were said"):
            await node.finish(asked.request_id, 1)
        step, ending = held_at(pair, 2), gated(node.parts.verifier, "seal")
        computing.open()
        await step.reached()
        with pytest.raises(BoundsError, match=r"output_tokens: 3; allowed: 1 to 2"):
            await node.finish(asked.request_id, 3)
        with pytest.raises(BoundsError, match="output_tokens: 0"):
            await node.finish(asked.request_id, 0)
        with pytest.raises(UnknownRequest):
            await node.finish(RequestId("other"), 1)
        step.open()
        ending.open()
        assert (await ended(listening)).finish_reason == "length"
        await recovered(pair)

    run(scenario, make_pair())


def test_an_answer_that_has_its_end_is_no_shorter_for_it() -> None:
    """Its last page is being sealed: what is cache by then is the whole answer."""

    async def scenario(pair: Pair) -> None:
        asked = replace(request(60), sampling=Sampling(max_tokens=8))
        sealing = gated(pair.decode.parts.verifier, "seal")
        listening = Listening(pair, asked)
        await sealing.reached()
        with pytest.raises(UnknownRequest, match="request r0 has its answer"):
            await pair.decode.finish(asked.request_id, 2)
        sealing.open()
        done = await listening.end(pair)
        assert (done.finish_reason, done.output_tokens) == ("length", 8)
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_gave_way_ends_without_its_pages(policy: PreemptPolicy) -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second_step = gated(pair.decode.parts.engine, "forward", at=4)
        second = Listening(pair, long_request("second", 2, GREEDY, 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await second_step.reached()  # it has the pages; the first one waits for some
        assert pair.decode.status().preemptions == 1
        await pair.decode.finish(first.asked.request_id, 2)
        done = await ended(first)
        assert (done.finish_reason, done.output_tokens, done.preemptions) == ("stop", 2, 1)
        assert pair.decode.preemption.store.used_bytes == 0
        second_step.open()
        await second.end(pair)
        await recovered(pair)

    run(scenario, tight(policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_comes_back_just_then_leaves_no_half_of_its_pages(policy: PreemptPolicy) -> None:
    async def scenario(pair: Pair) -> None:
        gate = held_at(pair, 3)
        first = Listening(pair, long_request("first", 1, GREEDY))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, replace(GREEDY, max_tokens=2), 600))
        await until(lambda: pair.decode.status().queued)
        coming: Any = pair.decode.preemption
        back = gated(coming.store, "load") if policy is PreemptPolicy.OFFLOAD else gated(coming, "_step")
        gate.open()
        await back.reached()
        await pair.decode.finish(first.asked.request_id, 2)
        await turns(5)  # the wait is ending, and the step in the thread is waited for
        await pair.decode.finish(first.asked.request_id, 1)
        back.open()
        assert (await ended(first)).output_tokens == 1
        await second.end(pair)
        await recovered(pair)

    run(scenario, tight(policy))


def test_one_that_waits_for_the_pages_of_its_next_step_ends_with_those_it_has() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        asked = replace(request(100), sampling=Sampling(max_tokens=300))
        step = held_at(pair, 3)
        listening = Listening(pair, asked)
        await step.reached()
        manager = pair.decode.parts.manager
        other = manager.reserve(PageHashes(), manager.census()["free"], max_hit_pages=0)
        step.open()
        await until(lambda: len(pair.decode.queue.started))
        await turns(10)
        told = len(listening.tokens)
        await pair.decode.finish(asked.request_id, told)
        done = await ended(listening)
        assert (done.finish_reason, done.output_tokens) == ("stop", told)
        assert len(pair.decode.queue.started) == 0
        assert cached(pair) == written_pages(asked, listening.tokens) > 1
        manager.end(other)
        await recovered(pair)

    run(scenario, make_pair(pages=SMALL, prefill_pages=64, settings=LATE))


def test_a_deadline_amid_such_a_wait_is_still_a_deadline() -> None:
    """Control: what ends a wait for nobody wants more ends no other one."""

    async def scenario(pair: Pair) -> None:
        stream = pair.decode.generate(replace(request(100), sampling=Sampling(max_tokens=300)))
        async with aclosing(stream) as events:
            assert isinstance(await anext(events), Token)
            running = asyncio.create_task(anext(events))  # type: ignore[arg-type]
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        await recovered(pair)

    run(scenario, make_pair())
