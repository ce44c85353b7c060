"""The admission queue over a real manager: order, the rule of passing, the limit, and what leaving it leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdkv.errors import CapacityError, DeadlineExceeded, NeverFits, PeerLost
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.verifier import Verifier
from pdkv.node.flow import deadline
from pdkv.node.queue import PASS_LIMIT
from tests.kvcache.chains import long_chain
from tests.node.queued import PAGES, Bench, ask, play
from tests.node.scene import alone, answers, recovered, request, run, turns, until
from tests.node.toy import Pair, make_pair


def test_who_fits_does_not_wait() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 6)
        await bench.come("b", 4)
        assert bench.order == ["a", "b"]

    play(scenario)


def test_the_head_gets_in_as_soon_as_there_is_room_and_in_order() -> None:
    async def scenario(bench: Bench) -> None:
        for name in "abc":
            await bench.come(name, 8)
        assert bench.order == ["a"]
        assert (len(bench.queue), bench.free()) == (2, 2)  # who waits holds nothing
        await bench.go("a")
        await bench.go("b")
        assert bench.order == ["a", "b", "c"]

    play(scenario)


@pytest.mark.parametrize("limit", [0, 1, PASS_LIMIT])
def test_a_long_one_gets_in_after_at_most_the_limit_of_passes(limit: int) -> None:
    """An endless stream of short ones, that always fit: without the rule it would never be empty enough."""

    async def scenario(bench: Bench) -> None:
        await bench.come("short-0", 2)
        await bench.come("short-1", 2)
        await bench.come("long", PAGES)
        number = 1
        while "long" not in bench.has:
            number += 1
            await bench.come(f"short-{number}", 2)
            await bench.go(min((n for n in bench.has if n.startswith("short")), key=lambda n: int(n[6:])))
            assert number < 100
        assert bench.order.index("long") == 2 + limit
        await bench.go("long")

    play(scenario, pass_limit=limit)


def test_only_a_shorter_one_passes() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 9)
        await bench.come("head", 2)
        await bench.come("equal", 2)
        await bench.come("shorter", 1)
        assert bench.order == ["a", "shorter"]

    play(scenario)


def test_a_longer_one_that_the_cache_has_does_not_pass() -> None:
    async def scenario(bench: Bench) -> None:
        hashes = long_chain("known", 4)
        first = bench.manager.reserve(hashes, 4, max_hit_pages=4)
        verifier = Verifier(bench.manager.pool, "none")
        bench.manager.commit(verifier.seal(first.id, 0, first.pages, hashes))
        await bench.come("a", 5)
        await bench.come("head", 3)
        waiting = asyncio.create_task(bench.queue.admit(ask(4, hashes)))  # wants nothing that is not there
        await turns(3)
        assert not waiting.done()
        bench.manager.end(first)
        await turns(3)
        assert bench.order == ["a", "head"]
        await bench.go("a")
        bench.has["known"] = await waiting
        for name in ("head", "known"):
            await bench.go(name)
        bench.manager.end(bench.manager.reserve(PageHashes(), PAGES, max_hit_pages=0))

    play(scenario)


def test_what_never_fits_is_refused_at_once_whoever_waits() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", PAGES)
        await bench.come("b", PAGES)
        with pytest.raises(NeverFits) as caught:
            await bench.queue.admit(ask(PAGES + 1))
        assert caught.value.fields["short_pages"] == "1"

    play(scenario)


def test_a_full_queue_refuses_and_says_how_long_it_is_and_what_is_short() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 8)
        await bench.come("b", 9)
        await bench.come("c", 9)
        with pytest.raises(CapacityError, match="2 requests wait already, the limit is 2") as caught:
            await bench.queue.admit(ask(5))
        facts = caught.value.fields
        assert (facts["queued"], facts["queue_limit"]) == ("2", "2")
        assert (facts["wanted_pages"], facts["short_pages"], facts["ever_fits"]) == ("5", "3", "True")
        await bench.come("retracted", 9, again=True)
        assert len(bench.queue) == 3  # its client has tokens already: it is never refused

    play(scenario, limit=2)


def test_with_no_queue_there_is_only_now() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 8)
        await bench.come("b", 3)
        error = bench.tasks["b"].exception()
        assert isinstance(error, CapacityError)
        await bench.come("c", 2)
        assert bench.order == ["a", "c"]

    play(scenario, limit=0)


def test_a_deadline_or_a_cancel_leaves_nothing_and_lets_the_next_one_in() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 6)
        await bench.come("head", 9)
        await bench.come("equal", 9)
        await bench.come("fits", 4)
        assert bench.order == ["a", "fits"]
        await bench.go("fits")
        with pytest.raises(DeadlineExceeded):
            async with deadline(0.001, "the wait"):
                await bench.queue.admit(ask(8))
        bench.tasks["head"].cancel()
        await turns(3)
        bench.tasks["equal"].cancel()
        await turns(3)
        assert (len(bench.queue), bench.free()) == (0, 4)

    play(scenario)


def test_a_cancelled_head_lets_those_behind_it_in() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 6)
        await bench.come("head", 5)
        await bench.come("long", 9)
        await bench.come("fits", 4)
        assert bench.order == ["a", "fits"]
        await bench.go("fits")
        bench.queue._line[0].passed = PASS_LIMIT
        await bench.come("next", 4)
        assert "next" not in bench.has
        bench.tasks["head"].cancel()
        await turns(3)
        assert bench.order[-1] == "next"

    play(scenario)


def test_who_has_gone_or_failed_has_not_passed_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass is left for the head: it is for one that takes pages."""

    async def scenario(bench: Bench) -> None:
        await bench.come("a", 5)
        await bench.come("b", 4)
        await bench.come("head", PAGES)
        for name in ("gone", "failed", "fits", "late"):
            await bench.come(name, 5)
        reserve, tried = bench.manager.reserve, []

        def failing(hashes: PageHashes, pages: int, **limits: Any) -> Reservation:
            tried.append(pages)
            if tried == [PAGES, 5]:  # the head doesn't fit, and then the first of those behind it
                raise PeerLost("it has no place in the tree")
            return reserve(hashes, pages, **limits)

        monkeypatch.setattr(bench.manager, "reserve", failing)
        bench.manager.end(bench.has.pop("a"))  # there is room now, and the queue is to look at it
        bench.tasks["gone"].cancel()
        await turns(3)
        assert (list(bench.has), len(bench.queue)) == (["b", "fits"], 2)
        assert isinstance(bench.tasks["failed"].exception(), PeerLost)
        await bench.go("fits")
        assert "late" not in bench.has  # that was the only pass there was
        monkeypatch.undo()

    play(scenario, pass_limit=1)


def test_who_is_cancelled_in_the_moment_of_its_turn_gives_the_pages_back() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", 6)
        await bench.come("b", 9)
        bench.manager.end(bench.has.pop("a"))
        bench.queue._advance()
        assert bench.free() == 1  # granted, but not heard of yet
        bench.tasks["b"].cancel()
        await turns(3)
        assert bench.free() == PAGES

    play(scenario)


def test_who_comes_again_waits_before_the_new_but_behind_the_one_it_made_room_for() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", PAGES)
        await bench.come("head", PAGES)
        await bench.come("new", PAGES)
        await bench.come("again-0", PAGES, again=True)
        await bench.come("again-1", PAGES, again=True)
        for name in ("a", "head", "again-0", "again-1", "new"):
            await bench.go(name)
        assert bench.order == ["a", "head", "again-0", "again-1", "new"]

    play(scenario)


def test_nobody_passes_while_room_is_made_for_the_head_and_one_that_comes_again_asks_for_none() -> None:
    async def scenario(bench: Bench) -> None:
        asked: list[int] = []

        def make_room(short: int) -> bool:
            asked.append(short)
            return True

        bench.queue.make_room = make_room
        await bench.come("a", 8)
        await bench.come("again", 9, again=True)
        await bench.come("short", 1)
        assert (asked, bench.order) == ([], ["a", "short"])
        await bench.go("short")
        bench.tasks["again"].cancel()
        await bench.come("head", 5)
        await bench.come("shorter", 1)
        assert (set(asked), bench.order) == ({3}, ["a", "short"])
        await bench.go("a")
        assert bench.order == ["a", "short", "head", "shorter"]

    play(scenario)


def test_an_error_of_the_manager_reaches_whoever_waits() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.come("a", PAGES)
        await bench.come("b", PAGES)
        reserve = bench.manager.reserve

        def broken(*args: object, **kwargs: object) -> Reservation:
            raise PeerLost("the group is broken")

        bench.manager.reserve = broken  # type: ignore[method-assign]
        await bench.go("a")
        assert isinstance(bench.tasks["b"].exception(), PeerLost)
        bench.manager.reserve = reserve  # type: ignore[method-assign]

    play(scenario)


# --- on a decode node -------------------------------------------------------------------------------------------------


def test_who_finds_no_room_waits_for_it_and_is_seen_waiting() -> None:
    async def scenario(pair: Pair) -> None:
        manager = pair.decode.parts.manager
        taken = manager.reserve(PageHashes(), 60, max_hit_pages=0)
        asked = request(640)
        waiting = asyncio.create_task(answers(pair.decode.generate(asked)))
        await until(lambda: pair.decode.status().queued)
        assert manager.census()["reserved"] == 60  # it holds nothing
        manager.end(taken)
        tokens, _ = await waiting
        assert tuple(tokens) == alone(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("way", ["deadline", "cancel"])
def test_who_leaves_the_queue_leaves_nothing(way: str) -> None:
    async def scenario(pair: Pair) -> None:
        manager = pair.decode.parts.manager
        await pair.decode.connect("p0")
        taken = manager.reserve(PageHashes(), 60, max_hit_pages=0)
        asked = request(640, remaining_s=2.0 if way == "deadline" else 30.0)
        waiting = asyncio.create_task(answers(pair.decode.generate(asked)))
        await until(lambda: pair.decode.status().queued)
        if way == "cancel":
            waiting.cancel()
        with pytest.raises(DeadlineExceeded if way == "deadline" else asyncio.CancelledError):
            await waiting
        assert pair.decode.status().queued == 0
        manager.end(taken)
        await recovered(pair)

    run(scenario, make_pair())
