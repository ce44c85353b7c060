"""A decode group in one process: three ranks with pools and trees of their own, one of them the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pdkv.contract import ContractFacts
from pdkv.errors import (
    BoundsError,
    ConfigError,
    ContractMismatch,
    DigestMismatch,
    IntegrityError,
    PdkvError,
    PeerLost,
    ProtocolError,
    TransferUnsettled,
)
from pdkv.geometry.page_layout import Group as Cache
from pdkv.ids import PageHashes
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.group import Group, GroupSettings, lead
from pdkv.node.messages import GenerateRequest, Sampling, Token
from pdkv.node.oracle import Oracle
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, Joining, Op, RankPort
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.node.scene import LIMIT_S, alone, answers, request, until
from tests.node.toy import CHUNK, VOCAB, OneByOne, Pair, ToyEngine, make_parts

FACTS = ContractFacts(weights_id="toy")


@dataclass
class Scene:
    """Prefill node "p0", leader "d0", ranks "d1" and "d2"."""

    pair: Pair
    group: Group
    ranks: list[Rank]

    @property
    def parts(self) -> list[NodeParts]:
        """Of all ranks, the leader's first."""
        return [self.pair.decode.parts, *(rank.parts for rank in self.ranks)]

    async def ask(self, asked: GenerateRequest) -> list[int]:
        tokens, _ = await answers(self.pair.decode.generate(asked))
        return tokens

    async def rested(self) -> None:
        """Everything given back, on all ranks alike."""
        await until(lambda: self.parts[0].manager.census()["quarantined"] == 0)
        await self.group.barrier()
        self.same()
        for parts in self.parts:
            census = parts.manager.census()
            assert census["reserved"] + census["private"] + census["quarantined"] == 0, census
            assert not parts.manager.reservations
        assert not any(rank._reservations or rank._proofs or rank._reads for rank in self.ranks)

    def same(self) -> None:
        """Every page has the same state, hash and bytes on every rank."""
        first, *others = self.parts
        for parts in self.parts:
            parts.manager.check()
        for parts in others:
            assert parts.manager.census() == first.manager.census()
            rows, theirs = first.pool.table.rows, parts.pool.table.rows
            assert np.array_equal(rows["state"], theirs["state"])
            assert np.array_equal(rows["hash"], theirs["hash"])
            for page in np.flatnonzero(rows["state"]).tolist():
                for cache in Cache:
                    mine, other = (pool.group_bytes(page, cache) for pool in (first.pool, parts.pool))
                    assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))


Between = Callable[[Rank], RankPort]


def run(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    pages: int = 24,
    between: Between = lambda rank: rank,
    settings: GroupSettings | None = None,
) -> None:
    async def main() -> None:
        net = LoopbackNet()
        prefill = PrefillNode(make_parts("p0", FACTS, net), PrefillSettings(chunk_tokens=CHUNK))
        ranks = [Rank(make_parts(f"d{i}", FACTS, net, pages=pages)) for i in (1, 2)]
        ports = [between(rank) for rank in ranks]
        parts, group = await lead(make_parts("d0", FACTS, net, pages=pages), ports, settings)
        directory = OneByOne({"p0": prefill})
        decode = DecodeNode(parts, directory, DecodeSettings(prefill_addresses=("p0",), allow_fault_injection=True))
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(Scene(Pair(prefill, decode, net, directory), group, ranks))
                await asyncio.gather(*decode.farewells)
        finally:
            await group.close()
            for each in (prefill.parts, parts, *(rank.parts for rank in ranks)):
                each.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


class Port:
    """A rank whose calls a test can get in between of."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __getattr__(self, call: str) -> object:
        return getattr(self.rank, call)


def first_rank(kind: type[Port]) -> Between:
    def between(rank: Rank) -> RankPort:
        port: Any = kind(rank) if rank.parts.name.node == "d1" else rank
        return port  # type: ignore[no-any-return]

    return between


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
            asked = replace(request(64 * (1 + turn % 5) + turn, seed=turn % 3, name=f"r{turn}"))
            try:
                assert tuple(await scene.ask(asked)) == alone(pair, asked)
            except PdkvError as error:
                assert error.kind == "CapacityError"  # noqa: PT017

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


def test_other_logits_on_one_rank_end_the_group() -> None:
    async def scenario(scene: Scene) -> None:
        engine = scene.ranks[1].parts.engine
        assert isinstance(engine, ToyEngine)
        engine.change = lambda logits: logits + np.float32(1)
        with pytest.raises(IntegrityError, match=r"rank d2.*other logits"):
            await scene.ask(request(70))
        await scene.rested()

    run(scenario)


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
