"""A fence by rotation: what was held back by a peer that stands still comes back, and nobody else notices."""

import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import DeadlineExceeded, PdkvError, PeerLost, ProtocolError, TransferError
from pdkv.transfer.agents import ReadingAgent
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.loopback import Fault, FaultKind, LoopbackBackend
from pdkv.transfer.orders import Probe, ReadOutcome, ReadStatus, TransferSettings
from pdkv.transfer.tasks import Ticket
from tests.transfer.pairs import CorePair
from tests.transfer.pools import TestPool, offer_of, peer_name

HANG, LOSE = Fault(FaultKind.HANG), Fault(FaultKind.LOSE)
FENCE_S, EVERY_S = 10.0, 60.0
GIVEN_UP_S = 2.0
"""On the sink's clock, from now: a stalled read's deadline is over, that of no other."""
DUE_S = GIVEN_UP_S + FENCE_S + 1.0


class Stalled(CorePair):
    """A read of pages 1 and 2 that hangs was given up; its fence is not yet due."""

    def __init__(self, *, fence_after_s: float = FENCE_S, **settings: float) -> None:
        usual = TransferSettings(fence_after_s=fence_after_s, fence_every_s=EVERY_S, connect_s=1e4)
        super().__init__(settings=replace(usual, **settings))
        self.healthy = self.other("healthy", seed=2)
        self.outcome, self.settled = self.stall([1, 2])

    def stall(self, pages: list[int], later_s: float = GIVEN_UP_S) -> tuple[ReadOutcome, Future[None]]:
        self.net.script(self.source_name, HANG)
        future = self.post(self.order(pages, pages, deadline_s=later_s - 1.0))
        self.step()
        outcome = self.done(future, later_s=later_s)
        self.step(later_s=later_s)
        assert outcome.status is ReadStatus.UNSETTLED
        assert outcome.settled is not None
        return outcome, outcome.settled

    def agents(self) -> list[str]:
        """The beginnings of their names, without the one that serves."""
        serving, *reading = self.sink.status(0.0).agents
        assert serving == str(self.sink_name)
        return [name.partition(".")[0] for name in reading]

    def wake(self) -> None:
        """The stalled source goes on, after the destination was filled with a mark."""
        self.sink_pool.set_pages(0xAA)
        self.net.settle(self.source_name)
        self.step(5, later_s=DUE_S)

    def marked(self, page: int) -> bool:
        return self.sink_pool.page(page) == b"\xaa" * self.sink_pool.fmt.page_bytes


def test_pages_held_by_a_stalled_peer_come_back_and_stay_untouched() -> None:
    pair = Stalled()
    pair.step(5, later_s=GIVEN_UP_S + FENCE_S / 2)
    assert not pair.settled.done()
    pair.done(pair.settled, later_s=DUE_S)
    pair.wake()
    assert pair.marked(1)
    assert pair.marked(2)
    status = pair.sink.status(0.0)
    assert (status.rotations, status.unsettled, pair.agents()) == (1, (), ["read2"])


def test_without_a_fence_the_bytes_do_land() -> None:
    """The control of the one above: giving a read up, or releasing it, is no fence."""
    pair = Stalled(fence_after_s=1e9)
    pair.step(5, later_s=DUE_S)
    assert not pair.settled.done()
    pair.wake()
    assert pair.settled.done()
    assert pair.sink_pool.page(1) == pair.source_pool.page(1)


def test_the_old_agent_stays_until_healthy_reads_have_ended_on_it() -> None:
    pair = Stalled()
    pair.net.script(pair.healthy[0], HANG)
    running = pair.read_from(pair.healthy, [5, 6], [7, 8])
    pair.step()
    pair.step(10, later_s=DUE_S)
    assert pair.agents() == ["read2", "read1"]
    assert not pair.settled.done()
    meanwhile = pair.done(pair.read_from(pair.healthy, [9], [9]), later_s=DUE_S)
    assert meanwhile.status is ReadStatus.DONE, "new reads don't wait for the old agent"
    assert not running.done()
    pair.net.settle(pair.healthy[0])
    outcome = pair.done(running, later_s=DUE_S)
    assert outcome.status is ReadStatus.DONE, "its page-table rows came through the new agent"
    assert pair.sink_pool.page(5) == pair.healthy[1].page(7)
    pair.done(pair.settled, later_s=DUE_S)
    assert pair.agents() == ["read2"]


def test_a_read_of_many_parts_goes_on_through_the_new_agent() -> None:
    page = TestPool(num_pages=2, fill=False).fmt.page_bytes
    pair = Stalled(read_max_bytes=page)
    pair.net.script(pair.healthy[0], *[Fault(FaultKind.LATE, polls=3)] * 8)
    running = pair.read_from(pair.healthy, list(range(3, 11)), list(range(3, 11)))
    pair.step(6)
    pair.done(pair.settled, later_s=DUE_S)
    assert not running.done()
    assert pair.done(running, later_s=DUE_S).status is ReadStatus.DONE
    assert [pair.sink_pool.page(p) for p in range(3, 11)] == [pair.healthy[1].page(p) for p in range(3, 11)]


def test_the_peer_that_stalled_is_lost_and_can_be_added_again() -> None:
    pair = Stalled()
    queued = pair.post(pair.order([3], [3], deadline_s=900.0))
    pair.net.script(pair.source_name, HANG)
    pair.step()
    pair.done(pair.settled, later_s=DUE_S)
    outcome = pair.done(queued, later_s=DUE_S)
    assert outcome.status is ReadStatus.FAILED, "its agent is gone: nothing can land"
    assert "unsettled for 10 s" in outcome.reason
    assert "unsettled for 10 s" in pair.read([4], [4]).result().reason
    with pytest.raises(PeerLost, match="unsettled for 10 s"):
        pair.sink.probe(pair.source_name, Ticket())
    pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)), later_s=DUE_S)
    assert pair.done(pair.read([4], [5]), later_s=DUE_S).status is ReadStatus.DONE
    assert pair.sink_pool.page(4) == pair.source_pool.page(5)


def test_a_peer_that_stalled_can_be_removed() -> None:
    pair = Stalled()
    leaving = pair.remove(pair.source_name)
    pair.step(5, later_s=GIVEN_UP_S)
    assert not leaving.done()
    pair.done(leaving, later_s=DUE_S)
    assert pair.settled.done()


def test_a_read_that_was_lost_settles_too() -> None:
    pair = Stalled(fence_after_s=1e9)
    pair.sink._settings = replace(pair.settings, fence_after_s=FENCE_S)
    pair.net.script(pair.healthy[0], LOSE)
    lost = pair.done(pair.read_from(pair.healthy, [5], [5]))
    assert lost.status is ReadStatus.UNSETTLED
    assert lost.settled is not None
    pair.step()
    pair.done(lost.settled, later_s=FENCE_S + 1.0)
    assert pair.settled.done()


def test_fences_keep_their_distance() -> None:
    pair = Stalled()
    pair.done(pair.settled, later_s=DUE_S)
    pair.done(pair.add(pair.source_name, offer_of(pair.source.metadata, pair.source_pool)), later_s=DUE_S)
    _, second = pair.stall([3], DUE_S + 1.0)
    pair.step(20, later_s=DUE_S + EVERY_S - 1.0)
    assert not second.done()
    pair.done(second, later_s=DUE_S + EVERY_S + 1.0)
    assert pair.sink.status(0.0).rotations == 2


def test_peers_come_to_the_new_agent_one_a_step() -> None:
    """Each takes some milliseconds; reads that run must not wait for all of them together."""
    pair = Stalled()
    others = [pair.healthy, *(pair.other(f"healthy-{i}", seed=i) for i in (3, 4))]
    pair.done(pair.settled, later_s=DUE_S)
    agent = pair.reader
    reads = [pair.read_from(other, [p], [p]) for p, other in enumerate(others, start=5)]
    known = []
    while not all(r.done() for r in reads):
        pair.step(later_s=DUE_S)
        known.append(sum(agent.knows(pair.sink.peers[name].lines[0]) for name, _ in others))
    assert set(np.diff([0, *known]).tolist()) == {0, 1}
    assert known[-1] == 3
    assert {r.result().status for r in reads} == {ReadStatus.DONE}


def test_who_reads_from_here_is_not_cut_off() -> None:
    """The agent that serves outlives every fence."""
    pair = Stalled()
    other_pool = TestPool(fill=False)
    other_name = peer_name("third")
    third = pair.core(other_name, other_pool)
    added: Ticket[None] = Ticket()
    third.add_peer(pair.sink_name, offer_of(pair.sink.metadata, pair.sink_pool), added)
    third.step(0.0)
    third.step(0.0)
    assert added.future.done()
    pair.done(pair.settled, later_s=DUE_S)
    probed: Ticket[Probe] = Ticket()
    third.probe(pair.sink_name, probed)
    third.step(0.0)
    third.step(0.0)
    assert probed.future.result().seconds >= 0


# --- what is waited for ---------------------------------------------------------------------------------------------


def test_a_probe_that_hangs_is_fenced_off_only_for_somebody_who_waits() -> None:
    pair = Stalled(fence_after_s=1e9)
    pair.net.settle(pair.source_name)
    pair.done(pair.settled)
    pair.sink._settings = replace(pair.settings, fence_after_s=FENCE_S)
    pair.net.script(pair.source_name, HANG)
    silent: Ticket[Probe] = Ticket()
    pair.sink.probe(pair.source_name, silent)
    pair.step()
    pair.step(5, later_s=500.0)
    assert silent.future.done()
    pair.step(5, later_s=600.0)
    assert pair.sink.status(0.0).rotations == 0
    pair.done(pair.remove(pair.source_name), later_s=600.0)
    assert pair.sink.status(0.0).rotations == 1


@pytest.mark.parametrize(("fault", "error"), [(HANG, DeadlineExceeded), (LOSE, PeerLost)])
def test_probes_without_an_end_are_fenced_off_before_they_have_all_landing_rows(
    fault: Fault, error: type[PdkvError]
) -> None:
    pair = CorePair(settings=TransferSettings(landing_rows=4, fence_every_s=0.0))
    offer = offer_of(pair.source.metadata, pair.source_pool)
    for _ in range(9):
        pair.net.script(pair.source_name, fault)
        ticket: Ticket[Probe] = Ticket()
        pair.sink.probe(pair.source_name, ticket)
        pair.step()
        pair.step(5, later_s=500.0)
        assert isinstance(ticket.future.exception(), error)
        pair.done(pair.add(pair.source_name, offer))
    assert 3 <= pair.sink.status(0.0).rotations <= 5
    assert pair.done(pair.read([1, 2], [1, 2])).status is ReadStatus.DONE


def test_status_says_what_is_held_back_and_since_when() -> None:
    pair = Stalled()
    pair.stall([3, 4, 5], GIVEN_UP_S + 3.0)
    (row,) = pair.sink.status(time.monotonic() + GIVEN_UP_S + 7.0).unsettled
    assert (row.peer, row.reads, row.pages) == (pair.source_name, 2, 5)
    assert 7.0 <= row.oldest_s < 12.0


# --- a fence that fails ---------------------------------------------------------------------------------------------


def refusing(pair: Stalled, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> LoopbackBackend:
        raise TransferError("no memory to register")

    monkeypatch.setattr(LoopbackBackend, "register", refuse)


def test_without_a_second_agent_everything_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Stalled()
    refusing(pair, monkeypatch)
    pair.step(5, later_s=DUE_S)
    assert not pair.settled.done()
    assert pair.sink.status(0.0).fence_error == "no memory to register"
    assert pair.agents() == ["read1"]
    assert pair.done(pair.read_from(pair.healthy, [5], [7]), later_s=DUE_S).status is ReadStatus.DONE
    monkeypatch.undo()
    pair.done(pair.settled, later_s=DUE_S + EVERY_S + 1.0)
    assert pair.sink.status(0.0).fence_error == ""


def test_an_agent_that_isnt_destroyed_settles_nothing_and_is_fenced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Stalled()

    def refuse(agent: ReadingAgent) -> None:
        raise TransferError(f"{agent.name} is still held")

    monkeypatch.setattr(ReadingAgent, "close", refuse)
    for late in (0.0, EVERY_S, 3 * EVERY_S):
        pair.step(5, later_s=DUE_S + late)
    assert pair.agents() == ["read2"], "it is out of use all the same"
    assert not pair.settled.done()
    assert "is still held" in pair.sink.status(0.0).fence_error
    assert pair.done(pair.read_from(pair.healthy, [5], [7]), later_s=DUE_S).status is ReadStatus.DONE
    monkeypatch.undo()
    with pytest.raises(TransferError, match="is still held"):
        pair.sink.close("closed")
    assert not pair.settled.done()


def test_a_peer_that_the_new_agent_doesnt_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Stalled()
    pair.done(pair.settled, later_s=DUE_S)

    def refuse(backend: LoopbackBackend, peer: AgentName, metadata: bytes) -> None:
        raise ProtocolError(f"{peer} is unknown")

    monkeypatch.setattr(LoopbackBackend, "add_peer", refuse)
    outcome = pair.done(pair.read_from(pair.healthy, [5], [7]), later_s=DUE_S)
    assert outcome.status is ReadStatus.FAILED
    assert "is unknown" in outcome.reason


def test_nothing_is_fenced_without_need() -> None:
    pair = CorePair(settings=TransferSettings(fence_after_s=0.0, fence_every_s=0.0))
    assert pair.done(pair.read([1], [1])).status is ReadStatus.DONE
    pair.step(20, later_s=1e6)
    assert pair.sink.status(0.0).rotations == 0
