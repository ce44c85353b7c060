"""What one peer's prompts may have, at once and in the end."""

from __future__ import annotations

import pytest

from pdkv.errors import CapacityError
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.node.shares import PeerShares
from pdkv.replay.pool import pool_without_bytes
from tests.kvcache.chains import long_chain

LIMIT = 10


class Bench:
    def __init__(self, limit: int | None = LIMIT) -> None:
        self.manager = CacheManager(pool_without_bytes(100))
        self.shares = PeerShares(limit)

    def start(self, pages: int, ahead: int, peer: str = "p") -> Reservation:
        self.shares.require_start(peer, pages, ahead)
        hashes = long_chain(str(self.manager._last_holder), pages)
        made = self.manager.reserve(hashes, pages, max_hit_pages=0, ahead=ahead)
        self.shares.charge(peer, made)
        return made

    def grow(self, made: Reservation, count: int) -> None:
        self.shares.require_growth(made, count)
        self.manager.grow(made, count)


def test_all_at_once_they_have_the_limit_together() -> None:
    bench = Bench()
    bench.start(6, 6)
    with pytest.raises(CapacityError, match="6 pages are reserved for prompts from p, 5 more exceed 10") as caught:
        bench.start(5, 5)
    facts = caught.value.fields
    assert (facts["held_pages"], facts["wanted_pages"], facts["short_pages"]) == ("6", "5", "1")
    bench.start(4, 4)
    bench.start(9, 9, peer="q")


def test_the_only_one_may_have_more_and_then_nobody_else() -> None:
    bench = Bench()
    only = bench.start(30, 12)
    bench.grow(only, 18)
    with pytest.raises(CapacityError):
        bench.start(1, 1)
    assert bench.shares.settle(only)
    assert not bench.shares.settle(only)
    bench.start(1, 1)
    assert (bench.shares.waiting("p"), len(bench.shares)) == (1, 1)


def test_one_whose_pages_were_all_there_takes_nothing_of_the_share() -> None:
    bench = Bench()
    bench.start(1, 0)
    made = bench.manager.reserve(long_chain("hit", 0), 1, max_hit_pages=0)
    bench.manager.end(made)
    settled = PeerShares(LIMIT)
    settled.charge("p", bench.manager.reserve(long_chain("all", 1), 1, max_hit_pages=0, ahead=0))
    settled.require_start("p", LIMIT, LIMIT)


def test_two_that_start_with_little_can_both_get_the_rest() -> None:
    bench = Bench()
    first, second = bench.start(9, 3), bench.start(9, 1)
    with pytest.raises(CapacityError):
        bench.grow(second, 1)  # 5 left; the first lacks 6
    bench.grow(first, 6)
    bench.shares.settle(first)
    bench.grow(second, 8)


def test_the_longest_is_alone_by_then() -> None:
    bench = Bench()
    longest, short = bench.start(50, 4), bench.start(6, 1)
    with pytest.raises(CapacityError):
        bench.grow(longest, 1)  # 4 left, 5 lacking
    bench.grow(short, 5)
    bench.shares.settle(short)
    bench.grow(longest, 46)


def test_without_a_limit_or_a_peer_nothing_is_counted() -> None:
    bench = Bench(None)
    for _ in range(3):
        bench.grow(bench.start(30, 10), 20)
    other = Bench()
    other.manager.grow(made := other.manager.reserve(long_chain("own", 30), 30, max_hit_pages=0, ahead=1), 29)
    other.shares.require_growth(made, 0)
