"""A rank that can't follow the log ends the group, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdkv.errors import (
    IntegrityError,
    PdkvError,
    PeerLost,
)
from pdkv.ids import PageHashes
from pdkv.node.group import GroupSettings
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, RankPort
from tests.node.grouped import Port, Scene, first_rank, run
from tests.node.scene import request, until


class Dead(Port):
    """Goes away at its first read."""

    gone = False

    async def read(self, read: object) -> object:
        self.gone = True
        raise PeerLost("nobody answers")

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        if self.gone:
            raise PeerLost("nobody answers")
        await self.rank.apply(first, entries)


def test_a_lost_rank_ends_the_group() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(PeerLost, match="rank d1"):
            await scene.ask(request(200))
        with pytest.raises(PeerLost, match="the group is broken: rank d1"):
            await scene.ask(request(200, name="again"))
        census = scene.parts[0].manager.census()
        assert census["reserved"] + census["private"] == 0
        with pytest.raises(PeerLost):
            await scene.group.barrier()

    run(scenario, between=first_rank(Dead))


class Mute(Port):
    async def verify(self, arrival: object, after: int) -> object:
        return await asyncio.get_running_loop().create_future()


def test_a_rank_that_never_answers_is_lost_too() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(PdkvError, match="rank d1"):
            await scene.ask(request(200))
        assert scene.group.broken is not None

    run(scenario, between=first_rank(Mute), settings=GroupSettings(answer_s=0.2))


def test_a_rank_whose_pages_went_another_way_is_found_out() -> None:
    async def scenario(scene: Scene) -> None:
        manager = scene.ranks[0].parts.manager
        manager.end(manager.reserve(PageHashes(), 3, max_hit_pages=0))
        with pytest.raises(PeerLost, match=r"rank d1.*entry 0"):
            await scene.ask(request(200))
        assert isinstance(scene.ranks[0].diverged, IntegrityError)

    run(scenario)


class Mortal(Port):
    """Goes away when it is told to, with nothing under way."""

    asked = 0
    gone = False

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        self.asked += not entries
        if self.gone:
            raise PeerLost("nobody answers")
        await self.rank.apply(first, entries)


def test_a_rank_that_dies_while_nothing_happens_is_noticed_and_the_node_is_not_ready() -> None:
    made: list[Mortal] = []

    def between(rank: Rank) -> RankPort:
        made.append(Mortal(rank))
        return made[-1]  # type: ignore[return-value]

    async def scenario(scene: Scene) -> None:
        readiness = scene.parts[0].readiness
        await scene.ask(request(100))
        asked = made[0].asked
        await until(lambda: made[0].asked >= asked + 3)
        assert readiness.unready == "", "one sign of life after the other"
        made[0].gone = True
        await until(lambda: readiness.unready)
        assert readiness.unready == "the group is broken: rank " + f"{made[0].rank.parts.name}: nobody answers"
        assert scene.pair.decode.status().unready == readiness.unready

    run(scenario, between=between, settings=GroupSettings(idle_s=0.01))
