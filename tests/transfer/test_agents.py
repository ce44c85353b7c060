"""What is bound to one agent: peers, running reads, and reads whose end nobody saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pdkv.errors import BoundsError
from pdkv.geometry.page_layout import PlacementKind
from pdkv.transfer.agents import ReadingAgent, Run, serving
from pdkv.transfer.backends.base import AgentName, End, EndState, Lane
from pdkv.transfer.backends.loopback import Fault, FaultKind, LoopbackNet
from pdkv.transfer.descriptors import plan
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Peer, pack
from pdkv.transfer.orders import ReadOutcome
from pdkv.transfer.schedule import Mark
from pdkv.transfer.tasks import SCRATCH, OrderTask, ProbeTask, Ticket
from tests.transfer.pools import Announced, TestPool, offer_of, peer_name

OWN = AgentName("reader")


class Rig:
    """One agent that reads, and a peer."""

    def __init__(self) -> None:
        self.net = LoopbackNet()
        self.source, self.pool = TestPool(seed=1), TestPool(fill=False)
        name = peer_name("source")
        backend, _ = serving(partial(self.net.backend, AgentName(str(name))), self.source.map())
        offer = offer_of(pack([backend.metadata()]), self.source)
        self.peer = Peer.offered(name, offer, plan(self.pool.map(), self.source.map()), 1)
        (self.line,) = self.peer.lines
        look_bytes = 2 * self.peer.plan.page_bytes
        self.agent = ReadingAgent(OWN, self.net.backend(OWN), self.pool.map(), LandingRows(4), look_bytes)

    def post(self, *faults: Fault) -> ProbeTask:
        self.net.script(self.peer.name, *faults)
        task = ProbeTask(self.peer, SCRATCH, Ticket(), 1.0)
        self.agent.link(self.peer, self.line)
        self.agent.post(task, self.line, SCRATCH, Mark(0.0, 0))
        return task

    def read(self, witness: Watching, *faults: Fault) -> OrderTask:
        """Pages 1 to 5 into 6 to 10, as one read."""
        self.net.script(self.peer.name, *faults)
        pages = list(range(1, 6))
        order = Announced.of(self.peer.name, self.source).order(pages, [5 + page for page in pages], 16)
        ticket: Ticket[ReadOutcome] = Ticket()
        task = OrderTask(replace(order, witness=witness), self.peer, ticket, LandingRows(8))
        self.agent.link(self.peer, self.line)
        self.agent.post(task, self.line, task.next(1 << 30), Mark(0.0, 0))
        return task

    def collected(self) -> list[EndState]:
        return [end.state for _, end in self.agent.collect(0.0)]


def test_a_read_is_outstanding_until_its_end_is_proven() -> None:
    rig = Rig()
    good, lost, hanging = rig.post(), rig.post(Fault(FaultKind.LOSE)), rig.post(Fault(FaultKind.HANG))
    assert rig.peer.running == 3
    assert sorted(rig.collected()) == [EndState.DONE, EndState.LOST]
    assert [task.outstanding for task in (good, lost, hanging)] == [0, 1, 1]
    assert rig.peer.running == 1, "a lost one takes nobody's turn"
    left: list[Run] = rig.agent.close()
    assert {id(run.task) for run in left} == {id(lost), id(hanging)}
    assert [task.outstanding for task in (good, lost, hanging)] == [0, 0, 0]
    assert rig.peer.running == 0


class Watching:
    """Notes what it is told, and that the bytes of what landed are there."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: list[tuple[str, int, int]] = []

    def begins(self, part: slice) -> None:
        self.told.append(("begins", part.start, part.stop))

    def landed(self, part: slice) -> None:
        self.told.append(("landed", part.start, part.stop))
        for place in range(part.start, part.stop):
            assert self.rig.pool.page(1 + place) == self.rig.source.page(6 + place)
        for place in range(part.stop, 5):
            assert self.rig.pool.page(1 + place) != self.rig.source.page(6 + place), "the next ones are not read yet"


@pytest.fixture
def watching() -> Watching:
    """Two pages at once."""
    rig = Rig()
    rig.line.lane = Lane("cma", copied=True)
    return Watching(rig)


BEGINS = ("begins", 0, 5)


def test_what_is_copied_is_looked_at_piece_by_piece_before_the_next_is_read(watching: Watching) -> None:
    rig = watching.rig
    task = rig.read(watching)
    assert watching.told == [BEGINS, ("landed", 0, 2), ("landed", 2, 4), ("landed", 4, 5)]
    ((run, end),) = rig.agent.collect(0.0)
    assert (run.task, end.state, end.bytes) == (task, EndState.DONE, 5 * rig.peer.plan.page_bytes)
    assert end.descriptors == 3
    assert (task.outstanding, rig.peer.running) == (0, 0)


def test_over_another_lane_it_is_one_read_that_nobody_looks_at(watching: Watching) -> None:
    watching.rig.line.lane = Lane("tcp")
    watching.rig.read(watching)
    assert watching.rig.collected() == [EndState.DONE]
    assert watching.told == [BEGINS]


@pytest.mark.parametrize(("kind", "state"), [(FaultKind.FAIL, EndState.FAILED), (FaultKind.LOSE, EndState.LOST)])
def test_nothing_is_read_after_a_piece_that_failed(watching: Watching, kind: FaultKind, state: EndState) -> None:
    rig = watching.rig
    task = rig.read(watching, Fault(FaultKind.LATE), Fault(kind), Fault(FaultKind.FAIL))
    assert watching.told == [BEGINS, ("landed", 0, 2)]
    assert rig.collected() == [state]
    assert task.outstanding == (state is EndState.LOST)
    assert rig.net.next_fault(str(rig.peer.name)) == Fault(FaultKind.FAIL), "scripted for the piece after it"


def test_a_piece_that_takes_longer_is_not_looked_at_and_waited_for(watching: Watching) -> None:
    rig = watching.rig
    rig.read(watching, Fault(FaultKind.HANG))
    assert watching.told == [BEGINS]
    assert rig.collected() == []
    rig.net.settle(rig.peer.name)
    assert rig.collected() == [EndState.DONE]
    for page in range(1, 6):
        assert rig.pool.page(page) == rig.source.page(5 + page)


def test_a_piece_that_fails_while_another_may_still_land_has_no_proven_end(watching: Watching) -> None:
    rig = watching.rig
    task = rig.read(watching, Fault(FaultKind.HANG), Fault(FaultKind.FAIL))
    assert rig.collected() == []
    assert task.outstanding == 1
    rig.net.settle(rig.peer.name)
    assert rig.collected() == [EndState.FAILED]
    assert task.outstanding == 0


@pytest.mark.parametrize(("kind", "state"), [(FaultKind.FAIL, EndState.FAILED), (FaultKind.LOSE, EndState.LOST)])
def test_that_the_peer_is_gone_is_told_whichever_piece_said_so(
    watching: Watching, kind: FaultKind, state: EndState
) -> None:
    rig = watching.rig
    rig.read(watching, Fault(FaultKind.HANG), Fault(kind))
    assert rig.collected() == []
    rig.net.kill(rig.peer.name)
    ((_, end),) = rig.agent.collect(0.0)
    assert (end.state, end.disconnected) == (state, True)


def test_the_lane_is_asked_for_once_and_after_the_first_good_end() -> None:
    rig = Rig()
    assert rig.agent.first_lane(rig.line) is None
    rig.post()
    assert rig.collected() == [EndState.DONE]
    lane = rig.agent.first_lane(rig.line)
    assert lane is not None
    assert lane.name == "loopback"
    assert rig.agent.first_lane(rig.line) is None


def test_a_peer_is_linked_once_and_can_be_linked_again() -> None:
    rig = Rig()
    rig.post()
    rig.post()
    assert rig.collected() == [EndState.DONE, EndState.DONE]
    rig.agent.unlink(rig.line)
    rig.agent.unlink(rig.line)
    rig.post()
    assert rig.agent.collect(0.0)[0][1] == End(EndState.DONE, bytes=rig.peer.plan.pieces[0].length, descriptors=1)


def test_a_peer_that_cant_be_linked_leaves_nothing_behind() -> None:
    rig = Rig()
    short = replace(rig.peer.offer.pool, table_base=rig.peer.offer.pool.table_base + (1 << 32))
    peer = replace(rig.peer, offer=replace(rig.peer.offer, pool=short))
    with pytest.raises(BoundsError, match="registered memory"):
        rig.agent.link(peer, rig.line)
    rig.post()
    assert rig.collected() == [EndState.DONE]


def served(net: LoopbackNet, pool: TestPool) -> None:
    serving(partial(net.backend, OWN), replace(pool.map(), memory="VRAM"))


def read_into(net: LoopbackNet, pool: TestPool) -> None:
    ReadingAgent(OWN, net.backend(OWN), replace(pool.map(), memory="VRAM"), LandingRows(4), 1)


@pytest.mark.parametrize("make", [served, read_into])
def test_an_agent_whose_memory_cant_be_registered_is_destroyed(make: Callable[[LoopbackNet, TestPool], None]) -> None:
    net, pool = LoopbackNet(), TestPool(fill=False)
    for _ in range(2):
        with pytest.raises(BoundsError, match="loopback memory"):
            make(net, pool)
        assert not net.alive(OWN), "or its name would be taken"


@pytest.mark.parametrize(("kind", "regions"), [("page_major", 1), ("layer_major", None)])
def test_the_pool_is_registered_as_the_regions_that_it_has(kind: PlacementKind, regions: int | None) -> None:
    pool = TestPool(kind=kind, fill=False)
    _, registration = serving(partial(LoopbackNet().backend, OWN), pool.map())
    assert registration.regions == (regions or len(pool.map().regions))
    assert registration.bytes == sum(region.length for region in pool.map().regions)
    assert registration.seconds > 0
