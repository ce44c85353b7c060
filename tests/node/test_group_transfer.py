"""Reads of a group end as the worst of its ranks' reads, and what can't be proved is held back on all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from pdkv.errors import DeadlineExceeded, PeerLost, TransferUnsettled
from pdkv.ids import PeerName
from pdkv.node.peers import PeerState
from pdkv.node.rank import Rank
from pdkv.node.ranks import RankPort
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.node.grouped import Port, Scene, run
from tests.node.scene import alone, request, until


def ends(status: ReadStatus, settled: Future[None] | None = None) -> Callable[[ReadOrder], Future[ReadOutcome]]:
    def read(order: ReadOrder) -> Future[ReadOutcome]:
        future: Future[ReadOutcome] = Future()
        nothing = np.zeros(len(order), np.bool_)
        future.set_result(ReadOutcome(status, nothing, 0, 0, 0, 0.0, 0.0, "scripted", settled))
        return future

    return read


def test_a_read_that_fails_on_one_rank_fails_the_request_on_all() -> None:
    async def scenario(scene: Scene) -> None:
        transfer = scene.ranks[0].parts.transfer
        kept, transfer.read = transfer.read, ends(ReadStatus.FAILED)  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match=r"rank d1.*scripted"):
            await scene.ask(request(200))
        await scene.rested()
        transfer.read = kept  # type: ignore[method-assign]
        asked = request(200, name="again")
        assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)

    run(scenario)


def test_quarantine_is_the_groups() -> None:
    async def scenario(scene: Scene) -> None:
        settled: Future[None] = Future()
        transfer = scene.ranks[0].parts.transfer
        kept, transfer.read = transfer.read, ends(ReadStatus.UNSETTLED, settled)  # type: ignore[method-assign]
        with pytest.raises(TransferUnsettled, match="rank d1"):
            await scene.ask(request(200))
        await scene.group.barrier()
        held = [parts.manager.census()["quarantined"] for parts in scene.parts]
        assert held[0] > 0
        assert held == [held[0]] * 3
        scene.same()
        transfer.read = kept  # type: ignore[method-assign]
        other = request(100, seed=9, name="meanwhile")
        assert tuple(await scene.ask(other)) == alone(scene.pair, other)
        assert scene.parts[2].manager.census()["quarantined"] == held[0]
        settled.set_result(None)
        await scene.rested()

    run(scenario)


def test_an_abort_waits_for_the_reads_of_every_rank() -> None:
    async def scenario(scene: Scene) -> None:
        settled: Future[None] = Future()
        running: Future[ReadOutcome] = Future()
        transfer = scene.ranks[1].parts.transfer
        orders: list[ReadOrder] = []

        def cancel(read: Future[ReadOutcome]) -> None:
            outcome = ends(ReadStatus.UNSETTLED, settled)(orders[0]).result()
            read.set_result(outcome)

        def read(order: ReadOrder) -> Future[ReadOutcome]:
            orders.append(order)
            return running

        transfer.read, transfer.cancel = read, cancel  # type: ignore[method-assign]
        asking = asyncio.create_task(scene.ask(request(100)))
        await until(lambda: orders)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await scene.group.barrier()
        held = [parts.manager.census()["quarantined"] for parts in scene.parts]
        assert held == [1, 1, 1]
        settled.set_result(None)
        await scene.rested()

    run(scenario)


class Slow(Port):
    """Its reads take longer to settle than a call may take, and more than once."""

    tries = 0

    async def remove_peer(self, peer: PeerName) -> None:
        self.tries += 1
        if self.tries < 3:
            raise DeadlineExceeded("still under way")
        await self.rank.remove_peer(peer)


def test_a_rank_whose_reads_take_long_to_settle_holds_a_peer_back_and_is_not_lost() -> None:
    made: list[Slow] = []

    def between(rank: Rank) -> RankPort:
        made.append(Slow(rank))
        return made[-1]  # type: ignore[return-value]

    async def scenario(scene: Scene) -> None:
        await scene.ask(request(100))
        peers, name = scene.pair.decode.peers, scene.pair.prefill.parts.name
        peers.mark(name, PeerState.LOST)
        await peers.forget(name, "forgotten")
        await until(lambda: not peers.states)
        assert [rank.tries for rank in made] == [3, 3]
        assert scene.group.broken is None
        assert not any(rank.parts.transfer._core.peers for rank in scene.ranks)  # type: ignore[attr-defined]
        asked = request(200, name="again")
        assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)

    run(scenario, between=between)


def test_a_peer_that_one_rank_had_given_up_is_known_to_all_again_when_it_is_ready() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.ask(request(100))
        name, theirs = scene.pair.prefill.parts.name, scene.ranks[0].parts.transfer
        await asyncio.wrap_future(theirs.remove_peer(name))
        await scene.pair.decode.peers.prove(name)
        assert (await asyncio.wrap_future(theirs.probe(name))).seconds >= 0
        asked = request(200, name="again")
        assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)

    run(scenario)
