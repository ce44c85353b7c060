"""What a rank takes from whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.errors import (
    BoundsError,
    ConfigError,
    ContractMismatch,
    ProtocolError,
)
from pdkv.node.group import lead
from pdkv.node.oracle import Oracle
from pdkv.node.ranks import Joining
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
