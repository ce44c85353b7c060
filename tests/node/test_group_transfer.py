"""Reads of a group end as the worst of its ranks' reads, and what can't be proved is held back on all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from pdkv.errors import (
    PeerLost,
    TransferUnsettled,
)
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.node.grouped import Scene, run
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
