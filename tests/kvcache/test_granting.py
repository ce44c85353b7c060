"""Pages that are taken little by little: in any order of events everybody can get the rest; and what breaks that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pdkv.errors import BoundsError, CapacityError, ReservationDead
from pdkv.ids import LeaseId, LocalPages
from pdkv.kvcache import audit, granting
from pdkv.kvcache.granting import certain
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.verifier import VerifiedPages
from tests.kvcache.chains import chain_of, long_chain
from tests.kvcache.late_model import LateMachine
from tests.kvcache.late_play import Play
from tests.kvcache.test_manager import Bench

QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestAnyOrderOfEvents = LateMachine.TestCase
TestAnyOrderOfEvents.settings = QUICK


def late(bench: Bench, letters: str, total: int, ahead: int) -> Reservation:
    return bench.manager.reserve(chain_of(letters), total, max_hit_pages=99, ahead=ahead)


# --- one by one -----------------------------------------------------------------------------------------------------


def test_a_request_takes_its_pages_little_by_little_and_their_places_stay() -> None:
    bench = Bench(10)
    bench.cache("ab")
    made = late(bench, "abcd", 8, 1)
    assert (len(made.hit), len(made.pages), made.rest) == (2, 1, 5)
    seen = [made.sequence]
    for count in (2, 0, 3):
        bench.manager.grow(made, count)
        seen.append(made.sequence)
        bench.manager.check()
    assert made.rest == 0
    assert all(pages == made.sequence[: len(pages)] for pages in seen)
    assert made.sequence == LocalPages.join([made.hit, made.pages])
    for count in (-1, 1):
        with pytest.raises(BoundsError):
            bench.manager.grow(made, count)
    bench.manager.end(made)
    with pytest.raises(ReservationDead):
        bench.manager.grow(made, 0)


def test_pages_that_were_held_back_and_are_free_again_are_not_given_to_their_request_twice() -> None:
    """Under two indices of its sequence one page would be proved for the one, and overwritten for the other."""
    bench = Bench(10)
    made = late(bench, "ab", 4, 1)
    bench.manager.quarantine(made, made.pages, "no end seen")
    bench.manager.release_quarantine(made, made.pages)
    with pytest.raises(ReservationDead, match="can only end"):
        bench.manager.grow(made, 1)
    bench.manager.check()
    bench.manager.end(made)
    bench.manager.check()


def test_what_is_there_is_not_given_if_two_could_wait_for_each_other() -> None:
    bench = Bench(10)
    first, second = late(bench, "abcdefgh", 8, 3), late(bench, "ijklmnop", 8, 2)
    with pytest.raises(CapacityError, match=r"3 pages wanted .* could wait for each other's pages for ever") as caught:
        bench.manager.grow(second, 3)  # 2 left: neither the 5 that the first lacks nor the 3 of the second
    assert caught.value.fields["short_pages"] == "1"
    bench.manager.grow(first, 3)  # 2 left, which it lacks
    bench.manager.check()


@pytest.mark.parametrize("ends", [0, 1])
def test_the_rest_is_given_when_others_end(ends: int) -> None:
    bench = Bench(10)
    both = [late(bench, "abcdefgh", 8, 4), late(bench, "ijklmnop", 8, 2)]
    bench.manager.grow(both[0], 4)
    with pytest.raises(CapacityError):
        bench.manager.grow(both[1], 6)
    if ends:
        bench.manager.end(both[1])
        assert bench.manager.census()["free"] == 2
    else:
        bench.manager.end(both[0])
        bench.manager.grow(both[1], 6)
    bench.manager.check()


def test_all_that_it_lacks_is_given_whenever_it_is_there() -> None:
    bench = Bench(10)
    first = late(bench, "abcd", 4, 2)
    bench.commit(first, 2)
    bench.manager.hand_over(first, LeaseId("lease"))  # now nobody can tell when its pages come back
    second = late(bench, "ijklmnop", 8, 8)  # it fits as a whole, and ends without anybody
    assert (second.rest, first.rest) == (0, 2)
    with pytest.raises(CapacityError):
        bench.manager.grow(first, 1)
    bench.manager.end(second)
    bench.manager.grow(first, 2)


def test_pages_that_another_one_has_locked_too_are_not_counted() -> None:
    bench = Bench(12)
    bench.cache("abcd")
    first = late(bench, "abcdef", 10, 0)
    assert certain(first) == 4
    second = late(bench, "abxy", 6, 2)
    assert (certain(first), certain(second)) == (2, 2)
    bench.manager.end(first)
    assert certain(second) == 4
    bench.manager.check()


def test_a_start_counts_what_its_own_lock_would_keep() -> None:
    """The first one's two cached pages are what the third's claim relies on; with the third they don't come back."""
    bench = Bench(10)
    bench.cache("ab")
    first = late(bench, "ab", 2, 0)
    second = late(bench, "ijklmnop", 8, 6)  # two free, which it lacks
    before = bench.manager.census()
    with pytest.raises(CapacityError, match="for ever"):
        bench.manager.reserve(chain_of("abcde"), 8, max_hit_pages=99, ahead=1)
    assert bench.manager.census() == before
    for each in (first, second):
        bench.manager.end(each)
    bench.manager.check()


def test_what_was_held_back_or_handed_over_is_not_counted() -> None:
    bench = Bench(12)
    made = late(bench, "abcd", 8, 6)
    bench.commit(made, 2)
    assert certain(made) == 6
    lost = made.sequence[2:4]
    bench.manager.quarantine(made, lost, "a read without an end")
    assert certain(made) == 4
    bench.manager.release_quarantine(made, lost)
    assert certain(made) == 4  # they are free now: its end doesn't free them
    bench.seal_tail(made, 5)
    bench.manager.hand_over(made, LeaseId("lease"))
    assert certain(made) == 1  # neither the tail, nor what the lease has locked
    bench.manager.check()


def test_a_duplicate_is_given_back_at_once_while_pages_are_lacking() -> None:
    bench = Bench(12)
    slow, fast = late(bench, "abcd", 6, 4), bench.reserve("abcd")
    standing = bench.commit(fast, 4)
    free = bench.manager.census()["free"]
    told: list[int] = []
    bench.manager.on_room = lambda: told.append(bench.manager.census()["free"])
    assert bench.commit(slow, 2) == standing[:2]
    assert told == [free + 2]
    assert slow.sequence[:2] == standing[:2]
    bench.manager.grow(slow, 2)
    assert bench.commit(slow, 2) == standing[2:]
    assert slow.sequence[2:4] != standing[2:]  # it lacks nothing any more, and steps may be running
    for each in (slow, fast):
        bench.manager.end(each)
    bench.manager.check()


def test_a_grant_costs_as_much_in_a_large_pool_as_in_a_small_one() -> None:
    """It looks at requests, at the nodes that they alone have, and at no page."""
    work = []
    for pages in (200, 20_000):
        bench = Bench(pages)
        made = [bench.manager.reserve(long_chain(str(i), 20), 40, max_hit_pages=0, ahead=10) for i in range(4)]
        for each in made:
            bench.commit(each, 10)
        before = (bench.manager.tree.work.nodes, bench.manager.allocator.work.extents)
        for each in made:
            bench.manager.grow(each, 5)
        after = (bench.manager.tree.work.nodes, bench.manager.allocator.work.extents)
        work.append(np.subtract(after, before).tolist())
    assert work[0] == work[1]


# --- at random, and what breaks it -----------------------------------------------------------------------------------

SEEDS = range(400)


def test_everybody_can_always_get_the_rest_and_does() -> None:
    assert {seed: why for seed in SEEDS if (why := Play(seed).go())} == {}


def _granted_unchecked() -> object:
    return patch.object(granting, "_require_safe", lambda *facts: None)


def _what_others_have_locked_counts_too() -> object:
    def certain(reservation: Reservation, taken: object = None) -> int:
        return len(reservation.sequence) - reservation.lost

    return _both(patch.object(granting, "certain", certain), patch.object(audit, "certain", lambda reservation: 0))


def _a_hit_takes_nothing_from_others() -> object:
    right = granting.certain
    return patch.object(granting, "certain", lambda reservation, taken=None: right(reservation))


def _duplicates_are_kept() -> object:
    right = CacheManager.commit

    def commit(manager: CacheManager, verified: VerifiedPages) -> LocalPages:
        reservation = manager.reservations[verified.reservation]
        reservation.total_pages, total = len(reservation.sequence), reservation.total_pages
        try:
            return right(manager, verified)
        finally:
            reservation.total_pages = total

    return patch.object(CacheManager, "commit", commit)


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


@pytest.mark.parametrize(
    "sabotage",
    [
        _granted_unchecked,
        _what_others_have_locked_counts_too,
        _a_hit_takes_nothing_from_others,
        _duplicates_are_kept,
    ],
)
def test_the_play_finds(sabotage: Callable[[], Any]) -> None:
    with sabotage():
        ways = Counter(Play(seed).go() for seed in SEEDS)
    assert ways["unsafe"] > 0
    if sabotage is _granted_unchecked:
        with sabotage(), patch.object(Play, "possible", lambda play: True):
            assert "stuck" in {Play(seed).go() for seed in SEEDS}
