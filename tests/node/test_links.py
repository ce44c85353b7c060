"""Links to prefill nodes: dialled once, failed for all who waited, made anew for another life behind the address."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import (
    AddressRefused,
    ContractMismatch,
    NotAPrefillNode,
    PdkvError,
    PeerLost,
    RemoteError,
    TransferError,
    WrongIncarnation,
)
from pdkv.node.links import REDIAL_S, Links
from pdkv.node.messages import NodeIntro, PrefillEvent, PrefillRequest
from pdkv.node.peers import PeerState
from pdkv.transfer.backends.loopback import Fault, FaultKind
from tests.node.scene import Meddler, alone, answers, recovered, request, rested, run, turns, until
from tests.node.toy import Pair, make_pair


def test_a_restarted_prefill_node_is_met_anew_within_the_request() -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(300)
        await answers(pair.decode.generate(asked))
        await rested(pair)
        pair.restart_prefill()
        other = replace(asked, tokens=asked.tokens[::-1].copy())
        tokens, done = await answers(pair.decode.generate(other))
        assert tuple(tokens) == alone(pair, other)
        assert done.shipment.pages_shipped == 5
        assert list(pair.decode.peers.states.values()) == [PeerState.READY]
        (seen,) = pair.decode.status().peers.values()
        assert seen.lane == "loopback"
        await recovered(pair)

    run(scenario, make_pair())


def test_a_prefill_node_that_came_back_as_another_is_refused_by_name() -> None:
    async def scenario(pair: Pair) -> None:
        await answers(pair.decode.generate(request(300)))
        pair.restart_prefill(weights_id="newer")
        with pytest.raises(ContractMismatch, match="weights_id: mine toy, theirs newer"):
            await answers(pair.decode.generate(request(300)))
        await rested(pair)

    run(scenario, make_pair())


def test_a_node_that_always_denies_its_name_is_asked_twice_and_no_more() -> None:
    async def scenario(pair: Pair) -> None:
        asked = []

        class Denier(Meddler):
            async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
                asked.append(request)
                raise WrongIncarnation("not me")
                yield

        pair.directory.peers["p0"] = Denier(pair, lambda event: [event])
        with pytest.raises(WrongIncarnation):
            await answers(pair.decode.generate(request(300)))
        assert len(asked) == 2
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair())


def test_a_peer_whose_connection_broke_is_not_shut_out_for_ever() -> None:
    async def scenario(pair: Pair) -> None:
        await answers(pair.decode.generate(request(100)))
        name = str(pair.prefill.parts.name)
        pair.net.kill(name)
        with pytest.raises(PeerLost):
            await answers(pair.decode.generate(request(200, seed=1)))
        assert pair.decode.status().peers[name].state == "SUSPECT"
        with pytest.raises(PeerLost):
            await answers(pair.decode.generate(request(200, seed=1)))
        pair.net._agents.add(name)
        await answers(pair.decode.generate(request(200, seed=1)))
        assert pair.decode.status().peers[name].state == "READY"
        await recovered(pair)

    run(scenario, make_pair())


def test_addresses_of_requests_leave_nothing_behind() -> None:
    async def scenario(pair: Pair) -> None:
        class Nowhere(Meddler):
            def __init__(self) -> None: ...

            async def connect(self, intro: object) -> Any:
                raise PeerLost("nobody there")

        for i in range(20):
            pair.directory.peers[f"no{i}"] = Nowhere()
            with pytest.raises(PeerLost, match="nobody there"):
                await answers(pair.decode.generate(request(100, prefill_address=f"no{i}")))
        links = pair.decode.links
        assert (len(links._dialling), len(links._links), len(pair.decode.peers.states)) == (0, 0, 0)
        await recovered(pair)

    run(scenario, make_pair())


def test_all_who_wait_for_a_connection_hear_at_once_that_it_failed() -> None:
    async def scenario(pair: Pair) -> None:
        dialled: list[asyncio.Future[None]] = []

        class Unreachable(Meddler):
            async def _connect(self, intro: NodeIntro) -> NodeIntro:
                dialled.append(asyncio.get_running_loop().create_future())
                await dialled[-1]
                return intro

        peer = pair.directory.peers["p0"] = Unreachable(pair, lambda event: [event])
        peer.connect = peer._connect  # type: ignore[method-assign]
        asking = [asyncio.create_task(answers(pair.decode.generate(request(100, name=f"r{i}")))) for i in range(5)]
        await turns()
        asking[0].cancel()  # whoever asked first may go: the others still wait for the same attempt
        await turns()
        dialled[0].set_exception(PeerLost("nobody there"))
        await asyncio.wait(asking)
        assert [str(task.exception()) for task in asking[1:]] == ["nobody there"] * 4
        assert len(dialled) == 1
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair())


def test_an_attempt_that_nobody_waits_for_any_more_comes_to_its_end() -> None:
    async def scenario(pair: Pair) -> None:
        held, peer = asyncio.Event(), Meddler(pair, lambda event: [event])
        connect = pair.prefill.connect

        async def slow(intro: NodeIntro) -> NodeIntro:
            await held.wait()
            return await connect(intro)

        peer.connect = slow  # type: ignore[method-assign]
        pair.directory.peers["p0"] = peer
        asking = asyncio.create_task(pair.decode.connect("p0"))
        await turns()
        asking.cancel()
        await asyncio.wait([asking])
        held.set()
        await until(lambda: list(pair.decode.peers.states.values()) == [PeerState.READY])
        await recovered(pair)

    run(scenario, make_pair())


# --- which addresses --------------------------------------------------------------------------------------------------


def links_of(pair: Pair, *allowed: str) -> Links:
    return Links(pair.decode.parts, pair.decode.peers, pair.directory, allowed=allowed)


def test_only_addresses_that_the_node_was_told_of_are_dialled() -> None:
    async def scenario(pair: Pair) -> None:
        dialled: list[str] = []
        peer = pair.directory.peer
        pair.directory.peer = lambda address: (dialled.append(address), peer(address))[1]  # type: ignore[method-assign]
        for address in ("10.1.0.7:7000", "p0.pool", "pool:7000"):
            pair.directory.peers[address] = pair.prefill
        links = links_of(pair, "10.1.*:7000", "p?.pool")
        for address in ("10.2.0.7:7000", "10.1.0.7:7001", "p10.pool", "pool:7000"):
            with pytest.raises(
                AddressRefused, match=f"{address} may not be dialled from here; allowed: 10.1"
            ) as refused:
                await links.of(address)
            assert refused.value.status == "PERMISSION_DENIED"
        with pytest.raises(AddressRefused, match="allowed: none"):
            await links_of(pair).of("p0.pool")
        assert dialled == []
        assert (await links.of("10.1.0.7:7000")).intro == (await links.of("p0.pool")).intro
        assert dialled == ["10.1.0.7:7000", "p0.pool"]

    run(scenario, make_pair())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RemoteError("Method not found!", code="UNIMPLEMENTED", address="p0"), NotAPrefillNode),
        (RemoteError("who knows", code="UNKNOWN", address="p0"), RemoteError),
    ],
)
def test_who_has_no_such_service_is_named_and_whatever_it_answers_is_dialled_again(
    error: RemoteError, kind: type[Exception]
) -> None:
    async def scenario(pair: Pair) -> None:
        peer = Meddler(pair, lambda event: [event])

        async def refuse(intro: NodeIntro) -> NodeIntro:
            raise error

        peer.connect = refuse  # type: ignore[method-assign]
        pair.directory.peers["p0"] = peer
        with pytest.raises(PdkvError) as raised:
            await pair.decode.connect("p0")
        assert type(raised.value) is kind
        assert raised.value.fields["address"] == "p0"
        assert "p0" in pair.decode.links.redial.due()
        assert pair.decode.parts.readiness.unready.startswith("no prefill node of 1 could be met: p0: ")
        pair.net.script(pair.prefill.parts.name, Fault(FaultKind.FAIL))
        pair.directory.peers["p0"] = pair.prefill
        with pytest.raises(TransferError) as unread:
            await pair.decode.connect("p0")
        assert unread.value.fields["address"] == "p0", "the read says which peer, and here is where it was dialled"

    run(scenario, make_pair())


def test_its_own_addresses_may_be_dialled_and_count_while_they_are_not_met() -> None:
    """A node whose only known peer is dead may still reach one that it was told of."""

    async def scenario(pair: Pair) -> None:
        parts, peers = pair.decode.parts, pair.decode.peers
        pair.directory.peers["p1"] = pair.prefill
        links = Links(parts, peers, pair.directory, ("p0", "p1"), ("x*",))
        name = (await links.of("p0")).intro.name
        with pytest.raises(AddressRefused, match=re.escape("allowed: p0, p1, x*")):
            await links.of("y:1")
        pair.net.kill(name)
        await asyncio.gather(links.probe(name), return_exceptions=True)
        assert parts.readiness.unready == ""
        await asyncio.gather(links.of("p1"), return_exceptions=True)
        assert parts.readiness.unready.startswith("no peer of 1 can be reached"), "nobody was there either"
        pair.net._agents.add(str(name))
        await links.of("p1")
        assert parts.readiness.unready == ""
        pair.net.kill(name)
        await asyncio.gather(links.probe(name), return_exceptions=True)
        assert parts.readiness.unready.startswith("no peer of 1 can be reached")

    run(scenario, make_pair())


class Nobody:
    async def connect(self, intro: NodeIntro) -> NodeIntro:
        raise PeerLost("nobody listens")


def test_a_node_that_meets_none_of_its_own_is_not_ready_and_goes_on_trying() -> None:
    """Nothing of whom it never met is in the book of peers, so nobody else would say so, or try again."""

    async def scenario(pair: Pair) -> None:
        parts = pair.decode.parts
        pair.directory.peers.update({"p0": Nobody(), "p1": Nobody(), "x:1": Nobody()})
        links = Links(parts, pair.decode.peers, pair.directory, ("p0", "p1"), ("x*",))
        await asyncio.gather(links.of("x:1"), links.of("p0"), return_exceptions=True)
        assert parts.readiness.unready == "", "another one may be there"
        await asyncio.gather(links.of("p1"), return_exceptions=True)
        assert parts.readiness.unready.startswith("no prefill node of 2 could be met: p0: ")
        assert set(links.redial.due()) == {"p0", "p1"}
        pair.directory.peers["p1"] = pair.prefill
        clock = pair.decode.peers.now
        pair.decode.peers.now = lambda: clock() + REDIAL_S
        async with asyncio.TaskGroup() as group:
            links.redial.step(group)
        assert parts.readiness.unready == ""
        assert set(links.redial.due()) == {"p0"}
        pair.directory.peers["p0"] = pair.prefill

    run(scenario, make_pair())


def test_those_that_failed_come_last() -> None:
    async def scenario(pair: Pair) -> None:
        pair.directory.peers["p1"] = pair.prefill
        links = links_of(pair, "*")
        link = await links.of("p0")
        assert links.best_first(("p0", "p2", "p1")) == ("p0", "p2", "p1")
        links.forget(link)
        assert links.best_first(("p0", "p2", "p1")) == ("p2", "p1", "p0")
        assert links.best_first(()) == ()

    run(scenario, make_pair())


# --- the keeper's probes ----------------------------------------------------------------------------------------------


def test_a_probe_finds_the_new_life_behind_an_address_before_any_request_does() -> None:
    async def scenario(pair: Pair) -> None:
        old = (await pair.decode.connect("p0")).name
        pair.restart_prefill()
        await pair.decode.links.probe(old)
        new = pair.prefill.parts.name
        await until(lambda: pair.decode.peers.states == {new: PeerState.READY})
        assert (await pair.decode.links.of("p0")).intro.name == new
        assert list(pair.prefill.peers.states.values()) == [PeerState.READY]

    run(scenario, make_pair())


def test_a_probe_wants_the_call_and_the_read() -> None:
    async def scenario(pair: Pair) -> None:
        name, links = (await pair.decode.connect("p0")).name, pair.decode.links
        calls, reads = Meddler(pair, lambda event: [event]), pair.net

        async def deaf(intro: NodeIntro) -> NodeIntro:
            raise PeerLost("no answer")

        async def state_after_a_probe() -> str:
            await asyncio.gather(links.probe(name), return_exceptions=True)
            return pair.decode.status().peers[str(name)].state

        assert await state_after_a_probe() == "READY"
        calls.connect = deaf  # type: ignore[method-assign]
        pair.directory.peers["p0"] = calls
        assert await state_after_a_probe() == "SUSPECT"
        pair.directory.peers["p0"] = pair.prefill
        assert await state_after_a_probe() == "READY"
        reads.kill(name)
        assert await state_after_a_probe() == "SUSPECT"
        assert await state_after_a_probe() == "SUSPECT"
        reads._agents.add(str(name))
        assert await state_after_a_probe() == "READY"

    run(scenario, make_pair())


def test_what_failed_over_an_old_link_says_nothing_of_the_new_one() -> None:
    async def scenario(pair: Pair) -> None:
        links = pair.decode.links
        old = await links.of("p0")
        links.forget(old, PeerLost("the stream broke"))
        (seen,) = pair.decode.status().peers.values()
        assert (seen.state, seen.error) == ("SUSPECT", "PeerLost: the stream broke")
        new = await links.of("p0")
        links.forget(old, PeerLost("a late one"))
        assert await links.of("p0") is new
        links.forget(new)
        assert await links.of("p0") is not new

    run(scenario, make_pair())


def test_the_link_of_a_forgotten_peer_goes_with_its_connection() -> None:
    async def scenario(pair: Pair) -> None:
        peers, links = pair.decode.peers, pair.decode.links
        name = (await pair.decode.connect("p0")).name
        pair.net.kill(name)
        await asyncio.gather(links.probe(name), return_exceptions=True)
        assert list(links._links) == ["p0"], "it may come back"
        del pair.directory.dropped[:]
        await peers.forget(name, "forgotten")
        await until(lambda: not peers.states)
        assert (links._links, pair.directory.dropped) == ({}, ["p0"])
        pair.net._agents.add(str(name))
        await recovered(pair)

    run(scenario, make_pair())


def test_a_nodes_own_addresses_may_change() -> None:
    """Those that are new may be dialled, those that went may not; how it stood with them is forgotten."""

    async def scenario(pair: Pair) -> None:
        parts = pair.decode.parts
        pair.directory.peers.update({"p1": Nobody(), "p2": Nobody(), "[::1]:7000": pair.prefill})
        links = Links(parts, pair.decode.peers, pair.directory, ("p1",))
        assert set(links.redial.due()) == {"p1"}, "before anybody asks: it says from its start whether it meets one"
        async with asyncio.TaskGroup() as group:
            links.redial.step(group)
        assert parts.readiness.unready.startswith("no prefill node of 1 could be met: p1: ")
        links.replace_own(("p2", "[::1]:7000"))
        assert parts.readiness.unready == "", "nobody has tried yet"
        assert set(links.redial.due()) == {"p2", "[::1]:7000"}
        with pytest.raises(AddressRefused, match=re.escape("p1 may not be dialled from here; allowed: p2, [::1]:7000")):
            await links.of("p1")
        await asyncio.gather(links.of("p2"), return_exceptions=True)
        assert (await links.of("[::1]:7000")).intro.name == pair.prefill.parts.name
        assert set(links.redial.due()) == {"p2"}
        links.replace_own(())
        assert links.met("[::1]:7000") is not None, "who is connected stays so"
        assert (links.redial.due(), parts.readiness.unready) == ({}, "")

    run(scenario, make_pair())
