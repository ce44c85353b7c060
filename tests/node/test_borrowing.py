"""A decode node reads what any other node has of a prompt; whatever goes wrong there, prefill brings the rest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import CapacityError, ContractMismatch, Draining, InjectedFault, LimitReached, PeerLost, StalePages
from pdkv.ids import PageHashes, RequestId
from pdkv.node.borrowing import usable
from pdkv.node.messages import Namespace, Sampling
from pdkv.node.peers import PeerState
from pdkv.node.prompt import plan_prompt
from pdkv.node.stages import Stage
from pdkv.transfer.backends.loopback import Fault, FaultKind
from tests.node.lending import PATIENT, Trio, asked, play, talked
from tests.node.scene import answers, request, turns, until
from tests.node.test_answer_pages import FACTS
from tests.node.test_matrix import equal_pages
from tests.node.test_pull_back import HANG, flipped
from tests.node.toy import make_parts


@pytest.mark.parametrize("facts", FACTS)
def test_the_next_turn_on_another_decode_node_finds_the_pages_of_the_first(facts: str) -> None:
    async def scenario(trio: Trio) -> None:
        turn, drops = await talked(trio), facts == "drop_page"
        await trio.met()
        done = await asked(trio, turn)
        assert (done.shipment.pages_hit, done.shipment.pages_borrowed) == (0, 3 - drops)
        assert done.shipment.pages_shipped == done.shipment.pages_total
        # and prefill has them from there
        assert done.shipment.pages_pulled_back == 2
        assert done.chunk_starts[0] == (3 - drops) * 64
        await equal_pages(trio.borrower, turn)
        status = trio.second.status()
        assert (status.borrowed_pages, status.borrow_failures) == (3 - drops, {})
        assert trio.at.asked == ["connect", "locate", "lend", "release_lease"]
        await trio.rested()

    play(scenario, both=FACTS[facts])


def test_nothing_is_borrowed_that_prefill_has_as_well() -> None:
    async def scenario(trio: Trio) -> None:
        await trio.second.connect("p0")
        await trio.met()
        await answers(trio.lender.generate(request(300)))
        done = await asked(trio, request(300))
        assert (done.shipment.pages_borrowed, done.shipment.pages_shipped) == (0, 5)
        assert trio.at.asked == ["connect", "locate"]
        await trio.rested()

    play(scenario)


def test_nobody_is_asked_for_what_the_node_has_itself() -> None:
    async def scenario(trio: Trio) -> None:
        await trio.met()
        await asked(trio, request(300))
        trio.at.asked.clear()
        done = await asked(trio, replace(request(300), request_id=RequestId("again")))
        assert done.shipment.pages_hit == 4
        assert not trio.at.asked
        await trio.rested()

    play(scenario)


def test_a_source_that_is_not_known_yet_holds_nobody_up() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        done = await asked(trio, turn)
        assert done.shipment.pages_borrowed == 0
        await until(lambda: trio.second.borrowing._sources.met("d0"))  # type: ignore[union-attr]
        await trio.rested()

    play(scenario)


def test_a_source_that_does_not_answer_in_time_is_not_waited_for() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        never = asyncio.Event()

        async def silent(_: Any) -> int:
            await never.wait()
            return 0

        trio.at.locate = silent
        done = await asked(trio, turn)
        assert done.shipment.pages_borrowed == 0
        assert trio.second.status().borrow_failures == {"DeadlineExceeded": 1}
        assert trio.second.peers.states[trio.lender.parts.name] is PeerState.SUSPECT
        await turns()
        await trio.rested()

    play(scenario, settings=replace(PATIENT, locate_s=0.05))


@pytest.mark.parametrize("call", ["locate", "lend", "release_lease"])
@pytest.mark.parametrize("error", [PeerLost("gone"), Draining("it ends"), LimitReached("enough")])
def test_a_source_that_refuses_is_counted_and_done_without(call: str, error: Exception) -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()

        async def refuses(_: Any) -> Any:
            raise error

        setattr(trio.at, call, refuses)
        done = await asked(trio, turn)
        await asyncio.gather(*trio.second.farewells)
        assert done.shipment.pages_borrowed == (3 if call == "release_lease" else 0)
        assert trio.second.status().borrow_failures == {type(error).__name__: 1}
        lost = isinstance(error, PeerLost)
        state = trio.second.peers.states[trio.lender.parts.name]
        assert state is (PeerState.SUSPECT if lost else PeerState.READY)
        if call == "release_lease":
            assert len(trio.lender.source.leases) == 1
            for lease in trio.lender.source.leases.expire(math.inf):
                trio.lender.source.let_go(lease.lease_id)
        await trio.rested()

    play(scenario)


def scripted(*faults: Fault) -> Callable[[Trio], None]:
    return lambda trio: trio.pair.net.script(trio.lender.parts.name, *faults)


def arrives_damaged(trio: Trio) -> None:
    parts, times = trio.second.parts, [1, 2]
    verify = parts.verifier.verify

    def damaged(arrival: Any) -> Any:
        if times:
            times.pop()
            flipped(parts.pool, arrival.pages)
        return verify(arrival)

    parts.verifier.verify = damaged  # type: ignore[method-assign]


def other_pages(trio: Trio) -> None:
    lend = trio.at.source.lend

    async def others(call: Any) -> Any:
        loan = await lend(call)
        return replace(loan, pages=replace(loan.pages, hashes=PageHashes(bytes(96))))

    trio.at.lend = others


def short_lease(trio: Trio) -> None:
    lend = trio.at.source.lend

    async def short(call: Any) -> Any:
        loan = await lend(call)
        return replace(loan, lease=replace(loan.lease, ttl_s=0.1))

    trio.at.lend = short
    scripted(HANG)(trio)


WRONG: dict[str, tuple[Callable[[Trio], None], str]] = {
    "read fails": (scripted(Fault(FaultKind.FAIL)), "PeerLost"),
    "reads hang": (scripted(HANG), "DeadlineExceeded"),
    "the lease is short": (short_lease, "DeadlineExceeded"),
    "other bytes arrive": (arrives_damaged, "DigestMismatch"),
    "pages of another prompt": (other_pages, "ProtocolError"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_can_not_be_borrowed_comes_from_prefill(how: str) -> None:
    wrong, kind = WRONG[how]

    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        wrong(trio)
        done = await asked(trio, turn)
        assert (done.shipment.pages_borrowed, done.chunk_starts[0]) == (0, 64)
        assert done.shipment.pages_shipped == done.shipment.pages_total
        assert trio.second.status().borrow_failures == {kind: 1}
        unended = kind == "DeadlineExceeded"
        manager = trio.second.parts.manager
        manager.check()
        assert manager.census()["quarantined"] == 3 * unended
        trio.pair.net.settle(trio.lender.parts.name)
        await trio.rested()
        await equal_pages(trio.borrower, turn)

    play(scenario, settings=replace(PATIENT, borrow_s=5.0 if how == "the lease is short" else 0.3))


def test_a_client_that_goes_meanwhile_leaves_nothing_on_either_node() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        scripted(HANG)(trio)
        asking = asyncio.create_task(answers(trio.second.generate(turn)))
        await until(lambda: not trio.pair.net._scripts[str(trio.lender.parts.name)])
        assert len(trio.lender.source.leases) == 1
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.gather(*trio.second.farewells)
        assert len(trio.lender.source.leases) == 0
        assert trio.second.parts.manager.census()["quarantined"] == 3
        trio.pair.forget_decode()
        trio.pair.net.settle(trio.lender.parts.name)
        await trio.rested()

    play(scenario)


@pytest.mark.parametrize("planned", [True, False])
def test_what_a_hook_raises_when_pages_were_lent_ends_the_request_and_the_loan(*, planned: bool) -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()

        def at(stage: Stage, _: RequestId) -> None:
            if stage is Stage.LENT:
                raise InjectedFault("on purpose") if planned else RuntimeError("a step broke")

        object.__setattr__(trio.second.parts, "at", at)
        with pytest.raises(InjectedFault if planned else RuntimeError):
            await answers(trio.second.generate(turn))
        await asyncio.gather(*trio.second.farewells)
        await trio.rested()

    play(scenario)


def test_a_tenant_finds_nothing_of_another_one() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        done = await asked(trio, replace(turn, namespace=Namespace("", "salt")))
        assert done.shipment.pages_borrowed == 0
        assert "lend" not in trio.at.asked
        await trio.rested()

    play(scenario)


def test_a_node_with_other_weights_is_refused_by_name_and_asked_for_nothing() -> None:
    async def scenario(trio: Trio) -> None:
        from pdkv.contract import ContractFacts
        from pdkv.node.peers import PeerBook
        from pdkv.node.source import Source

        parts = make_parts("x0", ContractFacts("others"), trio.pair.net)
        trio.sources.peers["d0"] = Source(parts, PeerBook(parts), ttl_s=1.0, per_peer=None)
        with pytest.raises(ContractMismatch):
            await trio.met()
        done = await asked(trio, request(100))
        assert done.shipment.pages_borrowed == 0
        parts.close()
        await trio.rested()

    play(scenario)


def test_a_prefill_node_is_a_source_too() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.pair.prefill.source.connect(trio.second.parts.intro())
        trio.sources.peers["d0"] = trio.pair.prefill.source
        await trio.met()
        # the prefill node of its requests is another one, which has nothing
        other = trio.pair.prefill.parts.name
        trio.second.links.met = lambda address: None  # type: ignore[method-assign, assignment]
        done = await asked(trio, turn)
        assert done.shipment.pages_borrowed == 1
        assert trio.second.peers.states[other] is PeerState.READY
        await trio.rested()

    play(scenario)


def test_a_source_alone_does_not_make_a_node_ready_nor_its_end_unready() -> None:
    async def scenario(trio: Trio) -> None:
        second, lost = trio.second, PeerLost("no way there")
        await trio.met()
        second.peers.failed(trio.lender.parts.name, lost)
        assert second.parts.readiness.unready == ""
        await second.connect("p0")
        second.peers.failed(trio.pair.prefill.parts.name, lost)
        assert "p0" in second.parts.readiness.unready
        assert "no peer of 1 can be reached" in second.parts.readiness.unready
        await second.peers.prove(trio.lender.parts.name)
        assert second.parts.readiness.unready
        await second.peers.prove(trio.pair.prefill.parts.name)
        assert second.parts.readiness.unready == ""

    play(scenario)


def test_pages_lent_come_with_pages_for_the_rest_or_the_request_waits() -> None:
    """It borrows into its own reservation: what doesn't fit is refused before anything is asked for."""

    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        manager = trio.second.parts.manager
        other = manager.reserve(PageHashes(), 4, max_hit_pages=0)
        with pytest.raises(CapacityError):
            await answers(trio.second.generate(turn))
        assert trio.at.asked == ["connect", "locate"]
        manager.end(other)
        done = await asked(trio, replace(turn, request_id=RequestId("again")))
        assert done.shipment.pages_borrowed == 3
        await trio.rested()

    play(scenario, settings=replace(PATIENT, queue_limit=0), pages=8)


@pytest.mark.parametrize(("rule", "most"), [("none", 4), ("bigram", 3), ("drop_page", 2)])
def test_of_what_a_source_has_only_what_a_decode_node_may_hit_is_used(rule: str, most: int) -> None:
    async def scenario(trio: Trio) -> None:
        asked = replace(request(256), sampling=Sampling(max_tokens=1))
        prompt = plan_prompt(asked.tokens, asked.namespace, trio.second.parts.contract)
        assert [usable(prompt, pages) for pages in (0, 1, 4, 9)] == [0, 1 - (rule == "drop_page"), most, most]

    play(scenario, both=FACTS.get(rule, {}))


def test_a_lender_that_lost_the_pages_meanwhile_says_so() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        lend = trio.at.source.lend

        async def late(call: Any) -> Any:
            trio.pair.forget_decode()
            return await lend(call)

        trio.at.lend = late
        done = await asked(trio, turn)
        assert done.shipment.pages_borrowed == 0
        assert trio.second.status().borrow_failures == {StalePages.__name__: 1}
        await trio.rested()

    play(scenario)
