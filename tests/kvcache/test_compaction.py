"""Pages that move to lower numbers: both caches, the names that peers and tree have for them, and who may not move."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError
from pdkv.ids import LeaseId, PageHashes
from pdkv.kvcache.compaction import compact, movable, move
from pdkv.kvcache.events import PagesRemoved, PublicChain
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import PageState
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.chains import chain_of
from tests.kvcache.pools import PLACEMENTS, page_segments, pages_of, random_pool, snapshot, tiny_format
from tests.kvcache.test_events import Recorder

PAGES = 20


class Bench:
    def __init__(self, placement: str = "page_major", kpool: int = 1) -> None:
        self.pool = random_pool(tiny_format(kpool=kpool), PAGES + 1, placement=placement)  # type: ignore[arg-type]
        self.manager = CacheManager(self.pool)
        self.verifier = Verifier(self.pool)

    def arrived(self, letters: str, more: int = 0) -> Reservation:
        """A request with its prompt in the tree, and `more` private pages."""
        hashes = chain_of(letters)
        made = self.manager.reserve(hashes, len(hashes) + more, max_hit_pages=len(hashes))
        hit, full = len(made.hit), len(hashes)
        self.manager.commit(self.verifier.seal(made.id, hit, made.sequence[hit:full], hashes.part(hit, full)))
        self.manager.take_private(made, made.sequence[full:])
        return made

    def bytes_of(self, pages: list[int]) -> list[bytes]:
        return [b"".join(part.tobytes() for part in page_segments(self.pool, page)) for page in pages]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kpool", [1, 4])
def test_what_is_left_is_one_run_of_free_pages_and_everything_is_where_it_was_said_to_be(
    placement: str, kpool: int
) -> None:
    bench = Bench(placement, kpool)
    gap = bench.manager.reserve(PageHashes(), 4, max_hit_pages=0)
    cached = bench.arrived("abc")
    second = bench.manager.reserve(PageHashes(), 3, max_hit_pages=0)
    decoding = bench.arrived("abxy", more=3)
    bench.manager.end(cached)
    bench.manager.end(gap)
    bench.manager.end(second)
    tail = decoding.sequence[4:5]
    bench.manager.seal_private(decoding, bench.verifier.seal(decoding.id, 4, tail, PageHashes(b"t" * 32)))
    before = decoding.sequence.array.tolist()
    bytes_before = bench.bytes_of(before)
    digests = bench.manager.digests(decoding.sequence[:5])
    assert compact(bench.manager, [decoding]) > 0
    bench.manager.check()
    after = decoding.sequence.array.tolist()
    assert after != before
    assert bench.bytes_of(after) == bytes_before
    assert np.array_equal(bench.manager.digests(decoding.sequence[:5]), digests)
    assert np.array_equal(
        bench.verifier.seal(0, 0, decoding.sequence[:5], bench.manager.hashes(decoding.sequence[:5])).digests, digests
    )
    assert decoding.hit == decoding.sequence[:2]
    assert bench.manager.tree.match(chain_of("abxy")).pages.tolist() == after[:4]
    free = np.flatnonzero(bench.manager.ownership.in_state(PageState.FREE))
    assert free.tolist() == list(range(PAGES + 1 - free.size, PAGES + 1))
    assert bench.manager.allocator.extents == 1
    bench.manager.end(decoding)
    bench.manager.check()


def test_peers_find_out_before_a_byte_has_moved() -> None:
    bench = Bench()
    gap = bench.manager.reserve(PageHashes(), 2, max_hit_pages=0)
    done = bench.arrived("ab")
    source = done.sequence
    bench.manager.end(done)
    bench.manager.end(gap)
    announced = bench.manager.generations(source)
    copy = bench.pool.copy_pages

    def watching(*pages: object) -> None:
        assert not bench.manager.table.sealed(source).any()
        assert (bench.manager.table.generations(source) == announced + np.uint64(1)).all()
        copy(*pages)  # type: ignore[arg-type]

    bench.pool.copy_pages = watching  # type: ignore[method-assign]
    assert compact(bench.manager) == 2
    assert bench.manager.tree.match(chain_of("ab")).pages.tolist() == [1, 2]
    assert bench.manager.hashes(pages_of(bench.pool, 1, 2)) == chain_of("ab")


def test_who_is_not_named_as_resting_keeps_its_pages_and_those_it_shares() -> None:
    bench = Bench()
    gap = bench.manager.reserve(PageHashes(), 6, max_hit_pages=0)
    one, two = bench.arrived("abc", more=1), bench.arrived("abd", more=1)
    bench.manager.end(gap)
    sequence = two.sequence
    can = movable(bench.manager, [one])
    assert [bool(can[page]) for page in one.sequence] == [False, False, True, True]
    assert not can[two.sequence.array].any()
    compact(bench.manager, [one])
    bench.manager.check()
    assert two.sequence == sequence
    assert one.sequence[:2] == sequence[:2]
    compact(bench.manager, [one, two])
    bench.manager.check()
    assert one.sequence[:2] == two.sequence[:2] != sequence[:2]


@pytest.mark.parametrize(
    "why", ["reserved", "quarantined", "leased", "leased tail", "running", "free", "not free", "more"]
)
def test_what_must_not_move_is_refused_and_nothing_changes(why: str) -> None:
    bench = Bench()
    manager = bench.manager
    gap = manager.reserve(PageHashes(), 2, max_hit_pages=0)
    held = bench.arrived("ab", more=2)
    resting = [held]
    page = held.sequence[2:3]
    match why:
        case "reserved":
            other = manager.reserve(PageHashes(), 1, max_hit_pages=0)
            resting, page = [held, other], other.sequence
        case "quarantined":
            manager.quarantine(held, page, "no end seen")
        case "leased" | "leased tail":
            manager.seal_private(held, bench.verifier.seal(held.id, 2, page, PageHashes(b"t" * 32)))
            manager.hand_over(held, LeaseId("l"))
            page = held.sequence[:1] if why == "leased" else page
        case "running":
            resting = []
        case "free":
            page = pages_of(bench.pool, PAGES)
    manager.end(gap)
    target = held.sequence[3:4] if why == "not free" else pages_of(bench.pool, *((1, 2) if why == "more" else (1,)))
    before, census, generations = snapshot(bench.pool), manager.census(), manager.table.rows.copy()
    with pytest.raises(BoundsError):
        move(manager, page, target, resting)
    assert manager.census() == census
    assert np.array_equal(manager.table.rows, generations)
    assert all(np.array_equal(*both) for both in zip(before, snapshot(bench.pool), strict=True))
    compact(manager, resting)
    manager.check()


def test_a_request_that_has_ended_rests_no_more() -> None:
    bench = Bench()
    held = bench.arrived("ab")
    bench.manager.end(held)
    with pytest.raises(BoundsError, match="resting"):
        compact(bench.manager, [held])


@pytest.mark.parametrize(("limit", "moved"), [(0, 0), (1, 1), (None, 3), (-1, 0)])
def test_no_more_than_was_asked_for(limit: int | None, moved: int) -> None:
    bench = Bench()
    gap = bench.manager.reserve(PageHashes(), 5, max_hit_pages=0)
    bench.manager.end(bench.arrived("abc"))
    bench.manager.end(gap)
    assert compact(bench.manager, limit=limit) == moved
    bench.manager.check()
    assert compact(bench.manager) == 3 - moved
    assert compact(bench.manager) == 0


def test_subscribers_hear_nothing_and_are_told_the_right_ids_later() -> None:
    bench = Bench()
    recorder = bench.manager.observer = Recorder()
    gap = bench.manager.reserve(PageHashes(), 5, max_hit_pages=0)
    made = bench.manager.reserve(chain_of("abc"), 3, max_hit_pages=0)
    made.public = PublicChain(np.arange(192, dtype=np.uint32), page_tokens=64, cache_salt="", bigram=False)
    bench.manager.commit(bench.verifier.seal(made.id, 0, made.sequence, chain_of("abc")))
    ids = recorder.pages.standing()
    bench.manager.end(made)
    bench.manager.end(gap)
    heard = len(recorder.events)
    assert compact(bench.manager) == 3
    assert len(recorder.events) == heard
    bench.manager.reserve(PageHashes(), PAGES, max_hit_pages=0)
    last = recorder.events[-1]
    assert isinstance(last, PagesRemoved)
    assert np.sort(last.ids).tolist() == ids.tolist()
    assert recorder.pages.standing().size == 0
