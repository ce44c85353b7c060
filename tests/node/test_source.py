"""What a node lends, to whom, and for how long: by itself, without anybody who reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import (
    CapacityError,
    ContractMismatch,
    Draining,
    LeaseExpired,
    LimitReached,
    StalePages,
    WrongIncarnation,
)
from pdkv.ids import LeaseId, PageHashes
from pdkv.kvcache.compaction import movable
from pdkv.node.messages import LeaseCall, LocateCall
from pdkv.node.prompt import plan_prompt
from pdkv.node.source import Source
from tests.node import grouped
from tests.node.lending import Trio, lend, locate, play, talked
from tests.node.scene import request, until


def evict_all(source: Source) -> None:
    manager = source.parts.manager
    free = manager.census()["free"] + manager.tree.evictable
    manager.end(manager.reserve(PageHashes(), free, max_hit_pages=0))


def test_it_says_how_much_it_has_and_lends_it_as_it_stands_in_the_tree() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        await trio.met()
        assert await source.locate(locate(trio, turn)) == 3
        assert await source.locate(locate(trio, request(64, seed=5))) == 0
        loan = await source.lend(lend(trio, turn, 1))
        manager, pages = source.parts.manager, loan.pages
        found = manager.tree.match(locate(trio, turn).hashes).pages
        assert (pages.first_index, pages.page_ids.tolist()) == (1, found[1:].tolist())
        assert pages.hashes == locate(trio, turn).hashes.part(1, 3)
        rows = source.parts.pool.table.rows[pages.page_ids]
        assert np.array_equal(rows["generation"], pages.generations)
        assert loan.lease.ttl_s == source.ttl_s
        status = trio.lender.status()
        assert (status.leases, [held.peer for held in status.held_leases.values()]) == (
            1,
            [str(trio.second.parts.name)],
        )
        assert not any(held.computing for held in status.held_leases.values())
        await source.release_lease(LeaseCall(lend(trio, turn).envelope, loan.lease.lease_id))
        await trio.rested()

    play(scenario)


def test_what_is_lent_stays_until_the_lease_ends_and_then_goes_like_other_cache() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        await trio.met()
        loan = await source.lend(lend(trio, turn, 2))  # it keeps all that lies before them as well
        assert not movable(source.parts.manager).any()
        evict_all(source)
        assert await source.locate(locate(trio, turn)) == 3
        with pytest.raises(CapacityError):
            source.parts.manager.reserve(PageHashes(), source.parts.pool.num_pages - 3, max_hit_pages=0)
        call = LeaseCall(lend(trio, turn).envelope, loan.lease.lease_id)
        await source.release_lease(call)
        await source.release_lease(call)  # no error
        evict_all(source)
        assert await source.locate(locate(trio, turn)) == 0
        with pytest.raises(StalePages, match="0 are"):
            await source.lend(lend(trio, turn))
        with pytest.raises(LeaseExpired):
            await source.renew_lease(call)
        await trio.rested()

    play(scenario)


def test_transfer_is_told_when_peers_may_read_and_when_no_more() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        await trio.met()
        told: list[bool] = []
        source.parts.transfer.expect_reads = lambda *, peers_may: told.append(peers_may)  # type: ignore[method-assign]
        loans = [await source.lend(lend(trio, turn)) for _ in range(2)]
        assert told == [True, True]
        for loan in loans:
            await source.release_lease(LeaseCall(lend(trio, turn).envelope, loan.lease.lease_id))
        assert told[2:] == [True, False]
        await trio.rested()

    play(scenario)


def test_a_lease_that_nobody_ends_ends_by_itself() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        source = trio.lender.source
        source.ttl_s = 0.1
        watch = asyncio.create_task(trio.lender.watch_leases())
        await source.lend(lend(trio, turn))
        assert len(source.leases) == 1
        await until(lambda: not source.leases)
        evict_all(source)
        watch.cancel()
        await asyncio.wait([watch])
        await trio.rested()

    play(scenario)


def test_nobody_else_can_end_it_and_nobody_has_more_than_its_share() -> None:
    async def scenario(trio: Trio) -> None:
        turn = await talked(trio)
        await trio.met()
        source = Source(trio.lender.parts, trio.lender.peers, ttl_s=30.0, per_peer=1)
        loan = await source.lend(lend(trio, turn))
        with pytest.raises(LimitReached):
            await source.lend(lend(trio, turn))
        stranger = replace(lend(trio, turn).envelope, sender=trio.pair.prefill.parts.name)
        await source.release_lease(LeaseCall(stranger, loan.lease.lease_id))
        assert len(source.leases) == 1
        assert source.release(loan.lease.lease_id, trio.second.parts.name)
        await source.release_lease(LeaseCall(lend(trio, turn).envelope, LeaseId("never was")))
        await trio.rested()

    play(scenario)


def test_only_a_peer_of_this_life_and_content_is_answered() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        for call, asked in ((source.locate, locate(trio, turn)), (source.lend, lend(trio, turn))):
            with pytest.raises(WrongIncarnation):
                await call(asked)  # type: ignore[operator]
        await trio.met()
        for call, asked in ((source.locate, locate(trio, turn)), (source.lend, lend(trio, turn))):
            other = replace(asked, envelope=replace(asked.envelope, content_fingerprint=bytes(32)))
            with pytest.raises(ContractMismatch):
                await call(other)  # type: ignore[operator]
        assert not source.leases
        await trio.rested()

    play(scenario)


def test_a_node_that_drains_lends_nothing_more_and_waits_for_what_it_has_lent() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        await trio.met()
        loan = await source.lend(lend(trio, turn))
        draining = asyncio.create_task(trio.lender.drain())
        await until(lambda: trio.lender.status().draining)
        assert await source.locate(locate(trio, turn)) == 0
        with pytest.raises(Draining):
            await source.lend(lend(trio, turn))
        assert not draining.done()
        await source.release_lease(LeaseCall(lend(trio, turn).envelope, loan.lease.lease_id))
        await draining

    play(scenario)


def test_what_is_not_proved_is_not_lent() -> None:
    async def scenario(trio: Trio) -> None:
        turn, source = await talked(trio), trio.lender.source
        await trio.met()
        assert await source.locate(locate(trio, turn)) == 0
        with pytest.raises(StalePages):
            await source.lend(lend(trio, turn))

    play(scenario, digest="none")


def test_a_group_lends_nothing_since_its_ranks_know_of_no_leases() -> None:
    async def scenario(scene: grouped.Scene) -> None:
        asked = request(200)
        await scene.ask(asked)
        source = scene.pair.decode.source
        await source.connect(scene.pair.prefill.parts.intro())
        hashes = plan_prompt(asked.tokens, asked.namespace, source.parts.contract).hashes
        call = LocateCall(scene.pair.prefill.parts.envelope(source.parts.name), hashes)
        assert source.parts.manager.tree.match(hashes).pages.size == 3
        assert await source.locate(call) == 0
        await scene.rested()

    grouped.run(scenario)
