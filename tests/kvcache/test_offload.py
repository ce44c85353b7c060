"""Pages in host memory and back: byte for byte into other pages, both caches, and only of who may be retracted."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError, CapacityError, DigestMismatch, ReservationDead
from pdkv.geometry.page_layout import Group
from pdkv.ids import LeaseId, PageHashes
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.offload import HostStore, freed_by_end, require_retractable
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.chains import chain_of
from tests.kvcache.pools import PLACEMENTS, page_segments, pages_of, random_pool, snapshot, tiny_format

FMT = tiny_format()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kpool", [1, 4])
@pytest.mark.parametrize("tokens", [1, 5, 63])
def test_pages_come_back_into_other_pages(placement: str, kpool: int, tokens: int) -> None:
    fmt = tiny_format(kpool=kpool, draft_layers=1)
    pool = random_pool(fmt, 9, placement=placement)  # type: ignore[arg-type]
    store = HostStore(pool, 3 * fmt.page_bytes)
    source, target = pages_of(pool, 7, 2, 5), pages_of(pool, 1, 8, 3)
    copy = store.save(source, 2 * fmt.page_tokens + tokens)
    want = [[part.copy() for part in page_segments(pool, page)] for page in source]
    pool.zero(source)
    elsewhere = [[part.copy() for part in page_segments(pool, page)] for page in (4, 6)]
    store.load(copy, 0, target)
    for page, parts in zip(target, want, strict=True):
        for have, part in zip(page_segments(pool, page), parts, strict=True):
            assert np.array_equal(have, part)
    for page, parts in zip((4, 6), elsewhere, strict=True):
        assert all(np.array_equal(*both) for both in zip(page_segments(pool, page), parts, strict=True))


def test_nothing_behind_the_last_token_is_kept_in_either_cache() -> None:
    pool, other = random_pool(FMT, 4), random_pool(FMT, 4)
    store = HostStore(pool, FMT.page_bytes)
    copy = store.save(pages_of(pool, 3), 10)
    other.zero_tail(3, 10)
    assert np.array_equal(copy.digests, digest_pages(other, pages_of(other, 3)))
    assert not np.array_equal(copy.digests, digest_pages(other, pages_of(other, 2)))


def test_the_first_pages_may_be_left_out() -> None:
    pool = random_pool(FMT, 9)
    store = HostStore(pool, 9 * FMT.page_bytes)
    copy = store.save(pages_of(pool, 1, 2, 3), 192)
    store.load(copy, 1, pages_of(pool, 7, 6))
    assert np.array_equal(digest_pages(pool, pages_of(pool, 7, 6)), digest_pages(pool, pages_of(pool, 2, 3)))
    store.load(copy, 3, pages_of(pool))
    before = snapshot(pool)
    for first, pages in ((0, (4, 5)), (2, (4, 5)), (4, ()), (-1, (4, 5, 6, 7))):
        with pytest.raises(BoundsError):
            store.load(copy, first, pages_of(pool, *pages))
    assert all(np.array_equal(*both) for both in zip(before, snapshot(pool), strict=True))


@pytest.mark.parametrize(("cache", "group"), [("main", 0), ("index", 1)])
def test_a_byte_lost_in_host_memory_is_named(cache: str, group: int) -> None:
    pool = random_pool(FMT, 9)
    store = HostStore(pool, 9 * FMT.page_bytes)
    copy = store.save(pages_of(pool, 1, 2), 128)
    copy.rows[group][1, 77] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        store.load(copy, 0, pages_of(pool, 5, 6))
    assert [(bad.index, bad.page, bad.cache) for bad in caught.value.bad] == [(1, 6, cache)]


def test_bytes_are_bounded_and_come_back() -> None:
    pool = random_pool(FMT, 9)
    store = HostStore(pool, 3 * FMT.page_bytes + 1)
    first = store.save(pages_of(pool, 1, 2), 128)
    assert store.used_bytes == first.bytes == 2 * FMT.page_bytes
    with pytest.raises(CapacityError) as caught:
        store.save(pages_of(pool, 3, 4), 128)
    assert caught.value.fields["short_bytes"] == str(FMT.page_bytes - 1)
    second = store.save(pages_of(pool, 3), 1)
    store.drop(first)
    store.drop(first)
    assert store.used_bytes == FMT.page_bytes
    store.drop(second)
    assert store.used_bytes == 0


@pytest.mark.parametrize(("pages", "tokens"), [((1, 2), 64), ((1,), 65), ((), 0), ((1,), 0)])
def test_pages_are_those_of_the_tokens(pages: tuple[int, ...], tokens: int) -> None:
    pool = random_pool(FMT, 3)
    with pytest.raises(BoundsError):
        HostStore(pool, 1 << 30).save(pages_of(pool, *pages), tokens)


def test_a_copy_that_fails_holds_no_room() -> None:
    pool = random_pool(FMT, 3)
    store = HostStore(pool, 1 << 30)

    def broken(page: int, from_token: int) -> None:
        raise BoundsError("page", page, "none")

    pool.zero_tail = broken  # type: ignore[method-assign]
    with pytest.raises(BoundsError):
        store.save(pages_of(pool, 1), 3)
    assert store.used_bytes == 0


# --- who may be retracted -------------------------------------------------------------------------------------------


class Bench:
    def __init__(self) -> None:
        self.manager = CacheManager(SlotPool.create(FMT, 21))
        self.verifier = Verifier(self.manager.pool)

    def decoding(self, letters: str, more: int = 2) -> Reservation:
        """A request whose prompt has arrived."""
        hashes = chain_of(letters)
        made = self.manager.reserve(hashes, len(hashes) + more, max_hit_pages=len(hashes))
        hit = len(made.hit)
        new = made.sequence[hit : len(hashes)]
        self.manager.commit(self.verifier.seal(made.id, hit, new, hashes.part(hit, len(hashes))))
        self.manager.take_private(made, made.sequence[len(hashes) :])
        return made


def test_a_decoding_request_may_go_and_what_that_frees_is_known_before() -> None:
    bench = Bench()
    one, two = bench.decoding("abc"), bench.decoding("abd", 3)
    for each, expected in ((one, 1 + 2), (two, 1 + 3)):
        require_retractable(bench.manager, each)
        assert freed_by_end(bench.manager, each) == expected  # "ab" is locked by both
    manager = bench.manager
    before = manager.allocator.free_count + manager.tree.evictable
    manager.end(two)
    assert manager.allocator.free_count + manager.tree.evictable - before == 4
    assert freed_by_end(manager, one) == 3 + 2


def test_who_is_still_receiving_may_not() -> None:
    bench = Bench()
    arriving = bench.manager.reserve(chain_of("xy"), 3, max_hit_pages=0)
    with pytest.raises(BoundsError, match="committed pages"):
        require_retractable(bench.manager, arriving)
    verified = bench.verifier.seal(arriving.id, 0, arriving.sequence[:2], chain_of("xy"))
    bench.manager.commit(verified)
    with pytest.raises(BoundsError, match="reserved"):  # its tail may be under a read
        require_retractable(bench.manager, arriving)


def test_quarantined_or_handed_over_pages_stay() -> None:
    for spoil in ("quarantine", "lease"):
        bench = Bench()
        request = bench.decoding("ab")
        tail = request.sequence[2:3]
        if spoil == "quarantine":
            bench.manager.quarantine(request, tail, "no end seen")
        else:
            sealed = bench.verifier.seal(request.id, 2, tail, PageHashes(b"t" * 32))
            bench.manager.seal_private(request, sealed)
            bench.manager.hand_over(request, LeaseId("l"))
        with pytest.raises(BoundsError):
            require_retractable(bench.manager, request)


def test_who_has_ended_may_not() -> None:
    bench = Bench()
    request = bench.decoding("a")
    bench.manager.end(request)
    with pytest.raises(ReservationDead):
        require_retractable(bench.manager, request)


def test_groups_are_copied_together() -> None:
    pool = random_pool(FMT, 3)
    copy = HostStore(pool, 1 << 30).save(pages_of(pool, 1), 64)
    assert [part.shape for part in copy.rows] == [(1, FMT.main_bytes), (1, FMT.index_bytes)]
    for group, part in zip(Group, copy.rows, strict=True):
        assert np.array_equal(part[0], np.concatenate(pool.group_bytes(1, group)))
