"""What one prefill node's requests may take of the pages, and one reservation for another."""

from __future__ import annotations

import asyncio

import pytest

from pdkv.errors import CapacityError
from pdkv.kvcache.verifier import Verifier
from pdkv.node.queue import PASS_LIMIT
from tests.kvcache.chains import long_chain
from tests.node.queued import Bench, ask, play
from tests.node.scene import turns

# --- the share of one peer --------------------------------------------------------------------------------------------


def test_who_would_exceed_its_peers_share_stands_aside_and_holds_up_nobody_else() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("p-0", 4, peer="p")
        await bench.come("p-1", 2, peer="p")  # 6 would be more than 5
        assert bench.order == ["p-0"]
        for number in range(2 * PASS_LIMIT):  # as long or longer, and more often than anybody may pass a head
            await bench.come(f"q-{number}", 3, peer="q")
            await bench.go(f"q-{number}")
        await bench.come("nobody's", 6)
        assert "p-1" not in bench.order
        await bench.go("nobody's")
        bench.queue.settle(bench.has["p-0"])  # its prompt has come: it decodes, and counts no more
        await turns(3)
        assert bench.order[-1] == "p-1"

    play(scenario, peer_pages=5)


def test_the_only_request_of_a_peer_may_take_more_than_its_share() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("long", 8, peer="p")
        await bench.come("short", 1, peer="p")
        assert bench.order == ["long"]
        await bench.go("long")
        assert bench.order == ["long", "short"]

    play(scenario, peer_pages=5)


def test_once_there_is_room_in_the_share_it_is_the_head_by_its_place() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("p-0", 5, peer="p")
        await bench.come("p-1", 5, peer="p")
        await bench.come("other", 5)
        await bench.come("later", 5)
        assert bench.order == ["p-0", "other"]
        await bench.go("p-0")
        assert bench.order == ["p-0", "other", "p-1"]

    play(scenario, peer_pages=5)


def test_what_the_tree_has_is_not_counted() -> None:
    async def scenario(bench: Bench) -> None:
        hashes = long_chain("known", 4)
        first = bench.manager.reserve(hashes, 4, max_hit_pages=4)
        bench.manager.commit(Verifier(bench.manager.pool, "none").seal(first.id, 0, first.pages, hashes))
        bench.manager.end(first)
        await bench.come("p-0", 4, peer="p")
        known = await bench.queue.admit(ask(5, hashes, peer="p"))
        assert (len(known.hit), len(known.pages)) == (4, 1)
        bench.has["known"] = known

    play(scenario, peer_pages=5)


def test_those_who_stand_aside_fill_no_place_of_others() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("p-0", 5, peer="p")
        await bench.come("p-1", 5, peer="p")
        with pytest.raises(
            CapacityError, match="1 requests wait already, the limit is 1; 5 pages are reserved"
        ) as full:
            await bench.queue.admit(ask(5, peer="p"))
        assert full.value.fields["peer"] == "p"
        await bench.come("fits", 4)
        await bench.come("waits", 4)
        assert len(bench.queue) == 2
        with pytest.raises(CapacityError, match="1 pages"):
            await bench.queue.admit(ask(2))

    play(scenario, peer_pages=5, limit=1)


# --- one reservation for another --------------------------------------------------------------------------------------


def test_an_exchange_keeps_what_was_committed_and_goes_out_of_turn() -> None:
    async def scenario(bench: Bench) -> None:
        hashes = long_chain("prompt", 6)
        old = await bench.queue.admit(ask(8, hashes, peer="p"))
        bench.manager.commit(Verifier(bench.manager.pool, "none").seal(old.id, 0, old.pages[:3], hashes.part(0, 3)))
        await bench.come("head", 3)
        new = await bench.queue.exchange(old, ask(8, hashes, peer="q"))
        assert (old.alive, len(new.hit), len(new.pages)) == (False, 3, 5)
        assert [bench.queue.shares.waiting(peer) for peer in "pq"] == [0, 1]
        assert bench.order == []
        bench.has["new"] = new

    play(scenario)


def test_an_exchange_waits_for_pages_that_are_held_back_no_longer_than_for_any() -> None:
    async def scenario(bench: Bench) -> None:
        old = await bench.queue.admit(ask(8))
        held = old.pages[:2]
        bench.manager.quarantine(old, held, "a read without an end")
        await bench.come("other", 2)
        exchanged = asyncio.create_task(bench.queue.exchange(old, ask(8)))
        await turns(3)
        assert not exchanged.done()
        bench.manager.check()
        await bench.go("other")  # not the pages that are held back: those of somebody else will do
        bench.has["new"] = await exchanged
        assert not set(held) & set(bench.has["new"].pages)
        bench.manager.release_quarantine(old, held)

    play(scenario)
