"""Pages of an answer are cache for the next turn: of the right bytes and draft rows, and only if it came to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pdkv.errors import BadLogits, DigestMismatch, PeerLost
from pdkv.ids import RequestId, UInt32Array
from pdkv.kvcache.page_hash import chain, event_ids
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import FailurePolicy, GenerateRequest, Sampling
from pdkv.node.preemption import PreemptPolicy
from tests.kvcache.test_events import Recorder
from tests.node import grouped
from tests.node.pooled import Pooling, pooled_alone, pooled_pair
from tests.node.scene import alone, answers, gated, recovered, request, rested, run, turns, until
from tests.node.test_decoding import SEEDED, Listening, long_request, tight
from tests.node.test_matrix import PLACEMENTS, RULES, equal_pages
from tests.node.test_speculation import MTP, ORACLE, SHARED, heard, in_one_process
from tests.node.toy import PAGE, Pair, ToyDrafter, make_pair

FACTS: dict[str, dict[str, Any]] = {**RULES, "oracle": ORACLE, "mtp": MTP, "shared index": SHARED}


def goes_on(asked: GenerateRequest, said: Sequence[int], more: int = 30) -> GenerateRequest:
    """The next turn: what was asked, what was answered, and `more` tokens."""
    random = np.random.default_rng(len(asked.tokens))
    tokens = np.concatenate((asked.tokens, np.array(said), random.integers(0, 256, more))).astype(np.uint32)
    return replace(asked, tokens=tokens, request_id=RequestId(f"{asked.request_id}+"))


def written_pages(asked: GenerateRequest, said: Sequence[int], page: int = PAGE) -> int:
    """The last token of an answer has no row."""
    return (len(asked.tokens) + len(said) - 1) // page


def cached(pair: Pair) -> int:
    return int(pair.decode.parts.manager.census()["cached"])


@pytest.mark.parametrize(
    ("facts", "prefill", "decode"),
    [(facts, *(PLACEMENTS[::-1] if number % 2 else PLACEMENTS)) for number, facts in enumerate(FACTS)],
)
def test_every_turn_hits_what_the_turns_before_it_left(facts: str, prefill: str, decode: str) -> None:
    async def scenario(pair: Pair) -> None:
        asked, due = replace(request(100, name="r"), sampling=Sampling(max_tokens=40), want_logits=True), 0
        for turn in range(3):
            tokens, done = await heard(pair, asked)
            (one,) = in_one_process(pair, asked)
            assert tuple(t.token for t in tokens) == one.tokens == alone(pair, asked)
            assert tuple(t.logits_digest for t in tokens) == one.logits_digests
            assert tuple(t.draft_digests for t in tokens) == one.draft_digests
            assert done.shipment.pages_hit == max(due - (facts == "drop_page"), 0), turn
            assert done.shipment.pages_shipped == done.shipment.pages_total - done.shipment.pages_hit
            # rows of this engine don't depend on a step's shape: what decode computed is what prefill computes
            await equal_pages(pair, asked)
            said = [t.token for t in tokens]
            due = written_pages(asked, said)
            assert cached(pair) == due
            pair.decode.parts.manager.check()
            asked = goes_on(asked, said)
        await recovered(pair)

    run(scenario, make_pair(both={"placement": prefill, **FACTS[facts]}, placement=decode))


@pytest.mark.parametrize("facts", ["none", "bigram", "mtp"])
def test_an_answer_may_end_anywhere(facts: str) -> None:
    """Around a page's edge, by length and by a stop token, also as the first token: then prefill wrote every row."""

    async def scenario(pair: Pair) -> None:
        for length, made in product((62, 63, 64, 65), (1, 2, 3)):
            asked = replace(request(length, seed=made, name=f"r{length}-{made}"), sampling=Sampling(max_tokens=made))
            said, _ = await answers(pair.decode.generate(asked))
            tokens, done = await heard(pair, replace(goes_on(asked, said), want_logits=True))
            assert done.shipment.pages_hit == written_pages(asked, said), (length, made)
            (one,) = in_one_process(pair, goes_on(asked, said))
            assert tuple(t.token for t in tokens) == one.tokens
            assert tuple(t.draft_digests for t in tokens) == one.draft_digests
            pair.forget_decode()
        asked = replace(request(60, seed=9), sampling=Sampling(max_tokens=20))
        stop = alone(pair, asked)[5]
        stopped = replace(asked, sampling=Sampling(max_tokens=20, stop_tokens=(stop,)))
        said, done = await answers(pair.decode.generate(stopped))
        assert done.finish_reason == "stop"
        assert cached(pair) == written_pages(asked, said) == 1
        await recovered(pair)

    run(scenario, make_pair(both=FACTS[facts], prefill_pages=400))


def test_control_draft_rows_of_the_last_step_are_missed_by_the_next_turn() -> None:
    """What speculation did before answers were cached: nothing drafts after the last token, so no row was written."""
    asked = replace(request(60), sampling=Sampling(max_tokens=5), want_logits=True)

    def differ(*, forgets: bool) -> bool:
        found: list[bool] = []

        async def scenario(pair: Pair) -> None:
            drafter = pair.decode.parts.drafter
            assert isinstance(drafter, ToyDrafter)
            extend = drafter.extend

            def without_the_last(hidden: np.ndarray, after: UInt32Array, start: int, *rest: Any) -> Any:
                if start + len(after) == 64 and forgets:
                    return None
                return extend(hidden, after, start, *rest)

            drafter.extend = without_the_last  # type: ignore[method-assign]
            said, _ = await answers(pair.decode.generate(asked))
            drafter.extend = extend  # type: ignore[method-assign]
            assert cached(pair) == 1
            tokens, done = await heard(pair, goes_on(asked, said))
            assert done.shipment.pages_hit == 1
            (one,) = in_one_process(pair, goes_on(asked, said))
            assert tuple(t.token for t in tokens) == one.tokens
            found.append(tuple(t.draft_digests for t in tokens) != one.draft_digests)

        run(scenario, make_pair(both=MTP))
        return found[0]

    assert not differ(forgets=False)
    assert differ(forgets=True)


@pytest.mark.parametrize("facts", ["none", "oracle", "mtp"])
@pytest.mark.parametrize("policy", [PreemptPolicy.OFFLOAD, PreemptPolicy.RECOMPUTE])
def test_a_request_that_gave_way_leaves_its_answer_too(policy: PreemptPolicy, facts: str) -> None:
    """In the pages that it has by then, of which none is one that it had before."""

    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.engine, "verify" if facts != "none" else "forward", at=25)
        first = Listening(pair, replace(long_request("first", 1, SEEDED, 250), want_logits=True))
        await gate.reached()
        second = Listening(pair, long_request("second", 2, Sampling(max_tokens=4), 600))
        await until(lambda: pair.decode.status().queued)
        gate.open()
        await second.end(pair)
        assert (await first.end(pair)).preemptions == 1
        pair.decode.parts.manager.check()
        asked = replace(goes_on(first.asked, first.tokens), sampling=replace(SEEDED, max_tokens=8))
        tokens, done = await heard(pair, asked)
        assert done.shipment.pages_hit == written_pages(first.asked, first.tokens) > 250 // PAGE
        (one,) = in_one_process(pair, asked)
        assert tuple(t.token for t in tokens) == one.tokens
        assert tuple(t.draft_digests for t in tokens) == one.draft_digests
        await equal_pages(pair, asked)
        await recovered(pair)

    run(scenario, tight(policy, both=FACTS[facts]))


@pytest.mark.parametrize("facts", ["none", "mtp"])
def test_a_prompt_that_this_node_computed_itself_leaves_its_answer_too(facts: str) -> None:
    async def scenario(pair: Pair) -> None:
        def nobody(*_: object) -> Any:
            raise PeerLost("nobody there")

        asked = replace(request(100, name="r"), sampling=Sampling(max_tokens=40), want_logits=True)
        connect, pair.prefill.connect = pair.prefill.connect, nobody  # type: ignore[method-assign]
        said, done = await answers(pair.decode.generate(asked))
        assert done.recomputed_tokens == 100
        pair.prefill.connect = connect  # type: ignore[method-assign]
        again = goes_on(asked, said)
        tokens, done = await heard(pair, again)
        assert (done.recomputed_tokens, done.shipment.pages_hit) == (0, written_pages(asked, said))
        (one,) = in_one_process(pair, again)
        assert tuple(t.token for t in tokens) == one.tokens
        assert tuple(t.draft_digests for t in tokens) == one.draft_digests
        await equal_pages(pair, again)
        await recovered(pair)

    settings = DecodeSettings(("p0",), on_failure=FailurePolicy.RECOMPUTE)
    run(scenario, make_pair(both=FACTS[facts], settings=settings))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kpool", [2, 4])
def test_with_a_pooled_index_the_page_has_all_of_its_windows(kpool: int, drafts: int) -> None:
    pooling = Pooling(kpool, rollback=4 if drafts else 0)
    facts: dict[str, Any] = {**ORACLE, "draft_tokens": drafts, "rollback_tokens": drafts} if drafts else {}

    async def scenario(pair: Pair) -> None:
        for length in (pooling.page - 21, pooling.page - 1, pooling.page):
            asked = replace(request(length, seed=length, name=f"r{length}"), sampling=Sampling(max_tokens=30))
            said, _ = await answers(pair.decode.generate(asked))
            asked_again = goes_on(asked, said)
            tokens, done = await answers(pair.decode.generate(asked_again))
            assert done.shipment.pages_hit == written_pages(asked, said, pooling.page) == 1
            assert tuple(tokens) == pooled_alone(pair, asked_again)
        await rested(pair)

    run(scenario, pooled_pair(pooling, **facts))


# --- a group ----------------------------------------------------------------------------------------------------------


def test_a_group_hits_an_answer_that_every_rank_has_proved() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        asked = replace(request(100), sampling=Sampling(max_tokens=70))
        for _ in range(3):
            tokens, done = await answers(scene.pair.decode.generate(asked))
            assert tuple(tokens) == alone(scene.pair, asked)
            await scene.rested()
            census = [parts.manager.census()["cached"] for parts in scene.parts]
            assert census == [written_pages(asked, tokens)] * 3
            asked = goes_on(asked, tokens)
        assert done.shipment.pages_hit == 4

    grouped.run(scenario)


def test_a_rank_that_wrote_other_bytes_is_named_and_nothing_of_the_answer_is_kept() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        pool, verify = scene.ranks[1].parts.pool, scene.ranks[1].verify
        heard: list[object] = []

        async def spoilt(arrival: Any, after: int) -> Any:
            if heard:
                pool.main_view(0)[int(arrival.pages.array[0])][3] ^= 1
            return await verify(arrival, after)

        scene.ranks[1].verify = spoilt  # type: ignore[method-assign]
        asked = replace(request(100), sampling=Sampling(max_tokens=70))

        async def listen() -> None:
            async for event in scene.pair.decode.generate(asked):
                heard.append(event)

        with pytest.raises(DigestMismatch, match="of rank d2"):
            await listen()
        assert len(heard) == 70
        scene.ranks[1].verify = verify  # type: ignore[method-assign]
        await scene.rested()
        assert [parts.manager.census()["cached"] for parts in scene.parts] == [1] * 3
        again = replace(asked, request_id=RequestId("again"))
        assert tuple(await scene.ask(again)) == alone(scene.pair, asked)
        await scene.rested()

    grouped.run(scenario)


# --- what doesn't come to its end -------------------------------------------------------------------------------------


def test_nothing_is_kept_of_an_answer_that_was_given_up() -> None:
    async def scenario(pair: Pair) -> None:
        asked = replace(request(100), sampling=Sampling(max_tokens=200))
        heard = 0
        async with aclosing(pair.decode.generate(asked)) as stream:
            async for _ in stream:
                heard += 1
                if heard == 120:
                    break
        await rested(pair)
        assert cached(pair) == 1
        await recovered(pair)

    run(scenario, make_pair())


def test_nothing_is_kept_of_an_answer_whose_engine_failed() -> None:
    async def scenario(pair: Pair) -> None:
        engine: Any = pair.decode.parts.engine
        engine.change = lambda logits: logits * np.float32("nan") if engine.steps[-1][1] > 180 else logits
        with pytest.raises(BadLogits):
            await answers(pair.decode.generate(replace(request(100), sampling=Sampling(max_tokens=200))))
        await rested(pair)
        assert cached(pair) == 1
        engine.change = lambda logits: logits
        await recovered(pair)

    run(scenario, make_pair())


def test_nothing_is_kept_of_an_answer_given_up_while_it_is_digested() -> None:
    """The thread that reads its pages is waited for before anybody else gets them."""

    async def scenario(pair: Pair) -> None:
        gate = gated(pair.decode.parts.verifier, "seal")
        asked = replace(request(100), sampling=Sampling(max_tokens=70))
        asking = asyncio.create_task(answers(pair.decode.generate(asked)))
        await gate.reached()
        asking.cancel()
        await turns()
        census = pair.decode.parts.manager.census()
        assert (census["cached"], census["reserved"] + census["private"]) == (1, 2)
        assert not asking.done()
        gate.open()
        await asyncio.wait([asking])
        await rested(pair)
        assert cached(pair) == 1
        await recovered(pair)

    run(scenario, make_pair())


# --- what becomes of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("went_on", [False, True])
def test_an_answer_goes_before_any_prompt_until_a_prompt_begins_with_it(*, went_on: bool) -> None:
    """Fifteen usable pages: two prompts of 3, the later one's answer 3 more; then 2 have to go."""

    async def pages_hit(pair: Pair, asked: GenerateRequest) -> int:
        tokens, done = await answers(pair.decode.generate(replace(asked, sampling=Sampling(max_tokens=1))))
        assert tuple(tokens) == alone(pair, asked)[:1]
        pair.decode.parts.manager.check()
        return done.shipment.pages_hit

    async def scenario(pair: Pair) -> None:
        old = request(3 * PAGE, seed=1, name="old")
        await pages_hit(pair, old)
        talk = replace(request(3 * PAGE, seed=2, name="talk"), sampling=Sampling(max_tokens=3 * PAGE + 1))
        said, _ = await answers(pair.decode.generate(talk))
        assert cached(pair) == 9
        if went_on:
            assert await pages_hit(pair, goes_on(talk, said, 0)) == 6
        await pages_hit(pair, request(7 * PAGE, seed=3, name="wants room"))
        assert pair.decode.parts.manager.evicted_pages == 2
        assert await pages_hit(pair, old) == (1 if went_on else 3)
        await rested(pair)

    run(scenario, make_pair(pages=16, prefill_pages=64))


def test_two_that_say_the_same_leave_it_once() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [replace(request(100, name=f"r{i}"), sampling=Sampling(max_tokens=70)) for i in range(3)]
        for said, _ in await asyncio.gather(*(answers(pair.decode.generate(each)) for each in asked)):
            assert tuple(said) == alone(pair, asked[0])
        assert cached(pair) == 2
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("facts", ["none", "mtp"])
def test_subscribers_hear_of_it_under_the_ids_of_a_prompt_of_these_tokens(facts: str) -> None:
    async def scenario(pair: Pair) -> None:
        recorder = pair.decode.parts.manager.observer = Recorder()
        asked = replace(request(100), sampling=Sampling(max_tokens=100))
        said, _ = await answers(pair.decode.generate(asked))
        tokens = np.concatenate((asked.tokens, np.array(said, np.uint32)))
        due = event_ids(chain(tokens, page_tokens=PAGE, bigram=facts == "mtp"))
        assert len(due) == 3
        assert recorder.pages.standing().tolist() == sorted(due)
        await rested(pair)

    run(scenario, make_pair(both=FACTS[facts]))


def test_a_node_told_so_keeps_no_answer() -> None:
    async def scenario(pair: Pair) -> None:
        pair.decode = DecodeNode(pair.decode.parts, pair.directory, DecodeSettings(("p0",), cache_answers=False))
        await answers(pair.decode.generate(replace(request(100), sampling=Sampling(max_tokens=100))))
        assert cached(pair) == 1
        await recovered(pair)

    run(scenario, make_pair())
