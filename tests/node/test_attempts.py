"""Who is turned to when a prefill node refuses or fails a request, in which order, for how long, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import (
    AccountMismatch,
    BoundsError,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Difference,
    DigestMismatch,
    Draining,
    LaneRefused,
    LeaseExpired,
    NeverFits,
    PdkvError,
    PeerLost,
    ProtocolError,
    TransferError,
    WrongIncarnation,
)
from pdkv.ids import PageHashes
from pdkv.node.attempts import sources
from pdkv.node.decode import DecodeSettings
from pdkv.node.messages import (
    FailurePolicy,
    PagesSealed,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    Token,
)
from pdkv.node.stages import Stage
from tests.node.grouped import Scene
from tests.node.grouped import run as run_group
from tests.node.scene import Meddler, alone, answers, gated, request, until
from tests.node.trio import HASTY, LENGTH, Trio, Wire, changed_events, ended, fallible, play, saved

# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSALS: list[PdkvError] = [
    CapacityError("full"),
    NeverFits("larger than this pool"),
    Draining("leaving"),
    ContractMismatch([Difference("weights_id", "toy", "newer", "content")]),
    PeerLost("nobody there"),
    LaneRefused("TCP"),
    DeadlineExceeded("no answer"),
]


def refusing(wire: Wire, call: str, error: PdkvError) -> list[object]:
    """From now on `call` at that node raises; returns who asked."""
    asked: list[object] = []

    async def connect(intro: object) -> object:
        asked.append(intro)
        raise error

    async def prefill(asked_for: object) -> AsyncGenerator[PrefillEvent, None]:
        asked.append(asked_for)
        raise error
        yield

    setattr(wire, call, connect if call == "connect" else prefill)
    return asked


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("call", ["connect", "prefill"])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.kind)
def test_a_refusal_goes_to_the_next_node_whatever_the_policy(
    error: PdkvError, call: str, policy: FailurePolicy
) -> None:
    async def scenario(trio: Trio) -> None:
        asked = refusing(trio.wires[0], call, error)
        tokens, done = await answers(trio.decode.generate(fallible(policy)))
        assert tuple(tokens) == alone(trio.pair, fallible(policy))
        assert (len(asked), len(trio.wires[1].asked)) == (1, 1)
        assert (done.retries, done.recomputed_tokens) == (0, 0)
        await trio.rested()

    play(scenario)


@pytest.mark.parametrize(("refuse", "by"), [((), ""), ((0,), "p1"), ((0, 1), "the node itself")])
def test_the_first_token_says_who_brought_the_prompt_in_place_of_whom(refuse: tuple[int, ...], by: str) -> None:
    async def scenario(trio: Trio) -> None:
        for number in refuse:
            refusing(trio.wires[number], "connect", PeerLost("nobody there"))
        async with aclosing(trio.decode.generate(fallible(FailurePolicy.RECOMPUTE))) as events:
            first, second, *_ = [event async for event in events]
        assert isinstance(first, Token)
        assert isinstance(second, Token)
        assert (first.instead, second.instead) == (by.replace("the node itself", str(trio.decode.parts.name)), "")
        await trio.rested()

    play(scenario)


@pytest.mark.parametrize("policy", FailurePolicy)
def test_when_all_refuse_the_last_refusal_is_told_or_the_node_computes_itself(policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        refusing(trio.wires[0], "connect", PeerLost("nobody there"))
        refusing(trio.wires[1], "prefill", Draining("leaving"))
        asking = trio.decode.generate(fallible(policy))
        if policy is FailurePolicy.RECOMPUTE:
            tokens, done = await answers(asking)
            assert tuple(tokens) == alone(trio.pair, fallible(policy))
            assert done.recomputed_tokens == LENGTH
            assert done.chunk_starts == (0, 128, 256)
        else:
            with pytest.raises(Draining) as refused:
                await answers(asking)
            assert "accepted_by" not in refused.value.fields  # a router may hand it on
        await trio.rested()

    play(scenario)


def test_a_connection_without_bytes_is_not_the_requests_own_deadline() -> None:
    async def scenario(trio: Trio) -> None:
        for wire in trio.wires:
            refusing(wire, "connect", DeadlineExceeded("read from d0: no end within the deadline", peer="d0"))
        with pytest.raises(TransferError, match="no end within the deadline") as failed:
            await answers(trio.decode.generate(fallible(FailurePolicy.FAIL)))
        assert failed.value.fields == {"address": "p1", "peer": "d0"}, "a router passes over the pair, not the node"
        await trio.rested()

    play(scenario)


def test_a_node_in_another_life_is_met_anew_before_another_one_is_asked() -> None:
    async def scenario(trio: Trio) -> None:
        await answers(trio.decode.generate(request(100, prefill_address="p0", name="before")))
        refused = [WrongIncarnation("not me")]
        prefill = trio.wires[0].prefill

        async def once(asked: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
            if refused:
                raise refused.pop()
            async with aclosing(prefill(asked)) as events:
                async for event in events:
                    yield event

        trio.wires[0].prefill = once  # type: ignore[method-assign]
        await answers(trio.decode.generate(fallible(None)))
        assert not trio.wires[1].asked
        await trio.rested()

    play(scenario)


# --- who is asked, in which order, and what is kept -------------------------------------------------------------------


def test_the_nodes_of_a_request_come_first_and_each_once() -> None:
    def order(policy: FailurePolicy, *own: str, address: str = "", alternates: tuple[str, ...] = ()) -> list[str]:
        return sources(request(1, prefill_address=address, prefill_alternates=alternates), policy, own)

    assert order(FailurePolicy.RETRY, "c", "a", address="a", alternates=("b", "a")) == ["a", "b", "c"]
    assert order(FailurePolicy.FAIL, "c", address="a", alternates=("b",)) == ["a", "b"]
    assert order(FailurePolicy.FAIL, "c", "a") == ["c", "a"]
    assert order(FailurePolicy.RECOMPUTE, "c", address="a") == ["a", "c"]
    with pytest.raises(PeerLost, match="prefill_addresses"):
        order(FailurePolicy.RECOMPUTE)


def test_the_nodes_own_policy_is_for_requests_without_one() -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        _, done = await answers(trio.decode.generate(fallible(None)))
        assert done.recomputed_tokens == LENGTH - 2 * 64
        await trio.rested()

    play(scenario, settings=DecodeSettings(on_failure=FailurePolicy.RECOMPUTE))


def test_a_retry_asks_for_what_is_missing_and_the_account_is_that_of_all_attempts() -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        asked = fallible(FailurePolicy.RETRY)
        tokens, done = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        assert [wire.asked[0].first_page_wanted for wire in trio.wires] == [0, 2]
        ship = done.shipment
        assert (ship.pages_total, ship.pages_hit, ship.pages_shipped, ship.digests_verified) == (5, 0, 5, 5)
        await trio.rested()
        assert trio.decode.parts.manager.census()["cached"] == 4

    play(scenario, settings=DecodeSettings(cache_answers=False))


def test_a_tail_that_had_arrived_is_asked_for_again_with_the_first_token_of_the_same_node() -> None:
    """All pages have come and are proved, the tail's too, when the lease is lost."""

    async def scenario(trio: Trio) -> None:
        manager = trio.decode.parts.manager
        seal = manager.seal_private

        def sealing(*args: Any) -> None:
            manager.seal_private = seal  # type: ignore[method-assign]
            seal(*args)
            raise LeaseExpired("over")

        manager.seal_private = sealing  # type: ignore[method-assign]
        asked = fallible(FailurePolicy.RETRY)
        tokens, done = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        assert trio.wires[1].asked[0].first_page_wanted == 4
        assert (done.retries, done.shipment.pages_shipped) == (1, 5)
        await trio.rested()

    play(scenario)


LIES: dict[str, tuple[Callable[[Any], Any], type[PdkvError]]] = {
    "digests": (
        lambda e: replace(e, digests=e.digests + np.uint64(1)) if isinstance(e, PagesSealed) else e,
        DigestMismatch,
    ),
    "hashes": (
        lambda e: replace(e, hashes=PageHashes(bytes(len(e.hashes.raw)))) if isinstance(e, PagesSealed) else e,
        ProtocolError,
    ),
    "page ids": (
        lambda e: replace(e, page_ids=e.page_ids + 1000) if isinstance(e, PagesSealed) else e,
        BoundsError,
    ),
    "account": (
        lambda e: replace(e, account=replace(e.account, pages=1)) if isinstance(e, PrefillDone) else e,
        AccountMismatch,
    ),
}


@pytest.mark.parametrize("policy", FailurePolicy)
@pytest.mark.parametrize("lie", LIES)
def test_a_node_whose_words_or_bytes_are_wrong_has_failed(lie: str, policy: FailurePolicy) -> None:
    async def scenario(trio: Trio) -> None:
        change, error = LIES[lie]
        changed_events(trio.wires[0], change)
        outcome = await ended(asyncio.create_task(answers(trio.decode.generate(fallible(policy)))))
        if policy is FailurePolicy.FAIL:
            assert isinstance(outcome, error)
        else:
            await saved(trio, outcome, policy)
        await trio.rested()

    play(scenario)


def test_a_failure_is_told_and_not_that_nobody_else_took_it() -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        refusing(trio.wires[1], "prefill", Draining("leaving"))
        with pytest.raises(PeerLost) as lost:
            await answers(trio.decode.generate(fallible(FailurePolicy.RETRY)))
        assert lost.value.fields["accepted_by"] == "p0"
        await trio.rested()

    play(scenario)


def test_when_the_last_node_fails_too_its_failure_is_told() -> None:
    async def scenario(trio: Trio) -> None:
        def first_dies() -> None:
            trio.wires[0].die()
            trio.at[Stage.ACCEPTED] = trio.wires[1].die

        trio.on(Stage.COMMITTED, first_dies)
        with pytest.raises(PeerLost) as lost:
            await answers(trio.decode.generate(fallible(FailurePolicy.RETRY)))
        assert lost.value.fields["accepted_by"] == "p1"
        await trio.rested()

    play(scenario)


# --- pages and time ---------------------------------------------------------------------------------------------------


def test_pages_under_a_read_without_an_end_are_replaced_and_not_waited_for() -> None:
    async def scenario(trio: Trio) -> None:
        name = str(trio.wires[0].node.parts.name)
        trio.on(Stage.ACCEPTED, lambda: trio.net.stopped.add(name))  # its reads, and then itself
        trio.on(Stage.READING, trio.wires[0].stop)
        asked = fallible(FailurePolicy.RETRY)
        tokens, _ = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        held_back = trio.decode.parts.manager.census()["quarantined"]
        assert held_back >= 2
        await trio.rested()

    play(scenario, settings=HASTY)


def test_a_pool_without_pages_for_the_replacement_ends_the_request_by_name() -> None:
    """Five pages and a half of answer are all of the pool: with two held back there is no room, and none comes."""

    async def scenario(trio: Trio) -> None:
        name = str(trio.wires[0].node.parts.name)
        trio.on(Stage.ACCEPTED, lambda: trio.net.stopped.add(name))
        trio.on(Stage.READING, trio.wires[0].stop)
        with pytest.raises(CapacityError, match="held back"):
            await answers(trio.decode.generate(fallible(FailurePolicy.RETRY)))
        assert trio.decode.parts.manager.census()["quarantined"] > 0
        await trio.rested()

    play(scenario, pages=6, settings=HASTY)


def test_a_node_that_lives_and_gets_nothing_done_has_its_share_of_the_time() -> None:
    async def scenario(trio: Trio) -> None:
        gate = gated(trio.wires[0].node.parts.engine, "forward", at=2)
        asked = fallible(FailurePolicy.RETRY, remaining_s=24.0)
        more = tuple(f"never-asked-{i}" for i in range(10))  # twelve nodes in all: two seconds each
        asked = replace(asked, prefill_alternates=(*asked.prefill_alternates, *more))
        asking = asyncio.create_task(answers(trio.decode.generate(asked)))
        await until(lambda: trio.seen[Stage.RENEWED] > 6)  # silent it is not
        assert not trio.wires[1].asked
        trio.wires[0].left.clear()
        await until(trio.wires[0].left.is_set)
        gate.open()  # a stream in this process ends with prefill's step
        tokens, done = await asking
        assert tuple(tokens) == alone(trio.pair, asked)
        assert done.retries == 1
        await trio.rested()

    play(scenario, settings=HASTY)


def test_a_stopped_node_holds_no_more_than_its_share_of_the_pages() -> None:
    """Those who wait for it are on half of the pool; requests of the other node go on beside them."""

    async def scenario(trio: Trio) -> None:
        trio.wires[0].stop()
        asked = [request(LENGTH, seed=i, name=f"stopped-{i}", prefill_address="p0") for i in range(4)]
        trio.wires[0].go_on()
        await trio.decode.connect("p0")
        trio.wires[0].stop()
        stuck = [asyncio.create_task(answers(trio.decode.generate(each))) for each in asked]
        await until(lambda: trio.seen[Stage.ASKED] == 2)
        for i in range(3):
            other = request(LENGTH, seed=10 + i, name=f"other-{i}", prefill_address="p1")
            tokens, _ = await answers(trio.decode.generate(other))
            assert tuple(tokens) == alone(trio.pair, other)
        assert trio.seen[Stage.QUEUED] == 7
        assert not any(task.done() for task in stuck)
        assert len(trio.decode.queue) == 2
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)
        await trio.rested()

    play(scenario, pages=25, settings=DecodeSettings(peer_pages_share=0.5))


def test_a_node_that_can_not_be_reached_in_time_is_passed_over() -> None:
    async def scenario(trio: Trio) -> None:
        trio.wires[0].stop()
        tokens, done = await answers(trio.decode.generate(fallible(None)))
        assert tuple(tokens) == alone(trio.pair, fallible(None))
        assert (done.retries, len(trio.wires[1].asked)) == (0, 1)
        await trio.rested()

    play(scenario, settings=HASTY)


def test_in_a_group_every_rank_keeps_what_was_verified_and_reads_the_rest_from_the_next_node() -> None:
    async def scenario(scene: Scene) -> None:
        pair = scene.pair
        firsts = [PeerLost("connection reset")]

        def fails(event: PrefillEvent) -> list[PrefillEvent]:
            if isinstance(event, PagesSealed) and event.first_index == 2 and firsts:
                raise firsts.pop()
            return [event]

        pair.directory.peers["again"] = pair.prefill
        pair.directory.peers["p0"] = Meddler(pair, fails)
        asked = request(LENGTH, prefill_alternates=("again",), prefill_address="p0", on_failure=FailurePolicy.RETRY)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert done.retries == 1
        await scene.rested()

    run_group(scenario)
