"""Each rule of the cache manager that matters to a node, one by one; any order of events is in test_manager_laws.py."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError, CapacityError, DuplicateRequest, NeverFits, ProtocolError, ReservationDead
from pdkv.ids import LeaseId, LocalPages, PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.chains import chain_of, long_chain
from tests.kvcache.manager_model import FMT

LEASE = LeaseId("lease")
TAIL = chain_of("tail").part(3, 4)


class Bench:
    """A manager with what it needs around it."""

    def __init__(self, usable_pages: int = 20) -> None:
        self.pool = SlotPool.create(FMT, usable_pages + 1)
        self.manager = CacheManager(self.pool)
        self.verifier = Verifier(self.pool)

    def reserve(self, letters: str, total: int | None = None, *, limit: int = 99) -> Reservation:
        return self.manager.reserve(chain_of(letters), total or len(letters), max_hit_pages=limit)

    def commit(self, reservation: Reservation, count: int) -> LocalPages:
        first = reservation.committed
        pages = reservation.sequence[first : first + count]
        hashes = reservation.hashes.part(first, first + count)
        return self.manager.commit(self.verifier.seal(reservation.id, first, pages, hashes))

    def cache(self, letters: str) -> None:
        reservation = self.reserve(letters)
        self.commit(reservation, len(letters) - len(reservation.hit))
        self.manager.end(reservation)

    def seal_tail(self, reservation: Reservation, index: int) -> LocalPages:
        page = reservation.sequence[index : index + 1]
        self.manager.take_private(reservation, page)
        self.manager.seal_private(reservation, self.verifier.seal(reservation.id, index, page, TAIL))
        return page


# --- a request ------------------------------------------------------------------------------------------------------


def test_the_pages_of_a_sequence_are_the_hit_ones_and_then_the_new_ones() -> None:
    bench = Bench()
    bench.cache("abc")
    reservation = bench.reserve("abcde", 7)
    assert (len(reservation.hit), len(reservation.pages), reservation.committed) == (3, 4, 3)
    assert reservation.sequence == LocalPages.join([reservation.hit, reservation.pages])
    assert [reservation.page_of(i) for i in range(7)] == reservation.sequence.array.tolist()


@pytest.mark.parametrize(("limit", "drop", "hit"), [(9, 0, 3), (2, 0, 2), (0, 0, 0), (9, 1, 2), (2, 1, 1), (0, 1, 0)])
def test_a_hit_is_limited_and_then_shortened(limit: int, drop: int, hit: int) -> None:
    bench = Bench()
    bench.cache("abc")
    reservation = bench.manager.reserve(chain_of("abcd"), 5, max_hit_pages=limit, drop_pages=drop)
    assert len(reservation.hit) == hit


def test_too_little_room_leaves_nothing_behind() -> None:
    bench = Bench(10)
    bench.cache("abcd")
    bench.reserve("xy", 5)
    before = bench.manager.census()
    with pytest.raises(CapacityError) as caught:
        bench.reserve("abce", 9)  # 3 of the tree and 6 new ones: 1 is free, "d" can be evicted
    assert not isinstance(caught.value, NeverFits)
    facts = {k: int(v) for k, v in caught.value.fields.items() if k != "ever_fits"}
    assert (facts["wanted"], facts["free"], facts["evictable"], facts["locked"], facts["reserved"]) == (6, 1, 1, 3, 5)
    assert bench.manager.census() == before
    bench.manager.check()
    assert len(bench.reserve("abcd").hit) == 4


def test_what_never_fits_is_told_apart() -> None:
    bench = Bench(10)
    with pytest.raises(NeverFits):
        bench.reserve("ab", 11)
    assert bench.manager.census()["free"] == 10


@pytest.mark.parametrize(("total", "limit", "drop"), [(0, 0, 0), (1, 0, 0), (2, -1, 0), (2, 0, -1)])
def test_nonsense_is_refused(total: int, limit: int, drop: int) -> None:
    with pytest.raises(BoundsError):
        Bench().manager.reserve(chain_of("ab"), total, max_hit_pages=limit, drop_pages=drop)


def test_a_hit_is_not_evicted_for_the_rest_of_its_own_request() -> None:
    bench = Bench(6)
    bench.cache("ab")
    bench.cache("xyz")
    reservation = bench.reserve("abcdef")
    assert len(reservation.hit) == 2
    assert bench.manager.census() == {
        "free": 0, "reserved": 4, "cached": 2, "private": 0, "quarantined": 0, "total": 6
    }  # fmt: skip


def test_a_commit_must_extend_the_committed_prefix_of_a_live_reservation() -> None:
    bench = Bench()
    reservation, other = bench.reserve("abcd"), bench.reserve("abcd")
    seal, pages, hashes = bench.verifier.seal, reservation.sequence, reservation.hashes
    refused: list[tuple[int, int, LocalPages, PageHashes, type[Exception]]] = [
        (reservation.id, 1, pages[1:2], hashes.part(1, 2), BoundsError),  # a gap
        (reservation.id, 0, pages[1:2], hashes.part(0, 1), BoundsError),  # another page of its own
        (reservation.id, 0, other.pages[:1], hashes.part(0, 1), BoundsError),  # another's page
        (reservation.id, 0, pages[:1], hashes.part(1, 2), ProtocolError),  # another hash
        (99, 0, pages[:1], hashes.part(0, 1), ReservationDead),
    ]
    for of, first, some, named, error in refused:
        with pytest.raises(error):
            bench.manager.commit(seal(of, first, some, named))  # type: ignore[arg-type]
    assert len(bench.manager.tree) == 0
    late = seal(reservation.id, 0, pages, hashes)
    bench.manager.end(reservation)
    with pytest.raises(ReservationDead):
        bench.manager.commit(late)
    assert bench.manager.census()["cached"] == 0


def test_the_faster_of_two_equal_requests_stands_in_the_tree() -> None:
    bench = Bench()
    first, second = bench.reserve("abc", 4), bench.reserve("abc", 4)
    standing = bench.commit(first, 2)
    assert bench.commit(second, 3) == LocalPages.join([standing, second.pages[2:3]])
    assert bench.manager.census()["private"] == 2
    assert bench.commit(first, 1) == second.pages[2:3]
    bench.manager.end(second)
    assert bench.manager.tree.match(chain_of("abc")).pages.tolist() == [*first.pages[:2], *second.pages[2:3]]
    assert bench.manager.tree.locked == 3
    bench.manager.check()


def test_sealed_pages_can_be_announced_and_others_can_not() -> None:
    bench = Bench()
    reservation = bench.reserve("ab", 4)
    pages = bench.commit(reservation, 2)
    tail = bench.seal_tail(reservation, 2)
    assert bench.manager.hashes(LocalPages.join([pages, tail])).raw == chain_of("ab").raw + TAIL.raw
    expected = bench.verifier.seal(reservation.id, 0, pages, reservation.hashes)
    assert np.array_equal(bench.manager.digests(pages), expected.digests)
    assert np.array_equal(bench.manager.generations(pages), bench.manager.table.generations(pages))
    for announce in (bench.manager.hashes, bench.manager.digests, bench.manager.generations):
        with pytest.raises(BoundsError):
            announce(reservation.sequence[2:])


def test_a_sealed_tail_is_not_sealed_again_before_it_is_reopened() -> None:
    bench = Bench()
    reservation = bench.reserve("a", 2)
    tail = bench.seal_tail(reservation, 1)
    generation = bench.manager.generations(tail)[0]
    again = bench.verifier.seal(reservation.id, 1, tail, chain_of("other").part(4, 5))
    with pytest.raises(BoundsError):
        bench.manager.seal_private(reservation, again)
    bench.manager.reopen_private(reservation, tail)
    bench.manager.seal_private(reservation, again)
    assert bench.manager.generations(tail)[0] == generation + np.uint64(1)


def test_only_its_own_private_page_at_its_place_is_sealed() -> None:
    bench = Bench()
    reservation, other = bench.reserve("a", 3), bench.reserve("b", 2)
    pages = reservation.sequence
    with pytest.raises(BoundsError):  # still reserved
        bench.manager.seal_private(reservation, bench.verifier.seal(reservation.id, 1, pages[1:2], TAIL))
    bench.manager.take_private(reservation, pages[1:])
    for of, index in ((reservation.id, 2), (other.id, 1)):
        with pytest.raises(BoundsError):
            bench.manager.seal_private(reservation, bench.verifier.seal(of, index, pages[1:2], TAIL))
    with pytest.raises(BoundsError):
        bench.manager.take_private(reservation, other.pages[:1])
    bench.manager.end(reservation)
    for call in (bench.manager.take_private, bench.manager.reopen_private):
        with pytest.raises(ReservationDead):
            call(reservation, pages[1:2])


# --- aborts ---------------------------------------------------------------------------------------------------------


def test_ending_twice_frees_once() -> None:
    bench = Bench(6)
    reservation = bench.reserve("abc", 6)
    bench.commit(reservation, 2)
    bench.manager.end(reservation)
    assert bench.manager.census()["free"] == 4
    other = bench.reserve("x", 4)
    bench.manager.end(reservation)
    assert other.alive
    assert bench.manager.census()["reserved"] == 4
    bench.manager.check()


def test_pages_with_an_unsettled_read_outlive_their_request() -> None:
    bench = Bench(6)
    reservation = bench.reserve("abc", 6)
    unsettled = reservation.pages[1:3]
    bench.manager.quarantine(reservation, unsettled, "peer stopped")
    bench.manager.end(reservation)
    assert bench.manager.census()["quarantined"] == 2
    assert bench.manager.quarantine_reasons() == {reservation.id: "2 pages: peer stopped"}
    others = bench.reserve("x", 4)
    assert not set(others.pages) & set(unsettled)
    with pytest.raises(CapacityError):
        bench.reserve("y", 1)
    bench.manager.release_quarantine(reservation, unsettled)
    assert bench.manager.quarantine_reasons() == {}
    assert set(bench.reserve("y", 2).pages) == set(unsettled)
    with pytest.raises(BoundsError):  # another request's by now
        bench.manager.release_quarantine(reservation, unsettled)


def test_pages_of_a_running_step_are_held_back() -> None:
    bench = Bench(6)
    reservation = bench.reserve("abc", 5)
    bench.commit(reservation, 1)
    bench.manager.quarantine(reservation, reservation.pages[1:2], "peer stopped")
    bench.manager.take_private(reservation, reservation.pages[4:])
    held = bench.manager.end(reservation, writers=True)
    assert held == reservation.pages[2:]
    assert bench.manager.quarantine_reasons()[reservation.id] == "4 pages: peer stopped; a local writer may still run"
    bench.manager.release_quarantine(reservation, held)
    assert bench.manager.census()["quarantined"] == 1
    bench.manager.check()


def test_quarantine_after_the_end_comes_too_late() -> None:
    bench = Bench()
    reservation = bench.reserve("abc")
    bench.commit(reservation, 1)
    with pytest.raises(BoundsError):  # it is in the tree
        bench.manager.quarantine(reservation, reservation.pages[:2], "peer stopped")
    bench.manager.end(reservation)
    with pytest.raises(ReservationDead):
        bench.manager.quarantine(reservation, reservation.pages[1:2], "peer stopped")


# --- leases ---------------------------------------------------------------------------------------------------------


def test_leased_pages_stay_readable_after_the_request_and_go_with_the_lease() -> None:
    bench = Bench(6)
    bench.cache("a")
    reservation = bench.reserve("abc", 5)
    bench.commit(reservation, 2)
    tail = bench.seal_tail(reservation, 3)
    leased = LocalPages.join([reservation.sequence[:3], tail])
    generations = bench.manager.generations(leased)
    bench.manager.hand_over(reservation, LEASE)
    bench.manager.end(reservation)
    assert bench.manager.census() == {
        "free": 2, "reserved": 0, "cached": 3, "private": 1, "quarantined": 0, "total": 6
    }  # fmt: skip
    with pytest.raises(CapacityError):
        bench.reserve("x", 3)
    assert np.array_equal(bench.manager.generations(leased), generations)
    assert bench.manager.drop_lease(LEASE)
    assert not bench.manager.drop_lease(LEASE)
    assert bench.manager.table.generations(tail)[0] == generations[3] + np.uint64(1)
    assert np.array_equal(bench.manager.generations(leased[:3]), generations[:3])  # still cached, as they were
    assert len(bench.reserve("x", 6).pages) == 6
    bench.manager.check()


def test_a_lease_keeps_pages_once() -> None:
    bench = Bench()
    reservation = bench.reserve("ab")
    bench.manager.hand_over(reservation, LEASE)
    with pytest.raises(DuplicateRequest):
        bench.manager.hand_over(reservation, LEASE)
    bench.manager.end(reservation)
    with pytest.raises(ReservationDead):
        bench.manager.hand_over(reservation, LeaseId("other"))
    assert list(bench.manager.leased) == [LEASE]


def test_what_is_lent_is_the_longest_prefix_and_stays_until_the_lease_ends() -> None:
    bench = Bench(5)
    bench.cache("abc")
    bench.cache("abx")
    lent = bench.manager.lend(chain_of("abcd"), LEASE)
    assert len(lent) == 3
    assert bench.manager.lend(chain_of("y"), LeaseId("other")) == LocalPages.none()
    with pytest.raises(DuplicateRequest):
        bench.manager.lend(chain_of("abx"), LEASE)
    assert list(bench.manager.leased) == [LEASE]
    generations = bench.manager.generations(lent)
    with pytest.raises(CapacityError):
        bench.reserve("q", 3)
    bench.manager.end(bench.reserve("q", 2))  # what isn't lent goes
    assert np.array_equal(bench.manager.generations(lent), generations)
    assert bench.manager.drop_lease(LEASE)
    assert len(bench.reserve("q", 5).pages) == 5
    bench.manager.check()


# --- generations ----------------------------------------------------------------------------------------------------


def test_an_evicted_page_is_void_before_its_new_holder_hears_of_it() -> None:
    bench = Bench(3)
    bench.cache("abc")
    every = LocalPages.checked(np.arange(1, 4), 4)
    before = bench.manager.generations(every)
    bench.reserve("xy", 2)
    moved = bench.manager.table.generations(every) != before
    assert moved.sum() == 2
    assert np.array_equal(bench.manager.table.sealed(every), ~moved)


# --- growth ---------------------------------------------------------------------------------------------------------


def work_of_one_request(prompts: int) -> tuple[int, int, int]:
    """Tree nodes, hashes and extents that a request of 32 pages touches in a pool full of `prompts` others."""
    bench = Bench(prompts * 24)
    for i in range(prompts):
        reservation = bench.manager.reserve(long_chain(str(i), 24), 24, max_hit_pages=24)
        bench.commit(reservation, 24)
        bench.manager.end(reservation)
    tree, allocator = bench.manager.tree.work, bench.manager.allocator.work
    before = tree.nodes, tree.probes, allocator.extents
    reservation = bench.manager.reserve(long_chain("0", 24), 40, max_hit_pages=16)
    bench.commit(reservation, 8)
    bench.manager.end(reservation)
    return tree.nodes - before[0], tree.probes - before[1], allocator.extents - before[2]


def test_the_work_of_a_request_does_not_grow_with_the_pool() -> None:
    small, large = work_of_one_request(4), work_of_one_request(40)
    assert small == large
    assert sum(large) < 60
