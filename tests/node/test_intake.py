"""Arrivals: reads that hang, fail, get lost or bring the wrong bytes, and what becomes of the pages they were for."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pdkv.errors import DeadlineExceeded, DigestMismatch, IntegrityError, PeerLost, StalePages, TransferUnsettled
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.page_hash import chain
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node import faults, intake
from pdkv.node.decode import DecodeSettings
from pdkv.node.flow import Worker
from pdkv.node.messages import Namespace, Sampling
from pdkv.node.prompt import plan_prompt
from pdkv.transfer.backends.loopback import Fault, FaultKind
from pdkv.transfer.orders import ReadStatus, TransferSettings
from tests.kvcache.pools import pages_of, random_pool, tiny_format
from tests.node.scene import (
    alone,
    answers,
    gated,
    held,
    recovered,
    request,
    rested,
    run,
    turns,
    until,
)
from tests.node.toy import Pair, make_pair

NORMAL = Fault(FaultKind.LATE)
"""Ends well at the first poll."""
HANG = Fault(FaultKind.HANG)
IMPATIENT = DecodeSettings(prefill_addresses=("p0",), read_deadline_s=0.1)

# A prompt of 300 tokens is read in three orders (2 pages, 2 pages, the tail), each of data and then of table rows.
READS = range(6)


async def scripted(pair: Pair, *script: Fault) -> None:
    """How the next reads from the prefill node end; the scratch read of a new peer is over by then."""
    await pair.decode.connect("p0")
    pair.net.script(pair.prefill.parts.name, *script)


def unread(pair: Pair) -> int:
    """Scripted ends that no read has had yet."""
    return len(pair.net._scripts[str(pair.prefill.parts.name)])


def settle(pair: Pair) -> None:
    """Later reads end well, and those that hang end now."""
    pair.net._scripts.clear()
    pair.net.settle(pair.prefill.parts.name)


def quarantined(pair: Pair) -> int:
    pair.decode.parts.manager.check()
    return pair.decode.parts.manager.census()["quarantined"]


async def outcome(asking: asyncio.Task[Any]) -> BaseException | None:
    """Its error, once it has ended and prefill knows."""
    await asyncio.wait([asking])
    return None if asking.cancelled() else asking.exception()


@pytest.mark.parametrize("before", READS)
def test_pages_under_a_read_without_an_end_are_held_back_until_it_has_one(before: int) -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[NORMAL] * before, *[HANG] * 9)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await until(lambda: unread(pair) < 9)
        asking.cancel()
        assert await outcome(asking) is None
        first = quarantined(pair)
        assert first > 0
        assert held(pair.decode) == first
        assert list(pair.decode.status().quarantine.values()) == [f"{first} pages: the request ended during the read"]
        await until(lambda: pair.decode.status().unsettled)
        ((peer, words),) = pair.decode.status().unsettled.items()
        assert peer == str(pair.prefill.parts.name)
        assert f"of {first} pages" in words
        # Others go on meanwhile, with the same prompt and with pages of their own, and late bytes don't hurt them.
        pair.net._scripts.clear()
        asked = replace(request(300, name="r1"), sampling=Sampling(max_tokens=12))
        gate = gated(pair.decode.parts.engine, "forward", at=4)
        other = asyncio.create_task(answers(pair.decode.generate(asked)))
        await gate.reached()
        assert quarantined(pair) == first
        settle(pair)
        await until(lambda: quarantined(pair) == 0)
        await until(lambda: not pair.decode.status().unsettled)
        gate.open()
        assert tuple((await other)[0]) == alone(pair, asked)
        await recovered(pair)

    run(scenario, make_pair())


def test_a_deadline_during_a_read_is_told_as_one() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[HANG] * 9)
        with pytest.raises(DeadlineExceeded, match="the request"):
            await answers(pair.decode.generate(request(300, remaining_s=1.0)))
        assert quarantined(pair) > 0
        settle(pair)
        await recovered(pair)

    run(scenario, make_pair())


def test_a_read_past_its_own_deadline_ends_the_request_by_name() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[HANG] * 9)
        with pytest.raises(TransferUnsettled, match="did not end"):
            await answers(pair.decode.generate(request(300)))
        count = quarantined(pair)
        await turns()
        assert quarantined(pair) == count > 0
        settle(pair)
        await recovered(pair)

    run(scenario, make_pair(settings=IMPATIENT))


@pytest.mark.parametrize("before", READS)
def test_a_read_that_fails_for_certain_frees_its_pages_at_once(before: int) -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[NORMAL] * before, Fault(FaultKind.FAIL))
        with pytest.raises(PeerLost, match="scripted failure"):
            await answers(pair.decode.generate(request(300)))
        settle(pair)
        await recovered(pair)

    run(scenario, make_pair())


def test_a_read_lost_on_one_of_several_lanes_is_over_only_with_the_agent() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, Fault(FaultKind.LOSE))
        with pytest.raises(TransferUnsettled, match="scripted loss"):
            await answers(pair.decode.generate(request(64)))
        settle(pair)
        await turns()
        assert quarantined(pair) == 1
        pair.decode.parts.transfer.close()
        await rested(pair)

    run(scenario, make_pair())


def test_a_peer_that_dies_under_a_read() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[HANG] * 9)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await until(lambda: unread(pair) < 9)
        pair.net.kill(pair.prefill.parts.name)
        assert isinstance(await outcome(asking), PeerLost)
        pair.net._scripts.clear()
        await rested(pair)
        pair.restart_prefill()
        await recovered(pair)

    run(scenario, make_pair())


def test_the_transfer_engine_ends_under_a_read() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, *[HANG] * 9)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await until(lambda: unread(pair) < 9)
        pair.decode.parts.transfer.close()
        assert isinstance(await outcome(asking), PeerLost)
        await rested(pair)

    run(scenario, make_pair())


def test_a_deadline_before_a_read_is_posted_is_told_as_one() -> None:
    """The read's own refusal must not take its place."""

    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        transfer = pair.decode.parts.transfer
        transfer.read = lambda order: Future()  # type: ignore[method-assign]
        transfer.cancel = lambda read: read.set_exception(PeerLost("never posted"))  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded, match="the request"):
            await answers(pair.decode.generate(request(64, remaining_s=0.3)))
        del transfer.read, transfer.cancel
        await recovered(pair)

    run(scenario, make_pair())


def test_an_unsettled_read_that_never_settles_keeps_its_pages() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.decode.connect("p0")
        transfer = pair.decode.parts.transfer
        original = transfer.read

        def unsettled(order: Any) -> Any:
            done = original(order).result()
            future = type(original(order))()
            future.set_result(replace(done, status=ReadStatus.UNSETTLED, settled=None))
            return future

        transfer.read = unsettled
        with pytest.raises(IntegrityError):
            await answers(pair.decode.generate(request(100)))
        await turns()
        assert quarantined(pair) > 0

    run(scenario, make_pair())


# --- the wrong bytes --------------------------------------------------------------------------------------------------


class FlipsOnce:
    """One bit of the first page it is shown, then nothing more."""

    def __init__(self) -> None:
        self.shown: list[LocalPages] = []

    def __call__(self, pool: SlotPool, pages: LocalPages) -> None:
        self.shown.append(pages)
        if len(self.shown) == 1:
            pool.group_bytes(int(pages.array[0]), Group.INDEX)[0][0] ^= 1


def test_a_page_that_arrives_wrong_once_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    flips = FlipsOnce()
    monkeypatch.setitem(faults.FAULTS, "flip-once", flips)

    async def scenario(pair: Pair) -> None:
        asked = request(300, fault="flip-once")
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert [len(pages) for pages in flips.shown].count(2) == 3
        ship = done.shipment
        assert (ship.pages_shipped, ship.digests_verified) == (5, 5)
        assert ship.bytes_backend == 7 * pair.decode.parts.pool.fmt.page_bytes
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("seen", [True, False])
def test_the_digest_thread_has_only_what_was_not_seen_as_it_landed(*, seen: bool) -> None:
    pool = random_pool(tiny_format(), 5)
    verifier = Verifier(pool)
    pages, names = pages_of(pool, 4, 2), chain(range(64 * 2))
    sealed = verifier.seal(ReservationId(7), 0, pages, names)
    arrival = Arrival(ReservationId(7), 0, pages, names, sealed.digests.copy())
    watched = verifier.watch(arrival, lambda step, *args: step(*args))
    assert watched is not None
    watched.begins(slice(0, 2))
    watched.landed(slice(0, 2 if seen else 1))
    thread = Worker("digests")
    parts: Any = SimpleNamespace(verifier=verifier, digests=thread)
    nobody: Any = SimpleNamespace(committed=0)
    if seen:
        thread.close()  # it takes nothing any more
    proved = intake.Intake(parts, nobody, nobody, nobody, nobody, 1.0)._proved(watched, arrival)
    assert len(asyncio.run(proved)) == 2
    thread.close()


def test_data_loss_names_the_page_on_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        # other pages on each side, so that no id is right by accident
        taken = pair.prefill.parts.manager.reserve(PageHashes(), 9, max_hit_pages=0)
        with pytest.raises(DigestMismatch) as caught:
            await answers(pair.decode.generate(request(128, fault="zero-page")))
        (bad,) = caught.value.bad
        assert (bad.index, bad.cache) == (1, "both")
        assert bad.source == source_pages(pair, 128)[1] != bad.page
        assert f"prompt page 1 in local page {bad.page}: both, read from remote page {bad.source}" in str(caught.value)
        assert caught.value.fields["peer"] == str(pair.prefill.parts.name)
        pair.prefill.parts.manager.end(taken)
        await recovered(pair)

    run(scenario, make_pair())


def test_many_bad_pages_are_counted_and_the_first_are_named() -> None:
    async def scenario(pair: Pair) -> None:
        first = request(64 * 20 + 1)
        await answers(pair.decode.generate(first))
        pair.forget_decode()
        # prefill has the pages now, and announces them at once
        with pytest.raises(DigestMismatch, match=r"20 of 20 pages .*; and 4 more") as caught:
            await answers(pair.decode.generate(replace(first, fault="drop-index")))
        assert [bad.index for bad in caught.value.bad] == list(range(20))
        await recovered(pair)

    run(scenario, make_pair())


def source_pages(pair: Pair, length: int) -> list[int]:
    """Ids of the prompt's pages in prefill's tree."""
    hashes = plan_prompt(request(length).tokens, Namespace(), pair.prefill.parts.contract).hashes
    found: list[int] = pair.prefill.parts.manager.tree.match(hashes).pages.tolist()
    return found


def test_a_source_page_that_was_rewritten_during_the_read_voids_it() -> None:
    async def scenario(pair: Pair) -> None:
        await scripted(pair, HANG)
        asking = asyncio.create_task(answers(pair.decode.generate(request(128))))
        await until(lambda: not unread(pair))
        parts = pair.prefill.parts
        second = LocalPages.checked(source_pages(pair, 128)[1:], parts.pool.num_pages)
        hashes = parts.manager.hashes(second)
        parts.pool.table.bump(second)
        parts.pool.table.seal(second, hashes)
        settle(pair)
        error = await outcome(asking)
        assert isinstance(error, StalePages)
        assert error.fields["pages"] == "[1]"
        await recovered(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("page_bytes", [3_452_160, 369_664, 300 << 20])
@pytest.mark.parametrize("pages", [1, 2, 9, 10, 128, 16_384])
def test_what_was_announced_together_is_proved_in_portions(pages: int, page_bytes: int) -> None:
    found = list(intake.portions(pages, page_bytes))
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
    assert found[-1].stop == pages
    sizes = [(part.stop - part.start) * page_bytes for part in found]
    assert max(sizes) <= max(intake.PORTION_BYTES, page_bytes)
    if pages * page_bytes <= intake.WHOLE_BYTES:
        assert len(found) == 1
    else:
        assert sizes[-1] <= max(intake.LAST_PORTION_BYTES, page_bytes)
    assert all(later <= earlier + page_bytes for earlier, later in pairwise(sizes))
    # few: the largest ones, and then halves
    assert len(found) <= pages * page_bytes / intake.PORTION_BYTES + 6


def test_of_what_is_seen_as_it_lands_portions_are_large() -> None:
    gigabyte = [slice(0, 311), slice(311, 622), slice(622, 700)]
    assert list(intake.portions(700, 3_452_160, seen=True)) == gigabyte
    assert list(intake.portions(3, 2 << 30, seen=True)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(intake.portions(16_384, 64, seen=True)) == [slice(0, 16_384)]


def test_small_pages_and_those_that_are_not_proved_are_one_portion() -> None:
    assert list(intake.portions(16_384, 64)) == [slice(0, 16_384)]
    assert list(intake.portions(16_384, 0)) == [slice(0, 16_384)]
    assert list(intake.portions(0, 64)) == []


@pytest.mark.parametrize("seen", [True, False])
def test_more_small_pages_than_an_order_may_have_are_several_portions(seen: bool) -> None:
    found = list(intake.portions(100_000, 64, seen=seen))
    assert (found[0].start, found[-1].stop) == (0, 100_000)
    assert all(before.stop == after.start for before, after in pairwise(found))
    assert max(part.stop - part.start for part in found) <= TransferSettings().landing_rows


def test_a_portion_that_arrives_wrong_is_read_again_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    flips = FlipsOnce()
    monkeypatch.setitem(faults.FAULTS, "flip-once", flips)

    async def scenario(pair: Pair) -> None:
        first = request(64 * 20 + 1)
        await answers(pair.decode.generate(first))
        pair.forget_decode()
        page_bytes = pair.decode.parts.pool.fmt.page_bytes
        monkeypatch.setattr(intake, "WHOLE_BYTES", 0)
        monkeypatch.setattr(intake, "LAST_PORTION_BYTES", page_bytes)
        monkeypatch.setattr(intake, "PORTION_BYTES", 8 * page_bytes)
        asked = replace(first, fault="flip-once")
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        # 20 pages that prefill has are announced at once: 8, 6, 3, 1, 1, 1, and the tail by itself
        shown = sorted((len(pages) for pages in flips.shown), reverse=True)
        assert shown == [8, 8, 6, 3, 1, 1, 1, 1]
        assert (done.shipment.pages_shipped, done.shipment.digests_verified) == (21, 21)
        assert done.shipment.bytes_backend == 29 * page_bytes
        await recovered(pair)

    run(scenario, make_pair())
