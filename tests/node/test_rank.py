"""What a rank takes from whom."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import (
    BoundsError,
    ConfigError,
    ContractMismatch,
    IntegrityError,
    PeerLost,
    ProtocolError,
    TransferError,
)
from pdkv.ids import NodeId, PeerName, ReservationId, new_incarnation
from pdkv.node.group import lead
from pdkv.node.oracle import Oracle
from pdkv.node.ranks import Entry, Joining, NewPeer, Op
from tests.node.grouped import Scene, run
from tests.node.scene import request
from tests.node.toy import VOCAB


def test_who_may_join() -> None:
    async def scenario(scene: Scene) -> None:
        leader, rank = scene.parts[0], scene.ranks[0]
        mine = Joining(leader.name, leader.contract, leader.pool.num_pages)
        with pytest.raises(ContractMismatch, match="weights_id"):
            await rank.join(replace(mine, contract=replace(leader.contract, weights_id="other")))
        with pytest.raises(BoundsError, match="pages of a rank's pool"):
            await rank.join(replace(mine, num_pages=7))
        with pytest.raises(ProtocolError, match="follows d0"):
            await rank.join(replace(mine, leader=scene.parts[1].name))
        await scene.ask(request(10))
        with pytest.raises(ProtocolError, match="start it anew"):
            await rank.join(mine)
        with pytest.raises(ProtocolError, match="entry 0 of the log"):
            await rank.apply(0, [])
        drafting = replace(leader, drafter=Oracle(leader.engine, VOCAB, acceptance=0.5, seed=1))
        with pytest.raises(ConfigError, match="speculation"):
            await lead(drafting, [])

    run(scenario)


def test_an_entry_without_its_numbers_is_named_and_nothing_follows_it() -> None:
    async def scenario(scene: Scene) -> None:
        rank = scene.ranks[0]
        for op in (Op.RESERVE, Op.COMMIT, Op.END):
            rank.applied, rank.diverged = 0, None
            with pytest.raises(IntegrityError, match=f"numbers of a {op} entry"):
                await rank.apply(0, [Entry(op, ReservationId(1), np.empty(0, np.int32))])
            with pytest.raises(IntegrityError):
                await rank.apply(0, [])

    run(scenario)


def test_a_prefill_node_that_a_rank_cannot_reach_is_not_the_ranks_end() -> None:
    """The request fails by name; the group goes on with others."""

    async def scenario(scene: Scene) -> None:
        rank = scene.ranks[0]
        stranger = NewPeer(PeerName(NodeId("q0"), new_incarnation()), b"nobody", 0, scene.parts[0].pool.map())
        lost: Future[None] = Future()
        lost.set_exception(PeerLost("can't reach q0"))
        rank.parts.transfer.add_peer = lambda *_: lost  # type: ignore[method-assign]
        with pytest.raises(TransferError, match="can't reach q0"):
            await scene.group.all(lambda port: port.add_peer(stranger))
        assert scene.group.broken is None

    run(scenario)
