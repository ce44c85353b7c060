"""A decode node whose requests get their pages later: same answers, more at once, and nobody is blamed for the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ConfigError, PeerLost
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import Reservation
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import FailurePolicy, Sampling
from pdkv.node.preemption import PreemptPolicy
from pdkv.node.stages import Stage
from tests.node import lending
from tests.node.grouped import Scene
from tests.node.grouped import run as run_group
from tests.node.scene import alone, answers, gated, recovered, request, run, until
from tests.node.toy import Pair, make_pair
from tests.node.trio import HASTY, Trio, ended, fallible, play, saved

LATE = DecodeSettings(("p0",), reserve_window_pages=2, peer_pages_share=1.0)
SMALL = 12
"""Pages of the decode node's pool, the write sink among them."""


def taken(node: DecodeNode, *, left: int) -> Reservation:
    """All pages of its pool but `left` belong to somebody who needs no more."""
    manager = node.parts.manager
    return manager.reserve(PageHashes(), manager.census()["free"] - left, max_hit_pages=0)


def late_trio(scenario: Callable[[Trio], Awaitable[None]], settings: DecodeSettings = HASTY, pages: int = 64) -> None:
    play(scenario, settings=replace(settings, reserve_window_pages=2, peer_pages_share=1.0), pages=pages)


@pytest.mark.parametrize("window", [None, 1, 2, 100])
def test_answers_are_the_same_and_more_requests_run_at_once(window: int | None) -> None:
    async def scenario(pair: Pair) -> None:
        manager, most = pair.decode.parts.manager, 0
        reserve = manager.reserve

        def reserving(*args: object, **limits: object) -> Reservation:
            nonlocal most
            made = reserve(*args, **limits)  # type: ignore[arg-type]
            most = max(most, len(manager.reservations))
            return made

        manager.reserve = reserving  # type: ignore[method-assign]
        asked = [request(64 * (3 + i % 3) + 7 * i, seed=i, name=f"r{i}") for i in range(10)]
        said = await asyncio.gather(*(answers(pair.decode.generate(each)) for each in asked))
        assert [tuple(tokens) for tokens, _ in said] == [alone(pair, each) for each in asked]
        assert most > 2 if window in (1, 2) else most == 2
        await recovered(pair)

    settings = replace(LATE, reserve_window_pages=window)
    run(scenario, make_pair(pages=SMALL, prefill_pages=64, settings=settings))


@pytest.mark.parametrize(
    "drafting",
    [
        {},
        {"speculation": "oracle", "draft_tokens": 3},
        {"speculation": "mtp", "eagle_rule": "bigram", "draft_tokens": 3, "draft_topk": 1},
    ],
    ids=lambda facts: facts.get("speculation", "none"),
)
def test_an_answer_takes_its_pages_as_it_grows(drafting: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        asked = replace(request(100), sampling=Sampling(max_tokens=300))
        seen: list[int] = []

        def step(tokens: int) -> None:
            (made,) = pair.decode.parts.manager.reservations.values()
            seen.append(len(made.sequence))

        stream = pair.decode.generate(asked)
        tokens = []
        async for event in stream:
            if hasattr(event, "token"):
                tokens.append(event.token)
                step(len(tokens))
        assert tuple(tokens) == alone(pair, asked)
        assert seen[0] == 2
        assert sorted(set(seen)) == [2, 5, 7]
        await recovered(pair)

    run(scenario, make_pair(settings=LATE, both=drafting))


def test_announced_pages_wait_for_room_and_then_come() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        other = taken(pair.decode, left=3)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await until(lambda: len(pair.decode.queue.started))
        (made,) = (r for r in pair.decode.parts.manager.reservations.values() if r is not other)
        await until(lambda: made.committed)
        assert (made.committed, made.rest) == (2, 3)
        assert not asking.done()
        claims = pair.decode.status().claims
        assert claims == {"claimed": 8 + 5, "held": 8 + 2, "growing": 1}
        pair.decode.parts.manager.end(other)
        assert tuple((await asking)[0]) == alone(pair, request(300))
        await recovered(pair)

    run(scenario, make_pair(pages=SMALL, prefill_pages=64, settings=LATE))


def test_an_abort_while_it_waits_for_room_frees_what_it_had() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        other = taken(pair.decode, left=3)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await until(lambda: len(pair.decode.queue.started))
        asking.cancel()
        await asyncio.wait([asking])
        assert len(pair.decode.queue.started) == 0
        pair.decode.parts.manager.end(other)
        await recovered(pair)

    run(scenario, make_pair(pages=SMALL, prefill_pages=64, settings=LATE))


def test_two_that_bring_the_same_prompt_keep_it_once() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [replace(request(300), request_id=f"r{i}") for i in range(3)]  # type: ignore[arg-type]
        said = await asyncio.gather(*(answers(pair.decode.generate(each)) for each in asked))
        assert {tuple(tokens) for tokens, _ in said} == {alone(pair, asked[0])}
        await recovered(pair)

    run(scenario, make_pair(pages=SMALL, prefill_pages=64, settings=LATE))


# --- who is waited for ------------------------------------------------------------------------------------------------


def test_a_prefill_node_is_not_given_up_while_its_pages_wait_for_room() -> None:
    async def scenario(trio: Trio) -> None:
        other = taken(trio.decode, left=3)
        gate = gated(trio.wires[0].node.parts.engine, "forward", at=3)  # more is to be announced all the while
        asked = fallible(FailurePolicy.RETRY, remaining_s=12.0)
        more = tuple(f"never-asked-{i}" for i in range(10))  # twelve nodes in all: one second each
        asked = replace(asked, prefill_alternates=(*asked.prefill_alternates, *more))
        asking = asyncio.create_task(answers(trio.decode.generate(asked)))
        await until(lambda: trio.seen[Stage.RENEWED] > 12)  # two seconds
        trio.decode.parts.manager.end(other)
        gate.open()
        tokens, done = await asking
        assert tuple(tokens) == alone(trio.pair, asked)
        assert (done.retries, done.recomputed_tokens, len(trio.wires[0].asked)) == (0, 0, 1)
        await trio.rested()

    late_trio(scenario, pages=SMALL)


def test_one_that_stops_is_given_up_also_while_its_pages_wait_for_room() -> None:
    async def scenario(trio: Trio) -> None:
        other = taken(trio.decode, left=3)
        asking = asyncio.create_task(answers(trio.decode.generate(fallible(FailurePolicy.FAIL, remaining_s=30.0))))
        await until(lambda: len(trio.decode.queue.started))
        trio.wires[0].stop()
        outcome = await ended(asking)
        assert isinstance(outcome, PeerLost)
        assert "not heard of" in str(outcome)
        trio.decode.parts.manager.end(other)
        await trio.rested()

    late_trio(scenario, pages=SMALL)


# --- what a failure leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FailurePolicy.RETRY, FailurePolicy.RECOMPUTE])
@pytest.mark.parametrize("stage", [Stage.ACCEPTED, Stage.READING, Stage.COMMITTED, Stage.PREFILLED])
def test_what_was_committed_is_kept_from_one_attempt_to_the_next(policy: FailurePolicy, stage: Stage) -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(stage, trio.wires[0].die)
        await saved(trio, await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy))))), policy)
        await trio.rested()

    late_trio(scenario, pages=SMALL)


def test_a_node_that_computes_itself_waits_for_all_pages_first() -> None:
    async def scenario(trio: Trio) -> None:
        other = taken(trio.decode, left=3)
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        asking = asyncio.create_task(answers(trio.decode.generate(fallible(FailurePolicy.RECOMPUTE))))
        await until(lambda: len(trio.decode.queue.started) and not len(trio.decode.queue.shares))
        assert trio.seen[Stage.RECOMPUTING] == 0
        trio.decode.parts.manager.end(other)
        await saved(trio, await ended(asking), FailurePolicy.RECOMPUTE)
        await trio.rested()

    late_trio(scenario, pages=SMALL)


# --- what it doesn't go with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [PreemptPolicy.OFFLOAD, PreemptPolicy.RECOMPUTE])
def test_nobody_gives_way_where_pages_come_later(policy: PreemptPolicy) -> None:
    with pytest.raises(ConfigError, match="preempt"):
        make_pair(settings=replace(LATE, preempt=policy))


def test_a_group_has_all_pages_from_the_start() -> None:
    async def scenario(scene: Scene) -> None:
        decode = scene.pair.decode
        with pytest.raises(ConfigError, match="reserve"):
            DecodeNode(decode.parts, scene.pair.directory, LATE)
        await scene.rested()

    run_group(scenario)


# --- pages of other nodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "borrowed"), [(7, 3), (2, 1)])
def test_of_what_another_node_has_it_borrows_what_it_has_room_for_at_once(left: int, borrowed: int) -> None:
    async def scenario(trio: lending.Trio) -> None:
        turn = await lending.talked(trio)
        await trio.met()
        other = taken(trio.second, left=left)
        asking = asyncio.create_task(lending.asked(trio, turn))
        if left < 7:
            await until(lambda: len(trio.second.queue.started))  # for what prefill brings, when the loan is over
            assert trio.at.asked[-1] == "release_lease"
            trio.second.parts.manager.end(other)
        done = await asking
        assert done.shipment.pages_borrowed == borrowed
        assert trio.second.status().borrow_failures == {}
        trio.second.parts.manager.end(other)
        await trio.rested()

    settings = replace(lending.PATIENT, reserve_window_pages=1, peer_pages_share=1.0)
    lending.play(scenario, settings=settings, pages=SMALL)
