"""Peers and reads under scripted faults, one step at a time."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import BoundsError, DeadlineExceeded, PdkvError, PeerLost
from pdkv.ids import LocalPages, RemotePages
from pdkv.transfer.backends.loopback import Fault, FaultKind
from pdkv.transfer.orders import Probe, ReadOrder, ReadStatus, TransferSettings
from pdkv.transfer.schedule import LARGEST_AT_ONCE
from pdkv.transfer.tasks import Ticket
from tests.transfer.pairs import FAR_S, CorePair
from tests.transfer.pools import TestPool

PAGE = TestPool(num_pages=2, fill=False).fmt.page_bytes
ONE_PAGE_A_READ = TransferSettings(read_max_bytes=PAGE)
HANG, FAIL, LOSE = Fault(FaultKind.HANG), Fault(FaultKind.FAIL), Fault(FaultKind.LOSE)


def untouched(pair: CorePair, pages: list[int]) -> bool:
    return not any(any(pair.sink_pool.page(p)) for p in pages)


# --- the good end ---------------------------------------------------------------------------------------------------


def test_a_read_brings_the_bytes_and_accounts_for_them() -> None:
    pair = CorePair()
    outcome = pair.done(pair.read([3, 4, 9], [7, 8, 1]))
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert outcome.bytes == outcome.backend_bytes == 3 * PAGE
    assert outcome.descriptors == 2
    assert outcome.settled is None
    assert [pair.sink_pool.page(p) for p in (3, 4, 9)] == [pair.source_pool.page(p) for p in (7, 8, 1)]
    assert not pair.sink.busy


def test_a_large_order_is_cut_and_few_of_its_reads_run_at_once() -> None:
    pair = CorePair(settings=ONE_PAGE_A_READ)
    pair.net.script(pair.source_name, *[Fault(FaultKind.LATE, polls=3)] * 9)
    most = 0
    future = pair.read(list(range(1, 9)), list(range(8, 0, -1)))
    while not future.done():
        pair.step()
        most = max(most, pair.sink.peers[pair.source_name].running)
    outcome = future.result()
    assert most == LARGEST_AT_ONCE
    assert outcome.status is ReadStatus.DONE
    assert outcome.bytes == outcome.backend_bytes == 8 * PAGE
    assert [pair.sink_pool.page(p) for p in range(1, 9)] == [pair.source_pool.page(p) for p in range(8, 0, -1)]


def test_a_page_that_was_reused_during_the_read_is_stale() -> None:
    """The generation moves after the data and before the row: that is why rows are read last."""
    pair = CorePair()
    pair.net.script(pair.source_name, Fault(FaultKind.LATE, polls=2), Fault(FaultKind.LATE, polls=2))
    future = pair.read([3, 4, 5], [7, 8, 9])
    while pair.sink_pool.page(4) != pair.source_pool.page(8):
        pair.step()
    pair.source_pool.table["generation"][8] += 1
    outcome = pair.done(future)
    assert outcome.status is ReadStatus.DONE
    assert outcome.stale.tolist() == [False, True, False]


# --- ends without the data ------------------------------------------------------------------------------------------


def test_a_failed_read_fails_the_order_and_posts_no_more() -> None:
    pair = CorePair(settings=ONE_PAGE_A_READ)
    pair.net.script(pair.source_name, FAIL)
    outcome = pair.done(pair.read([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    assert outcome.status is ReadStatus.FAILED
    assert outcome.reason == "scripted failure"
    assert outcome.backend_bytes < 5 * PAGE
    assert untouched(pair, [4, 5])
    assert not pair.sink.busy


def test_failed_is_said_only_when_the_other_reads_have_ended() -> None:
    pair = CorePair(settings=ONE_PAGE_A_READ)
    pair.net.script(pair.source_name, Fault(FaultKind.LATE, polls=20), FAIL)
    future = pair.read([1, 2, 3], [1, 2, 3])
    pair.step(8)
    assert not future.done()
    assert untouched(pair, [1])
    assert pair.done(future).status is ReadStatus.FAILED
    assert pair.sink_pool.page(1) == pair.source_pool.page(1)


def test_a_read_that_hangs_is_unsettled_at_its_deadline_and_settles_later() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    future = pair.read([1, 2], [3, 4])
    pair.step(5)
    assert not future.done()
    outcome = pair.done(future, later_s=FAR_S)
    assert outcome.status is ReadStatus.UNSETTLED
    assert "deadline" in outcome.reason
    assert outcome.settled is not None
    pair.step(5, later_s=FAR_S)
    assert not outcome.settled.done()
    assert untouched(pair, [1, 2])
    pair.net.settle(pair.source_name)
    pair.done(outcome.settled)
    # that is why the pages had to be held back: the bytes did land
    assert pair.sink_pool.page(1) == pair.source_pool.page(3)
    assert not pair.sink.busy


def test_a_deadline_moves_on_by_the_time_that_nobody_looked() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    future = pair.read([1, 2], [3, 4])
    pair.sink.postpone(2 * FAR_S)
    pair.step(5, later_s=FAR_S)
    assert not future.done()
    assert pair.done(future, later_s=4 * FAR_S).status is ReadStatus.UNSETTLED
    pair.net.settle(pair.source_name)


def test_a_hanging_row_read_keeps_its_landing_rows_until_it_settles() -> None:
    pair = CorePair(settings=TransferSettings(landing_rows=3))
    pair.net.script(pair.source_name, Fault(FaultKind.LATE), HANG)
    future = pair.read([1, 2], [3, 4])
    pair.step(10)
    outcome = pair.done(future, later_s=FAR_S)
    assert outcome.status is ReadStatus.UNSETTLED
    waiting = pair.read([4, 5], [6, 7])
    pair.step(20)
    assert not waiting.done()
    pair.net.settle(pair.source_name)
    assert outcome.settled is not None
    pair.done(outcome.settled)
    assert pair.done(waiting).status is ReadStatus.DONE


def test_cancel_answers_at_once() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    running, queued = pair.read([1], [1]), pair.read([2], [2])
    pair.sink.cancel(queued)
    assert queued.result().status is ReadStatus.FAILED, "nothing of it was posted"
    pair.step(2)
    pair.sink.cancel(running)
    outcome = running.result()
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.reason == "cancelled"
    pair.sink.cancel(running)
    pair.net.settle(pair.source_name)
    assert outcome.settled is not None
    pair.done(outcome.settled)


def test_a_lost_read_stays_unsettled_until_the_agent_is_gone() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, LOSE)
    outcome = pair.done(pair.read([1], [1]))
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    leaving = pair.remove(pair.source_name)
    pair.step(20)
    assert not outcome.settled.done()
    assert not leaving.done()
    pair.sink.close("closed")
    assert outcome.settled.done()
    assert leaving.done()


def test_a_peer_that_is_gone_ends_all_its_reads_and_gets_no_new_one() -> None:
    pair = CorePair(settings=ONE_PAGE_A_READ)
    pair.net.script(pair.source_name, HANG, HANG)
    futures = [pair.read([1, 2], [1, 2]), pair.read([3], [3])]
    pair.step(3)
    pair.net.kill(pair.source_name)
    for future in futures:
        outcome = pair.done(future)
        assert outcome.status is ReadStatus.FAILED
        assert "is gone" in outcome.reason
    later = pair.done(pair.read([4], [4]))
    assert later.status is ReadStatus.FAILED
    assert "is gone" in later.reason
    with pytest.raises(PeerLost):
        pair.sink.probe(pair.source_name, Ticket())
    pair.done(pair.remove(pair.source_name))


def test_a_stalled_peer_holds_back_no_other() -> None:
    pair = CorePair(settings=ONE_PAGE_A_READ)
    other = pair.other("prefill-2", seed=2)
    pair.net.script(pair.source_name, *[HANG] * 5)
    stalled = [pair.read([p], [p]) for p in range(1, 6)]
    pair.step(5)
    assert pair.done(pair.read_from(other, [9], [9])).status is ReadStatus.DONE
    assert not any(f.done() for f in stalled)


def test_orders_of_one_peer_take_turns() -> None:
    pair = CorePair(settings=TransferSettings(read_max_bytes=PAGE))
    long, short = pair.read(list(range(1, 11)), list(range(1, 11))), pair.read([11], [11])
    pair.done(short)
    assert not long.done()
    assert pair.done(long).status is ReadStatus.DONE


# --- probes and bounds ----------------------------------------------------------------------------------------------


def probe(pair: CorePair) -> Future[Probe]:
    ticket: Ticket[Probe] = Ticket()
    pair.sink.probe(pair.source_name, ticket)
    return ticket.future


def test_a_probe_ends_well_or_says_why() -> None:
    pair = CorePair(settings=TransferSettings(landing_rows=1))
    assert pair.done(probe(pair)).seconds >= 0
    pair.net.script(pair.source_name, HANG)
    silent = probe(pair)
    pair.step(2)
    with pytest.raises(DeadlineExceeded):
        pair.done(silent, later_s=FAR_S)
    with pytest.raises(BoundsError, match="landing rows"):
        probe(pair)
    pair.net.settle(pair.source_name)
    pair.step(3)
    pair.net.script(pair.source_name, FAIL)
    with pytest.raises(PdkvError, match="scripted failure"):
        pair.done(probe(pair))
    pair.net.kill(pair.source_name)
    with pytest.raises(PeerLost):
        pair.done(probe(pair))


def test_pages_outside_the_pools_are_refused() -> None:
    pair = CorePair()
    good = pair.order([1], [1])
    for bad in (
        replace(good, remote=RemotePages.checked([16], 99)),
        replace(good, local=LocalPages.checked([16], 99)),
    ):
        with pytest.raises(BoundsError, match="page of a read"):
            pair.sink.read(bad, Ticket())
    assert not pair.sink.busy


def test_an_order_that_no_landing_rows_could_hold_is_refused() -> None:
    pair = CorePair(settings=TransferSettings(landing_rows=2))
    with pytest.raises(BoundsError, match="pages of one read order"):
        pair.read([1, 2, 3], [1, 2, 3])


def test_columns_of_an_order_are_equally_long() -> None:
    good = CorePair().order([1, 2], [3, 4])
    with pytest.raises(BoundsError, match="read order"):
        replace(good, generations=np.zeros(1, np.uint64))
    with pytest.raises(BoundsError, match="read order"):
        ReadOrder(good.peer, LocalPages.none(), RemotePages.none(), np.zeros(0, np.uint64), good.hashes.part(0, 0), 1.0)


# --- the end --------------------------------------------------------------------------------------------------------


def test_close_answers_everything() -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG, HANG, HANG)
    cancelled, running, probing = pair.read([1], [1]), pair.read([2], [2]), probe(pair)
    pair.step(4)
    pair.sink.cancel(cancelled)
    pair.sink.close("closed")
    settled = cancelled.result().settled
    assert settled is not None
    assert settled.done()
    outcome = running.result()
    assert outcome.status is ReadStatus.FAILED, "the agent is gone: nothing can land"
    assert outcome.reason == "closed"
    with pytest.raises(PdkvError, match="closed"):
        probing.result()
    assert untouched(pair, [1, 2])


def test_an_agent_that_isnt_destroyed_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = CorePair()
    pair.net.script(pair.source_name, HANG)
    running = pair.read([1], [1])
    pair.step(2)
    removed: Ticket[None] = Ticket()
    pair.sink.remove_peer(pair.source_name, removed)

    def refuse() -> None:
        raise PdkvError("still held")

    monkeypatch.setattr(pair.reader._backend, "close", refuse)
    with pytest.raises(PdkvError, match="still held"):
        pair.sink.close("closed")
    outcome = running.result()
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    assert not outcome.settled.done()
    with pytest.raises(PdkvError, match="still held"):
        removed.future.result(0)
