"""The queue with a window: who has started comes first, gets its pages as it needs them, and always gets them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from pdkv.errors import BoundsError, CapacityError, ReservationDead
from pdkv.kvcache import granting
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.verifier import Verifier
from pdkv.node.queue import PASS_LIMIT, AdmissionQueue
from pdkv.node.shares import PeerShares
from pdkv.node.started import Started
from pdkv.replay.pool import pool_without_bytes
from tests.kvcache.chains import long_chain
from tests.node.queued import PAGES, Bench, ask, play
from tests.node.scene import turns

WINDOW = 2


async def start(bench: Bench, name: str, pages: int, peer: str = "") -> None:
    """A request whose prompt is all of its pages but the last."""
    await bench.come(name, pages, long_chain(name, pages - 1), peer=peer)


async def need(bench: Bench, name: str, pages: int, until: int = PAGES) -> asyncio.Task[None]:
    made = bench.has[name]
    task = asyncio.create_task(bench.queue.started.reach(made, pages, until=min(until, made.total_pages)))
    bench.tasks[f"{name}-{pages}"] = task
    await turns(3)
    return task


def test_a_request_starts_with_a_window_and_takes_one_ahead_of_its_need() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 9)
        made = bench.has["a"]
        assert (len(made.sequence), made.rest) == (2, 7)
        await need(bench, "a", 1)
        assert len(made.sequence) == 3
        await need(bench, "a", 4)
        assert len(made.sequence) == 6
        await need(bench, "a", 6, until=7)
        assert len(made.sequence) == 7
        await need(bench, "a", 9)
        assert made.rest == 0

    play(scenario, window_pages=WINDOW)


def test_one_that_waits_for_several_of_its_pages_is_one_that_waits() -> None:
    async def scenario(bench: Bench) -> None:
        for name in "abc":
            await start(bench, name, 6)
        await need(bench, "a", 6)
        first, second = await need(bench, "b", 5, until=5), await need(bench, "b", 6, until=6)
        assert (first.done(), second.done(), len(bench.queue.started)) == (False, False, 2)
        assert bench.queue.started.claims() == {"claimed": 18, "held": 6 + 2 + 2, "growing": 1}
        await bench.go("a")
        assert (first.done(), second.done(), len(bench.queue.started)) == (True, True, 0)

    play(scenario, window_pages=WINDOW)


def test_what_fits_within_a_window_is_taken_at_once() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 6)
        assert bench.has["a"].rest == 0

    play(scenario, window_pages=100)


def test_more_run_at_once_than_would_with_all_of_their_pages() -> None:
    async def scenario(bench: Bench) -> None:
        for name in "abc":
            await start(bench, name, 6)

    assert play(scenario, window_pages=WINDOW).order == ["a", "b", "c"]
    assert play(scenario).order == ["a"]


def test_who_could_wait_in_vain_does_not_start() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", PAGES)
        await start(bench, "b", 9)  # 8 free, and each could then lack more than the other gives back
        assert bench.order == ["a"]
        await need(bench, "a", 4, until=4)
        assert bench.order == ["a"]
        await bench.go("a")
        assert bench.order == ["a", "b"]

    play(scenario, window_pages=WINDOW)


def test_those_who_have_started_are_served_in_the_order_of_their_start_and_before_the_others() -> None:
    async def scenario(bench: Bench) -> None:
        for name in "abc":
            await start(bench, name, 6)
        await need(bench, "a", 6)
        third, second = await need(bench, "c", 6), await need(bench, "b", 6)
        await start(bench, "new", 9)
        assert (third.done(), second.done(), len(bench.queue.started)) == (False, False, 2)
        await bench.go("a")  # 6 pages: 4 for the second, and then 2 are too few
        assert (third.done(), second.done(), bench.order) == (False, True, ["a", "b", "c"])
        await bench.go("b")
        assert third.done()
        await bench.go("c")
        assert bench.order[-1] == "new"

    play(scenario, window_pages=WINDOW)


@pytest.mark.parametrize("limit", [0, 2, PASS_LIMIT])
def test_few_start_while_one_waits_that_has_started(limit: int) -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "kept", 4)
        await need(bench, "kept", 4)
        await start(bench, "long", 9)
        waiting = await need(bench, "long", 8)
        assert not waiting.done()
        for number in range(20):
            await start(bench, name := f"short-{number}", 1)
            if name in bench.has:
                await bench.go(name)
        assert len(bench.order) == 2 + limit
        await bench.go("kept")
        assert waiting.done()

    play(scenario, window_pages=WINDOW, pass_limit=limit)


def test_all_of_it_is_given_where_a_part_would_not_be_safe() -> None:
    """A lease has locked what the first one committed: nobody can tell when that comes back."""

    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 6)
        made = bench.has["a"]
        hashes = made.hashes.part(0, 2)
        bench.manager.commit(Verifier(bench.manager.pool, "none").seal(made.id, 0, made.sequence[:2], hashes))
        await start(bench, "b", 9)
        bench.manager.tree.lock(made.node)
        await need(bench, "a", 3, until=3)
        assert made.rest == 0
        bench.manager.tree.unlock(made.node)

    play(scenario, window_pages=WINDOW)


def test_whoever_stops_waiting_leaves_nothing_and_the_others_go_on() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 8)
        await start(bench, "b", 8)
        await need(bench, "a", 6, until=6)
        waiting = await need(bench, "b", 5)
        waiting.cancel()
        await turns(3)
        assert len(bench.queue.started) == 0
        assert len(bench.has["b"].sequence) == 2

    play(scenario, window_pages=WINDOW)


def test_who_has_ended_or_asks_for_more_than_it_said_is_told() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 5)
        made = bench.has["a"]
        with pytest.raises(BoundsError, match="at most 5"):
            await bench.queue.started.reach(made, 6, until=6)
        await bench.go("a")
        with pytest.raises(ReservationDead):
            await bench.queue.started.reach(made, 4, until=5)

    play(scenario, window_pages=WINDOW)


def test_an_exchange_keeps_what_was_committed_and_needs_no_window() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 8)
        await start(bench, "b", 8, "p")
        old = bench.has["b"]
        bench.manager.commit(
            Verifier(bench.manager.pool, "none").seal(old.id, 0, old.sequence[:2], old.hashes.part(0, 2))
        )
        await need(bench, "a", 6, until=6)
        new = bench.has["b"] = await bench.queue.exchange(old, ask(8, long_chain("b", 7), "q"))
        assert (len(new.hit), new.rest, old.alive) == (2, 6, False)
        assert [bench.queue.shares.waiting(peer) for peer in "pq"] == [0, 1]

    play(scenario, window_pages=WINDOW)


def test_the_share_of_a_peer_bounds_what_is_taken_and_not_what_is_claimed() -> None:
    async def scenario(bench: Bench) -> None:
        for name in "abc":
            await start(bench, name, 4, "p")
        assert bench.order == ["a", "b"]  # 2 and 4 of 6
        waiting = await need(bench, "a", 3, until=3)
        assert not waiting.done()
        bench.queue.settle(bench.has["b"])
        await turns(3)
        assert waiting.done()
        bench.queue.settle(bench.has["a"])
        await bench.go("b")
        assert bench.order[-1] == "c"

    play(scenario, window_pages=WINDOW, peer_pages=6)


def test_of_one_peer_only_one_at_a_time_starts_with_less_than_its_prompt() -> None:
    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 5, "p")
        await start(bench, "b", 4, "p")
        await start(bench, "other", 3, "q")
        assert [len(bench.has[name].sequence) for name in ("a", "b", "other")] == [2, 4, 2]
        await start(bench, "c", 3, "q")
        assert "c" not in bench.has
        await bench.go("b")
        assert len(bench.has["c"].sequence) == 3

    play(scenario, window_pages=WINDOW)


def test_nobody_takes_what_those_before_need_next() -> None:
    async def scenario(bench: Bench) -> None:
        for name, pages in (("a", 6), ("b", 5), ("c", 5), ("d", 5)):
            await start(bench, name, pages)
        assert bench.order == ["a", "b", "c"]  # 4 are left, and 6 are needed next
        third = await need(bench, "c", 3, until=3)
        assert not third.done()
        assert (await need(bench, "a", 4, until=4)).done()
        second = await need(bench, "b", 3, until=3)
        assert not second.done()
        assert (await need(bench, "a", 6)).done()
        await bench.go("a")
        assert second.done()
        assert third.done()

    play(scenario, window_pages=WINDOW)


def test_when_all_wait_whoever_can_go_on_goes_on() -> None:
    """By itself the rule would keep what there is for one that can't go on with it."""

    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 9)
        await start(bench, "b", 5)
        await need(bench, "a", 5, until=5)
        first = await need(bench, "a", 9)  # 3 are left, and it lacks 4
        assert not first.done()
        for pages in (4, 5):
            assert (await need(bench, "b", pages)).done()
        await bench.go("b")
        assert first.done()

    play(scenario, window_pages=WINDOW)


@pytest.mark.parametrize("step", [5, 3])
def test_the_next_one_starts_as_soon_as_all_pages_of_that_prompt_are_taken(step: int) -> None:
    """Needed, or ahead of the need."""

    async def scenario(bench: Bench) -> None:
        await start(bench, "a", 5, "p")
        await start(bench, "b", 9, "p")
        assert bench.order == ["a"]
        await need(bench, "a", step)
        assert bench.order == ["a", "b"]

    play(scenario, window_pages=3)


def test_who_waits_twice_is_served_twice_by_what_it_gets() -> None:
    """Chunks that were announced one after the other, and neither has a place."""

    async def scenario(bench: Bench) -> None:
        await start(bench, "kept", 6)
        await need(bench, "kept", 6)
        await start(bench, "a", 6)
        waiting = [await need(bench, "a", pages) for pages in (5, 6)]
        assert len(bench.queue.started) == 2
        await bench.go("kept")
        assert all(task.done() for task in waiting)

    play(scenario, window_pages=WINDOW)


# --- at random --------------------------------------------------------------------------------------------------------


class Stream:
    """Requests of random length for random peers, of which some give up: until all have ended, or nobody moves."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = CacheManager(pool_without_bytes(PAGES))
        window, share = self.random.choice((1, 2, 4)), self.random.choice((5, PAGES))
        self.queue = AdmissionQueue(self.manager, limit=99, peer_pages=share, window_pages=window)
        self.moves = 0

    async def request(self, number: int) -> None:
        pages, patience = self.random.randint(1, PAGES), self.random.choice((3, 99, 99))
        wanted = ask(pages, long_chain(str(self.random.randrange(6)), pages - 1), self.random.choice(("p", "q", "")))
        made = await self.queue.admit(wanted)
        try:
            while (place := len(made.sequence)) < pages and patience:
                patience -= 1
                first, stop = made.committed, min(place, len(made.hashes))
                if stop > first:
                    hashes, seal = made.hashes.part(first, stop), Verifier(self.manager.pool, "none").seal
                    self.manager.commit(seal(made.id, first, made.sequence[first:stop], hashes))
                await self.queue.started.reach(made, place + 1, until=pages)
                self.moves += 1
                await turns(self.random.randrange(3))
                if self.random.random() < 0.1:
                    self.queue.settle(made)
                if self.random.random() < 0.2:
                    made = await self.queue.exchange(made, replace(wanted, peer=self.random.choice("pq")))
                    self.moves += 1
        finally:
            self.queue.settle(made)
            self.manager.end(made)
            self.moves += 1

    async def run(self) -> str:
        """`stuck`, or nothing."""
        tasks = [asyncio.create_task(self.request(number)) for number in range(12)]
        seen = -1
        while seen != self.moves and not all(task.done() for task in tasks):
            seen = self.moves
            await turns(40)
        stuck = "" if all(task.done() for task in tasks) else "stuck"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.manager.check()
        assert (len(self.queue), len(self.queue.started), len(self.queue.shares)) == (0, 0, 0)
        assert not self.manager.reservations
        return stuck


SEEDS = range(100)


def outcomes() -> Counter[str]:
    return Counter(asyncio.run(Stream(seed).run()) for seed in SEEDS)


def test_everybody_ends() -> None:
    assert outcomes() == {"": len(SEEDS)}


def _shares_unchecked(shares: PeerShares, peer: str, others: list[Reservation], new: tuple[int, int]) -> None:
    """A share is kept to, and nobody asks whether the others can still get theirs."""
    held, limit = sum(len(each.pages) for each in others) + new[1], shares._limit or 0
    if held > limit and others:
        raise CapacityError("the share is taken", short_pages=held - limit)


@pytest.mark.parametrize(
    "sabotage",
    [
        lambda: patch.object(granting, "_require_safe", lambda *facts: None),
        lambda: patch.object(PeerShares, "_require", _shares_unchecked),
        lambda: patch.object(Started, "_all_wait", lambda started: False),
    ],
    ids=["granted-unchecked", "shares-unchecked", "kept-for-those-before"],
)
def test_without_one_of_the_rules_they_wait_for_each_other(sabotage: Callable[[], Any]) -> None:
    with sabotage():
        assert outcomes()["stuck"] > 0
