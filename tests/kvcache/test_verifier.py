"""Bytes become trusted only if they are the announced ones; whatever is wrong is named."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from pdkv.errors import BadPage, BoundsError, ConfigError, DigestMismatch
from pdkv.geometry.page_layout import Group, PlacementKind
from pdkv.ids import PageHashes, ReservationId
from pdkv.kvcache import verifier as verifier_module
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.page_hash import chain
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Soon, VerifiedPages, Verifier, WatchedArrival
from tests.kvcache.pools import PLACEMENTS, page_segments, pages_of, random_pool, tiny_format

FMT = tiny_format(draft_layers=1)
HASHES = chain(range(64 * 4))
RESERVATION = ReservationId(7)
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def sealed_arrival(pool: SlotPool, *, first_index: int = 10) -> Arrival:
    """Pages 4, 2, 1, 3 of the pool as prompt pages 10 to 13, announced as they are now."""
    pages = pages_of(pool, 4, 2, 1, 3)
    sealed = Verifier(pool).seal(RESERVATION, first_index, pages, HASHES)
    return Arrival(RESERVATION, first_index, pages, HASHES, sealed.digests.copy())


def bad_pages(pool: SlotPool, arrival: Arrival) -> list[BadPage]:
    with pytest.raises(DigestMismatch) as caught:
        Verifier(pool).verify(arrival)
    for bad in caught.value.bad:
        assert str(bad) in str(caught.value)
        assert str(bad) in caught.value.fields["bad_pages"]
    return list(caught.value.bad)


@each_placement
def test_untouched_pages_are_verified(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    arrival = sealed_arrival(pool)
    verified = Verifier(pool).verify(arrival)
    assert (verified.reservation, verified.first_index, len(verified)) == (RESERVATION, 10, 4)
    assert (verified.pages, verified.hashes) == (arrival.pages, HASHES)
    assert np.array_equal(verified.digests, arrival.digests)


def test_pages_travel_between_placements() -> None:
    sender, receiver = random_pool(FMT, 5), random_pool(FMT, 5, placement="layer_major")
    Verifier(receiver).verify(sealed_arrival(sender))


@each_placement
def test_one_flipped_bit_is_named_with_its_page_and_cache(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    arrival = sealed_arrival(pool)
    pool.group_bytes(1, Group.INDEX)[-1][-1] ^= 0x80
    assert bad_pages(pool, arrival) == [BadPage(12, 1, "index")]
    pool.group_bytes(2, Group.MAIN)[0][0] ^= 1
    assert bad_pages(pool, arrival) == [BadPage(11, 2, "main"), BadPage(12, 1, "index")]


@each_placement
def test_zeroed_index_is_named_as_index(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    arrival = sealed_arrival(pool)
    for segment in pool.group_bytes(3, Group.INDEX):
        segment[:] = 0
    assert bad_pages(pool, arrival) == [BadPage(13, 3, "index")]


@each_placement
def test_a_zeroed_page_is_named_as_both(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    arrival = sealed_arrival(pool)
    pool.zero(pages_of(pool, 4))
    assert bad_pages(pool, arrival) == [BadPage(10, 4, "both")]


@each_placement
def test_swapped_pages_are_both_named(placement: PlacementKind) -> None:
    pool = random_pool(FMT, 5, placement=placement)
    arrival = sealed_arrival(pool)
    for a, b in zip(page_segments(pool, 2), page_segments(pool, 1), strict=True):
        a[:], b[:] = b.copy(), a.copy()
    assert bad_pages(pool, arrival) == [BadPage(11, 2, "both"), BadPage(12, 1, "both")]


def test_right_bytes_in_another_order_are_not_verified() -> None:
    pool = random_pool(FMT, 5)
    arrival = sealed_arrival(pool)
    reordered = dataclasses.replace(arrival, pages=pages_of(pool, 4, 1, 2, 3))
    assert [bad.index for bad in bad_pages(pool, reordered)] == [11, 12]


def test_a_long_list_of_bad_pages_is_whole_but_told_in_short() -> None:
    pool = random_pool(FMT, 40)
    pages = pages_of(pool, *range(1, 40))
    hashes = PageHashes(bytes(32) * 39)
    with pytest.raises(DigestMismatch, match=r"39 of 39 pages .* and 23 more") as caught:
        Verifier(pool).verify(Arrival(RESERVATION, 0, pages, hashes, np.zeros((39, 2), np.uint64)))
    assert [bad.index for bad in caught.value.bad] == list(range(39))


def at_once(step: Callable[..., object], *args: object) -> None:
    step(*args)


def watched(pool: SlotPool, soon: Soon = at_once) -> WatchedArrival:
    arrival = Verifier(pool).watch(sealed_arrival(pool), soon)
    assert arrival is not None
    return arrival


def test_pages_that_were_looked_at_as_they_landed_are_not_digested_again() -> None:
    pool = random_pool(FMT, 5)
    arrival = watched(pool)
    arrival.begins(slice(0, 4))
    arrival.landed(slice(0, 2))
    arrival.landed(slice(2, 4))
    # no read does this: it shows which bytes count
    pool.zero(arrival.pages)
    verified = arrival.verifier.verify(arrival)
    assert np.array_equal(verified.digests, arrival.digests)
    assert (verified.pages, verified.hashes, verified.first_index) == (arrival.pages, HASHES, 10)


def test_what_nobody_looked_at_is_digested_when_it_is_verified() -> None:
    pool = random_pool(FMT, 5)
    arrival = watched(pool)
    arrival.begins(slice(0, 4))
    arrival.landed(slice(0, 3))
    pool.group_bytes(3, Group.MAIN)[0][0] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        arrival.verifier.verify(arrival)
    assert list(caught.value.bad) == [BadPage(13, 3, "main")]


def test_what_was_seen_before_it_is_written_again_is_void() -> None:
    pool = random_pool(FMT, 5)
    arrival = watched(pool)
    arrival.landed(slice(0, 4))
    arrival.begins(slice(1, 3))
    pool.group_bytes(2, Group.INDEX)[0][7] ^= 4
    with pytest.raises(DigestMismatch) as caught:
        arrival.verifier.verify(arrival)
    assert list(caught.value.bad) == [BadPage(11, 2, "index")]


def test_who_looks_late_sees_what_may_be_written_again_and_that_is_void_too() -> None:
    pool, late = random_pool(FMT, 5), []
    arrival = watched(pool, lambda step, *args: late.append(partial(step, *args)))
    arrival.begins(slice(0, 4))
    arrival.landed(slice(0, 4))
    arrival.begins(slice(0, 2))
    for step in late:
        step()
    pool.group_bytes(4, Group.MAIN)[0][9] ^= 2
    pool.group_bytes(1, Group.MAIN)[0][9] ^= 2
    with pytest.raises(DigestMismatch) as caught:
        arrival.verifier.verify(arrival)
    assert list(caught.value.bad) == [BadPage(10, 4, "main")], "page 1 was seen before, and not written since"


def test_what_landed_wrong_is_named_also_if_it_is_right_by_now() -> None:
    pool = random_pool(FMT, 5)
    arrival = watched(pool)
    arrival.landed(slice(0, 3))
    pool.group_bytes(3, Group.MAIN)[0][0] ^= 1
    arrival.landed(slice(3, 4))
    pool.group_bytes(3, Group.MAIN)[0][0] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        arrival.verifier.verify(arrival)
    assert list(caught.value.bad) == [BadPage(13, 3, "main")]


def test_what_another_verifier_saw_counts_for_nothing() -> None:
    pool, other = random_pool(FMT, 5), random_pool(FMT, 5)
    arrival = watched(pool)
    arrival.landed(slice(0, 4))
    other.zero(arrival.pages)
    with pytest.raises(DigestMismatch):
        Verifier(other).verify(arrival)


def test_there_is_nothing_to_watch_where_single_pages_are_dear_or_nothing_is_checked() -> None:
    scattered, pool = random_pool(FMT, 5, placement="layer_major"), random_pool(FMT, 5)
    assert Verifier(scattered).watch(sealed_arrival(scattered), at_once) is None
    assert Verifier(pool, "none").watch(sealed_arrival(pool), at_once) is None


def test_only_a_verifier_makes_verified_pages() -> None:
    pool = random_pool(FMT, 5)
    arrival = sealed_arrival(pool)
    facts = (arrival.reservation, arrival.first_index, arrival.pages, arrival.hashes, arrival.digests)
    for forged in (None, object(), True):
        with pytest.raises(TypeError, match="Verifier"):
            VerifiedPages(*facts, proof=forged)
    verified = Verifier(pool).verify(arrival)
    with pytest.raises(ValueError, match="proof"):
        dataclasses.replace(verified, first_index=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verified.first_index = 0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        verified.digests[0, 0] = 1
    assert copy.copy(verified).pages == verified.pages


def test_sealing_wants_a_hash_a_page() -> None:
    pool = random_pool(FMT, 3)
    with pytest.raises(BoundsError, match="hashes"):
        Verifier(pool).seal(RESERVATION, 0, pages_of(pool, 1, 2), HASHES.part(0, 1))


def test_no_digest_checks_nothing_and_says_so() -> None:
    pool = random_pool(FMT, 5)
    verifier = Verifier(pool, "none")
    assert not verifier.checks_digests
    assert Verifier(pool).checks_digests
    arrival = dataclasses.replace(sealed_arrival(pool), digests=np.zeros((4, 2), np.uint64))
    assert verifier.verify(arrival).digests.tolist() == [[0, 0]] * 4
    with pytest.raises(ConfigError, match="digest algorithm"):
        Verifier(pool, "md5")


def test_what_a_nic_wrote_is_flushed_before_its_digest_and_only_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = random_pool(FMT, 5)
    arrival = sealed_arrival(pool)
    done: list[str] = []
    monkeypatch.setattr(verifier_module, "flush", lambda device: done.append(f"flush {device}"))
    digest = verifier_module.digest_pages
    monkeypatch.setattr(verifier_module, "digest_pages", lambda *args: (done.append("digest"), digest(*args))[1])
    Verifier(pool).verify(arrival)
    assert done == ["digest"]
    pool.memory.memory = "VRAM"
    done.clear()
    Verifier(pool).verify(arrival)
    assert done == [f"flush {pool.memory.device}", "digest"]
    # what the engine wrote has come over no NIC
    done.clear()
    sealed_arrival(pool)
    assert done == ["digest"]
