"""A decode group answers as one process does, on proof of every rank, and all ranks stay alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pdkv.errors import CapacityError, ConfigError, DigestMismatch, IntegrityError
from pdkv.geometry.page_layout import Group as Cache
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager
from pdkv.node.group import GroupManager
from pdkv.node.messages import Sampling, Token
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, Op, RankPort
from tests.node.grouped import Scene, run
from tests.node.scene import alone, request, until
from tests.node.toy import CHUNK, ToyEngine


def test_a_group_answers_as_one_process_and_all_ranks_are_alike() -> None:
    async def scenario(scene: Scene) -> None:
        for length in (1, 64, 150, 300):
            asked = request(length, name=f"r{length}")
            assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)
            await scene.rested()
        steps = [parts.engine.steps for parts in scene.parts[1:]]  # type: ignore[attr-defined]
        assert steps[0] == steps[1]
        assert len(steps[0]) == 4 * 7

    run(scenario)


def test_requests_that_cross_hit_and_evict_each_other_leave_all_ranks_alike() -> None:
    async def scenario(scene: Scene) -> None:
        pair = scene.pair

        async def one(turn: int) -> None:
            asked = request(64 * (1 + turn % 5) + turn, seed=turn % 3, name=f"r{turn}")
            with suppress(CapacityError):
                assert tuple(await scene.ask(asked)) == alone(pair, asked)

        for wave in range(4):
            await asyncio.gather(*(one(4 * wave + i) for i in range(4)))
            await scene.rested()
        assert pair.decode.parts.manager.evicted_pages > 0
        assert pair.decode.parts.manager.evicted_pages == scene.ranks[1].parts.manager.evicted_pages

    run(scenario, pages=18)


@dataclass
class Held:
    """Holds back entries that commit, at one rank, until it is let go."""

    rank: Rank
    go: asyncio.Event
    reached: asyncio.Event

    def __getattr__(self, call: str) -> object:
        return getattr(self.rank, call)

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        if any(entry.op is Op.COMMIT for entry in entries):
            self.reached.set()
            await self.go.wait()
        await self.rank.apply(first, entries)


@pytest.mark.parametrize("waits", [True, False], ids=["barrier", "control: none"])
def test_no_token_before_every_rank_has_committed(waits: bool) -> None:
    held: list[Held] = []

    def between(rank: Rank) -> RankPort:
        if rank.parts.name.node != "d2":
            return rank
        held.append(Held(rank, asyncio.Event(), asyncio.Event()))
        return held[0]  # type: ignore[return-value]

    async def scenario(scene: Scene) -> None:
        decode = scene.pair.decode
        if not waits:
            decode.parts = replace(decode.parts, barrier=None)
        asked = replace(request(CHUNK), sampling=Sampling(max_tokens=1))
        heard: list[object] = []

        async def listen() -> None:
            async for event in decode.generate(asked):
                heard.append(event)

        listening = asyncio.create_task(listen())
        await held[0].reached.wait()
        await until(lambda: decode.parts.manager.census()["cached"] == 2)
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(50)))
        if not waits:
            await until(lambda: heard)
        assert bool(heard) == (not waits)
        held[0].go.set()
        await listening
        assert isinstance(heard[0], Token)
        assert heard[0].token == alone(scene.pair, asked)[0]
        await scene.rested()

    run(scenario, between=between)


@pytest.mark.parametrize("cache", list(Cache))
def test_bytes_that_are_wrong_on_one_rank_fail_the_request_on_all(cache: Cache) -> None:
    async def scenario(scene: Scene) -> None:
        rank = scene.ranks[1]
        verify, tried = rank.parts.verifier.verify, []

        def spoilt(arrival: object) -> object:
            tried.append(arrival)
            rank.parts.pool.group_bytes(int(arrival.pages.array[1]), cache)[0][5] ^= 1  # type: ignore[attr-defined]
            return verify(arrival)  # type: ignore[arg-type]

        rank.parts.verifier.verify = spoilt  # type: ignore[method-assign, assignment]
        with pytest.raises(DigestMismatch) as error:
            await scene.ask(request(CHUNK))
        assert [(bad.index, bad.cache) for bad in error.value.bad] == [(1, cache.value)]
        assert error.value.bad[0].rank == str(rank.parts.name)
        assert "of rank d2" in str(error.value)
        assert len(tried) == 2, "read once more before it is data loss"
        await scene.rested()
        rank.parts.verifier.verify = verify  # type: ignore[method-assign]
        asked = request(CHUNK, name="again")
        assert tuple(await scene.ask(asked)) == alone(scene.pair, asked)

    run(scenario)


def test_other_logits_on_one_rank_end_the_group() -> None:
    async def scenario(scene: Scene) -> None:
        engine = scene.ranks[1].parts.engine
        assert isinstance(engine, ToyEngine)
        engine.change = lambda logits: logits + np.float32(1)
        with pytest.raises(IntegrityError, match=r"rank d2.*other logits"):
            await scene.ask(request(70))
        await scene.rested()

    run(scenario)


def test_whatever_changes_the_managers_pages_is_logged() -> None:
    """A call that isn't would part the ranks: `GroupManager` logs it, or it is named here as none of decode's."""
    looks = {"census", "quarantine_reasons", "hashes", "generations", "digests", "check"}
    of_leases = {"hand_over", "lend", "drop_lease"}  # prefill's, and a group lends nothing
    of_compaction = {"carry_digests"}  # which refuses a group's manager
    of_late_ones = {"grow"}  # `reserve` refuses them, so nobody lacks any
    calls, logged = (
        {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        for kind in (CacheManager, GroupManager)
    )
    assert calls - looks - of_leases - of_compaction - of_late_ones == logged


def test_a_group_takes_no_request_that_gets_its_pages_later() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(ConfigError, match="reserve"):
            scene.pair.decode.parts.manager.reserve(PageHashes(), 3, max_hit_pages=0, ahead=1)
        await scene.rested()

    run(scenario)
