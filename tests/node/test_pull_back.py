"""Pages that decode has and prefill lacks are read, proved and built on; whatever goes wrong, the rest is computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import CapacityError, InjectedFault
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, RequestId
from pdkv.kvcache.pool import SlotPool
from pdkv.node import borrower
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import (
    FailurePolicy,
    GenerateDone,
    GenerateRequest,
    Namespace,
    Sampling,
)
from pdkv.node.peers import PeerState
from pdkv.node.prefill import PrefillNode
from pdkv.node.pull_back import Pulled
from pdkv.node.routing import EstimateCall
from pdkv.node.stages import Stage
from pdkv.transfer.backends.loopback import Fault, FaultKind
from tests.node import grouped
from tests.node.scene import (
    alone,
    answers,
    gated,
    held,
    recovered,
    request,
    rested,
    run,
    turns,
    until,
)
from tests.node.test_answer_pages import FACTS, goes_on, written_pages
from tests.node.test_matrix import PLACEMENTS, equal_pages
from tests.node.test_speculation import heard, in_one_process
from tests.node.toy import PAGE, Pair, make_pair
from tests.node.trio import Trio, fallible, play

HANG = Fault(FaultKind.HANG)
NORMAL = Fault(FaultKind.LATE)


async def talked(pair: Pair, length: int = 100, answer: int = 150) -> GenerateRequest:
    """The second turn of a conversation: decode has 3 full pages of it, prefill only the first one."""
    asked = replace(request(length, name="talk"), sampling=Sampling(max_tokens=answer))
    said, _ = await answers(pair.decode.generate(asked))
    assert written_pages(asked, said) == (length + answer - 1) // PAGE
    return replace(goes_on(asked, said), sampling=Sampling(max_tokens=8))


async def right(pair: Pair, asked: GenerateRequest) -> GenerateDone:
    tokens, done = await answers(pair.decode.generate(asked))
    assert tuple(tokens) == alone(pair, asked)
    return done


def patient(pair: Pair, seconds: float | None) -> None:
    """Another prefill node over the same parts, with that limit."""
    settings = replace(pair.prefill.settings, pull_back_s=seconds)
    pair.prefill = pair.directory.peers["p0"] = PrefillNode(pair.prefill.parts, settings)


def failures(pair: Pair) -> dict[str, int]:
    return pair.prefill.status().borrow_failures


# --- what comes of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "prefill", "decode"),
    [(facts, *(PLACEMENTS[::-1] if number % 2 else PLACEMENTS)) for number, facts in enumerate(FACTS)],
)
def test_prefill_computes_nothing_that_decode_has(facts: str, prefill: str, decode: str) -> None:
    async def scenario(pair: Pair) -> None:
        asked, pulled = replace(request(100, name="r"), sampling=Sampling(max_tokens=90), want_logits=True), 0
        for turn in range(3):
            tokens, done = await heard(pair, asked)
            (one,) = in_one_process(pair, asked)
            assert tuple(t.token for t in tokens) == one.tokens == alone(pair, asked)
            assert tuple(t.logits_digest for t in tokens) == one.logits_digests
            assert tuple(t.draft_digests for t in tokens) == one.draft_digests
            assert done.chunk_starts[0] == done.shipment.pages_hit * PAGE, turn
            assert (done.shipment.pages_pulled_back > 0) == (turn > 0)
            pulled += done.shipment.pages_pulled_back
            await equal_pages(pair, asked)
            asked = goes_on(asked, [t.token for t in tokens])
        assert pair.prefill.status().borrowed_pages == pulled
        assert not failures(pair)
        await recovered(pair)

    run(scenario, make_pair(both={"placement": prefill, **FACTS[facts]}, placement=decode))


def test_a_prefill_node_that_has_nothing_gets_all_of_it_from_decode() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        pair.restart_prefill()
        done = await right(pair, asked)
        assert (done.shipment.pages_hit, done.shipment.pages_pulled_back) == (3, 3)
        assert done.chunk_starts == (192,)
        # what it has now is cache like any other
        pair.forget_decode()
        done = await right(pair, replace(asked, request_id=RequestId("again")))
        assert (done.shipment.pages_hit, done.chunk_starts) == (0, (256,))
        await recovered(pair)

    run(scenario, make_pair())


def test_what_is_offered_is_not_expected_to_be_computed() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        node, seen, pull = pair.prefill, list[int](), pair.prefill.pull_back.run

        async def pulling(*given: Any) -> Pulled:
            seen.append(node.estimate(EstimateCall(PageHashes())).waiting_tokens)
            return await pull(*given)

        node.pull_back.run = pulling  # type: ignore[method-assign]
        done = await right(pair, asked)
        assert (done.shipment.pages_pulled_back, seen) == (2, [len(asked.tokens) - 3 * PAGE])
        await recovered(pair)

    run(scenario, make_pair())


def test_only_pages_of_the_same_namespace_are_offered() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        done = await right(pair, replace(asked, namespace=Namespace("another")))
        assert (done.shipment.pages_pulled_back, done.chunk_starts[0]) == (0, 0)
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_either_node_can_be_told_not_to(side: str) -> None:
    async def scenario(pair: Pair) -> None:
        if side == "prefill":
            patient(pair, None)
        else:
            pair.decode = DecodeNode(pair.decode.parts, pair.directory, DecodeSettings(("p0",), pull_back=False))
        done = await right(pair, await talked(pair))
        assert (done.shipment.pages_pulled_back, done.chunk_starts) == (0, (64, 192))
        await recovered(pair)

    run(scenario, make_pair())


def test_a_node_that_proves_nothing_offers_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        done = await right(pair, await talked(pair))
        assert (done.shipment.pages_hit, done.shipment.pages_pulled_back) == (3, 0)
        assert not failures(pair)
        await rested(pair)

    run(scenario, make_pair(digest="none"))


def test_two_that_pull_the_same_pages_leave_them_once() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        gate = gated(pair.prefill.parts.verifier, "verify")
        both = [asyncio.create_task(right(pair, replace(asked, request_id=RequestId(f"r{i}")))) for i in range(2)]
        await gate.reached()
        await until(lambda: pair.prefill.status().requests == 2)
        await turns()
        gate.open()
        for done in await asyncio.gather(*both):
            assert done.shipment.pages_pulled_back == 2
        assert pair.prefill.parts.manager.census()["cached"] == 4
        await recovered(pair)

    run(scenario, make_pair())


def test_the_next_prefill_node_does_not_compute_again_what_a_failed_one_had_brought() -> None:
    async def scenario(trio: Trio) -> None:
        trio.on(Stage.COMMITTED, trio.wires[0].die)
        asked = fallible(FailurePolicy.RETRY)
        tokens, done = await answers(trio.decode.generate(asked))
        assert tuple(tokens) == alone(trio.pair, asked)
        assert (done.retries, done.shipment.pages_pulled_back, done.chunk_starts) == (1, 2, (128, 256))
        await trio.rested()

    play(scenario)


def test_the_leader_of_a_group_offers_what_every_rank_has() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        done = await right(scene.pair, await talked(scene.pair))
        assert (done.shipment.pages_hit, done.shipment.pages_pulled_back) == (3, 2)
        await scene.rested()

    grouped.run(scenario)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def flipped(pool: SlotPool, pages: LocalPages) -> None:
    pool.group_bytes(int(pages.array[0]), Group.INDEX)[0][5] ^= 1


def scripted(*faults: Fault) -> Callable[[Pair], None]:
    return lambda pair: pair.net.script(pair.decode.parts.name, *faults)


def arrives_damaged(pair: Pair, times: int = 2) -> None:
    verify, parts = pair.prefill.parts.verifier.verify, pair.prefill.parts

    def damaged(arrival: Any) -> Any:
        nonlocal times
        if times:
            times -= 1
            flipped(parts.pool, arrival.pages)
        return verify(arrival)

    parts.verifier.verify = damaged  # type: ignore[method-assign]


WRONG: dict[str, tuple[Callable[[Pair], None], str]] = {
    "read fails": (scripted(Fault(FaultKind.FAIL)), "PeerLost"),
    "read of rows fails": (scripted(NORMAL, Fault(FaultKind.FAIL)), "PeerLost"),
    "reads hang": (scripted(HANG), "DeadlineExceeded"),
    "rows hang": (scripted(NORMAL, HANG), "DeadlineExceeded"),
    "read gets lost": (scripted(Fault(FaultKind.LOSE)), "TransferUnsettled"),
    "other bytes arrive": (arrives_damaged, "DigestMismatch"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_can_not_be_pulled_back_is_computed_and_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong, kind = WRONG[how]

    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        patient(pair, 0.1 if "hang" in how else 5.0)
        await pair.prefill.connect(pair.decode.parts.intro())
        wrong(pair)
        with caplog.at_level(logging.WARNING, "pdkv.node.borrower"):
            done = await right(pair, asked)
        assert (done.shipment.pages_pulled_back, done.chunk_starts) == (0, (64, 192))
        assert failures(pair) == {kind: 1}
        assert f": 2 pages could not be borrowed from {pair.decode.parts.name}: {kind}" in caplog.text
        failed_peer = kind in ("PeerLost", "DeadlineExceeded", "TransferUnsettled")
        assert pair.prefill.peers.states[pair.decode.parts.name] is (
            PeerState.SUSPECT if failed_peer else PeerState.READY
        )
        # pages under a read without an end are held back, and others were computed into
        manager, unended = pair.prefill.parts.manager, "hang" in how or "lost" in how
        manager.check()
        assert manager.census()["quarantined"] == 2 * unended
        pair.net._scripts.clear()
        pair.net.settle(pair.decode.parts.name)
        await equal_pages(pair, asked)
        if "lost" in how:  # over only with the agent
            pair.prefill.parts.transfer.close()
            await rested(pair)
        else:
            await recovered(pair)

    run(scenario, make_pair())


def test_pages_that_had_come_before_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrower, "PIECE_PAGES", 1)

    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        patient(pair, 0.2)
        await pair.prefill.connect(pair.decode.parts.intro())
        pair.net.script(pair.decode.parts.name, NORMAL, NORMAL, HANG)  # a page, its row, the other page
        done = await right(pair, asked)
        assert (done.shipment.pages_pulled_back, done.chunk_starts) == (1, (128, 256))
        assert failures(pair) == {"DeadlineExceeded": 1}
        pair.net.settle(pair.decode.parts.name)
        await equal_pages(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())


def test_a_peer_that_failed_is_waited_for_again_only_when_it_is_proved() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        pair.prefill.peers.mark(pair.decode.parts.name, PeerState.SUSPECT, "it failed")
        done = await right(pair, asked)
        assert (done.shipment.pages_pulled_back, failures(pair)) == (0, {})
        await pair.prefill.peers.prove(pair.decode.parts.name)
        manager = pair.prefill.parts.manager
        manager.end(manager.reserve(PageHashes(), manager.census()["total"], max_hit_pages=0))
        done = await right(pair, replace(asked, request_id=RequestId("again")))
        assert done.shipment.pages_pulled_back == 4
        await recovered(pair)

    run(scenario, make_pair())


def test_where_no_page_is_left_in_place_of_those_held_back_the_request_ends_by_name() -> None:
    async def scenario(pair: Pair) -> None:
        asked = await talked(pair)
        patient(pair, 0.1)
        await pair.prefill.connect(pair.decode.parts.intro())
        pair.net.script(pair.decode.parts.name, HANG)
        with pytest.raises(CapacityError) as caught:
            await answers(pair.decode.generate(asked))
        assert caught.value.fields["accepted_by"] == "p0"
        assert pair.prefill.parts.manager.census()["quarantined"] == 2
        pair.net.settle(pair.decode.parts.name)
        await until(lambda: not held(pair.prefill))
        await right(pair, replace(asked, request_id=RequestId("again")))
        await rested(pair)

    run(scenario, make_pair(prefill_pages=6))


@pytest.mark.parametrize("stage", [Stage.PULLING, Stage.PULLED])
@pytest.mark.parametrize("planned", [True, False])
def test_what_a_hook_raises_there(stage: Stage, *, planned: bool) -> None:
    """A fault of a plan is one of those that cost a pull back; a bug ends the request, as everywhere."""

    async def scenario(pair: Pair) -> None:
        asked, broken = await talked(pair), [True]

        def at(reached: Stage, _: RequestId) -> None:
            if reached is stage and broken:
                broken.clear()
                raise InjectedFault("on purpose", place=stage) if planned else RuntimeError("a step broke")

        parts = replace(pair.prefill.parts, at=at)
        pair.prefill = pair.directory.peers["p0"] = PrefillNode(parts, pair.prefill.settings)
        if planned:
            done = await right(pair, asked)
            assert done.chunk_starts[0] == (64 if stage is Stage.PULLING else 192)
            assert failures(pair) == {"InjectedFault": 1}
        else:
            with pytest.raises(RuntimeError):
                await answers(pair.decode.generate(asked))
        assert not broken
        await recovered(pair)

    run(scenario, make_pair())
