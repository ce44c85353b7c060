"""Links to prefill nodes: dialled once, failed for all who waited, made anew for another life behind the address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from pdkv.errors import ContractMismatch, PeerLost, WrongIncarnation
from pdkv.node.messages import NodeIntro, PrefillEvent, PrefillRequest
from pdkv.node.peers import PeerState
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
        asking[0].cancel()  # whoever dials may go: the next one dials
        await until(lambda: len(dialled) == 2)
        dialled[1].set_exception(PeerLost("nobody there"))
        await asyncio.wait(asking)
        assert [str(task.exception()) for task in asking[1:]] == ["nobody there"] * 4
        assert len(dialled) == 2
        pair.directory.peers["p0"] = pair.prefill
        await recovered(pair)

    run(scenario, make_pair())
