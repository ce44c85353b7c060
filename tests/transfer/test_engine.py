"""The contract of the transfer engine, on every backend: two engines in one process."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from pdkv.errors import BoundsError, ConfigError, LaneRefused, PeerLost, ProtocolError, TransferError
from pdkv.geometry.page_layout import PlacementKind
from pdkv.ids import LocalPages, PeerName, RemotePages
from pdkv.transfer import engine as engine_module
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.faulty import FaultPlan, faulty
from pdkv.transfer.backends.loopback import Fault, FaultKind, LoopbackNet
from pdkv.transfer.core import TransferCore
from pdkv.transfer.engine import ReadOrder, ReadOutcome, ReadStatus, TransferEngine, TransferSettings
from tests.transfer.pools import Announced, TestPool, peer_name

WAIT_S = 20.0
KINDS: tuple[PlacementKind, ...] = ("page_major", "layer_major")


@dataclass
class Node:
    name: PeerName
    pool: TestPool
    engine: TransferEngine

    @classmethod
    def start(cls, backend: str, pool: TestPool, settings: TransferSettings | None = None) -> "Node":
        name = peer_name("node")
        return cls(name, pool, TransferEngine(backend_factory(backend), name, pool.map(), settings=settings))

    @classmethod
    def start_on(cls, net: LoopbackNet, pool: TestPool, settings: TransferSettings) -> "Node":
        name = peer_name("node")
        return cls(name, pool, TransferEngine(net.backend, name, pool.map(), settings=settings))

    def add(self, other: "Node") -> None:
        self.engine.add_peer(
            other.name, other.engine.metadata, other.engine.metadata_checksum, other.pool.map()
        ).result(WAIT_S)

    def order(self, source: "Node", local: list[int], remote: list[int]) -> ReadOrder:
        return Announced.of(source.name, source.pool).order(local, remote, self.pool.num_pages)

    def read(self, source: "Node", local: list[int], remote: list[int]) -> ReadOutcome:
        return self.engine.read(self.order(source, local, remote)).result(WAIT_S)


@dataclass
class World:
    """One node of each placement that serves, and one of each that reads."""

    backend: str
    sources: dict[str, Node]
    sinks: dict[str, Node]

    @property
    def source(self) -> Node:
        return self.sources["page_major"]

    @property
    def sink(self) -> Node:
        return self.sinks["page_major"]


@pytest.fixture(scope="module", params=["loopback", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    small = TransferSettings(read_max_bytes=1 << 20)
    sources = {kind: Node.start(request.param, TestPool(kind=kind, seed=1)) for kind in KINDS}
    sinks = {kind: Node.start(request.param, TestPool(kind=kind, fill=False), small) for kind in KINDS}
    for sink, source in product(sinks.values(), sources.values()):
        sink.add(source)
    yield World(request.param, sources, sinks)
    for node in (*sinks.values(), *sources.values()):
        node.engine.close()


@pytest.mark.parametrize(("mine", "theirs"), list(product(KINDS, KINDS)))
def test_bytes_are_equal_whatever_the_placements(world: World, mine: str, theirs: str) -> None:
    sink, source = world.sinks[mine], world.sources[theirs]
    sink.pool.set_pages(0)
    local, remote = [1, 2, 3, 9, 12, 5], [5, 6, 7, 2, 1, 15]
    outcome = sink.read(source, local, remote)
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert outcome.bytes == outcome.backend_bytes == 6 * sink.pool.fmt.page_bytes
    assert 0 <= outcome.post_s <= outcome.elapsed_s < WAIT_S
    assert [sink.pool.page(p) for p in local] == [source.pool.page(p) for p in remote]
    assert not any(any(sink.pool.page(p)) for p in range(1, 16) if p not in local), "nothing else was written"


def test_descriptors_are_counted_after_merging(world: World) -> None:
    # 1 MiB a read: two pages of 369,664 B each
    assert world.sink.read(world.source, [1, 2, 3, 4], [5, 6, 7, 8]).descriptors == 2
    assert world.sink.read(world.source, [1, 2, 3, 4], [8, 7, 6, 5]).descriptors == 4


@pytest.mark.parametrize("field", ["generation", "hash"])
def test_pages_that_are_not_what_was_announced_are_stale(world: World, field: str) -> None:
    order = world.sink.order(world.source, [1, 2, 3], [4, 5, 6])
    row = world.source.pool.table[5:6]
    before = row.copy()
    if field == "generation":
        row["generation"] += np.uint64(1)
    else:
        row["hash"][0, 31] ^= 1
    assert world.sink.engine.read(order).result(WAIT_S).stale.tolist() == [False, True, False]
    row[:] = before
    assert not world.sink.engine.read(order).result(WAIT_S).stale.any()


def test_faults_on_purpose_need_no_backend_of_their_own(world: World) -> None:
    pool, name = TestPool(fill=False), peer_name("faulty")
    factory = faulty(backend_factory(world.backend), FaultPlan.parse("corrupt:nth=1,fail:nth=2,stale:nth=2"))
    node = Node(name, pool, TransferEngine(factory, name, pool.map()))
    node.add(world.source)
    assert node.engine.backend_name.startswith(f"faulty {world.backend}")
    assert node.read(world.source, [1], [1]).status is ReadStatus.DONE
    mine, theirs = (np.frombuffer(p.page(1), np.uint8) for p in (pool, world.source.pool))
    assert np.unpackbits(mine ^ theirs).sum() == 1
    assert node.read(world.source, [1], [1]).status is ReadStatus.FAILED
    assert node.read(world.source, [1, 2], [1, 2]).stale.sum() == 1
    assert pool.page(1) == world.source.pool.page(1)
    node.engine.close()


def test_many_orders_at_once_end_well(world: World) -> None:
    world.sink.pool.set_pages(0)
    orders = [world.sink.order(world.source, [p], [16 - p]) for p in range(1, 16)]
    outcomes = [f.result(WAIT_S) for f in [world.sink.engine.read(o) for o in orders]]
    assert all(o.status is ReadStatus.DONE for o in outcomes)
    assert all(world.sink.pool.page(p) == world.source.pool.page(16 - p) for p in range(1, 16))


def test_probe_and_lane(world: World) -> None:
    assert 0 < world.sink.engine.probe(world.source.name).result(WAIT_S).seconds < WAIT_S
    assert world.sink.engine.backend_name.startswith(world.backend)
    assert world.sink.engine.lane(world.source.name) in ("loopback", "cma")
    assert world.sink.engine.lane(peer_name("nobody")) == "unknown"


def test_pages_outside_the_pools_are_refused(world: World) -> None:
    order = world.sink.order(world.source, [1], [1])
    for bad in (
        replace(order, local=LocalPages.checked([16], 99)),
        replace(order, remote=RemotePages.checked([16], 99)),
    ):
        with pytest.raises(BoundsError):
            world.sink.engine.read(bad).result(WAIT_S)


def test_a_peer_that_is_not_there(world: World) -> None:
    stranger = replace(world.sink.order(world.source, [1], [1]), peer=peer_name("stranger"))
    with pytest.raises(PeerLost):
        world.sink.engine.read(stranger).result(WAIT_S)
    with pytest.raises(PeerLost):
        world.sink.engine.probe(stranger.peer).result(WAIT_S)
    world.sink.engine.remove_peer(stranger.peer).result(WAIT_S)


def test_spoilt_offers_are_refused_and_a_good_one_still_works(world: World) -> None:
    """Metadata that is cut near its end would poison the agent's name for the life of the agent."""
    late = Node.start(world.backend, TestPool(seed=5))
    good, checksum, pool = late.engine.metadata, late.engine.metadata_checksum, late.pool.map()
    other = world.source.engine
    offers = [
        (late.name, good[:-3], checksum, ProtocolError),
        (late.name, good, checksum ^ 1, ProtocolError),
        (late.name, other.metadata, other.metadata_checksum, ProtocolError),
        (peer_name("alias"), good, checksum, ProtocolError),
    ]
    for name, metadata, announced, error in offers:
        with pytest.raises(error):
            world.sink.engine.add_peer(name, metadata, announced, pool).result(WAIT_S)
    with pytest.raises(BoundsError):
        world.sink.engine.add_peer(late.name, good, checksum, world.source.pool.map()).result(WAIT_S)
    world.sink.add(late)
    world.sink.add(late)
    assert world.sink.read(late, [1], [1]).status is ReadStatus.DONE
    assert world.sink.read(world.source, [2], [1]).status is ReadStatus.DONE
    world.sink.engine.remove_peer(late.name).result(WAIT_S)
    world.sink.add(late)
    assert world.sink.read(late, [3], [1]).status is ReadStatus.DONE
    assert world.sink.pool.page(3) == late.pool.page(1)
    world.sink.engine.remove_peer(late.name).result(WAIT_S)
    late.engine.close()


def test_a_peer_that_closed_is_lost_and_its_next_life_is_another_peer(world: World) -> None:
    first = Node.start(world.backend, TestPool(seed=6))
    world.sink.add(first)
    first.engine.close()
    outcomes = [world.sink.read(first, [1], [1]) for _ in range(2)]
    if world.backend == "loopback":
        assert all(o.status is ReadStatus.FAILED for o in outcomes)
    second = Node.start(world.backend, TestPool(seed=7))
    world.sink.add(second)
    assert world.sink.read(second, [2], [2]).status is ReadStatus.DONE
    assert world.sink.pool.page(2) == second.pool.page(2)
    for node in (first, second):
        world.sink.engine.remove_peer(node.name).result(WAIT_S)
    second.engine.close()


def test_rdma_is_refused_by_name_where_there_is_none(world: World) -> None:
    strict = Node.start(world.backend, TestPool(fill=False), TransferSettings(require_rdma=True))
    with pytest.raises(LaneRefused, match="RDMA is required"):
        strict.add(world.source)
    with pytest.raises(PeerLost):
        strict.read(world.source, [1], [1])
    strict.engine.close()


def test_status_names_the_agents(world: World) -> None:
    """A node that only serves has no second agent."""
    serving, reading = world.source.engine.status(), world.sink.engine.status()
    assert serving.agents == (str(world.source.name),)
    assert reading.agents == (str(world.sink.name), f"read1.{world.sink.name}")
    assert (reading.rotations, reading.unsettled, reading.fence_error) == (0, (), "")


def test_after_close_every_call_answers(world: World) -> None:
    node = Node.start(world.backend, TestPool(fill=False))
    node.add(world.source)
    order = node.order(world.source, [1], [1])
    node.engine.close()
    node.engine.close()
    for future in (
        node.engine.read(order),
        node.engine.probe(world.source.name),
        node.engine.remove_peer(world.source.name),
    ):
        with pytest.raises(TransferError, match="is closed"):
            future.result(WAIT_S)
    assert len(node.engine.metadata) > 0
    assert node.engine.status().agents == ()


def test_a_caller_that_stops_waiting_doesnt_take_the_read_with_it(world: World) -> None:
    async def wait_and_leave() -> ReadOutcome:
        # the thread takes both at once: nothing is posted before it is cancelled
        go = threading.Event()
        world.sink.engine._submit(partial(go.wait, WAIT_S), Future())
        posted = world.sink.engine.read(world.sink.order(world.source, [1], [1]))
        asyncio.wrap_future(posted).cancel()
        world.sink.engine.cancel(posted)
        go.set()
        return await asyncio.wait_for(asyncio.wrap_future(posted), WAIT_S)

    outcome = asyncio.run(wait_and_leave())
    assert (outcome.status, outcome.reason, outcome.settled) == (ReadStatus.FAILED, "cancelled", None)


# --- the thread, over the loopback ----------------------------------------------------------------------------------


def loopback_pair() -> tuple[LoopbackNet, Node, Node]:
    net, hasty = LoopbackNet(), TransferSettings(close_s=0.05)
    source = Node.start_on(net, TestPool(seed=1), hasty)
    sink = Node.start_on(net, TestPool(fill=False), hasty)
    sink.add(source)
    return net, source, sink


def test_cancel_makes_a_running_read_unsettled_at_once_and_close_settles_it() -> None:
    net, source, sink = loopback_pair()
    net.script(source.name, Fault(FaultKind.HANG))
    hanging = sink.engine.read(sink.order(source, [1], [1]))
    # it comes after the one that hangs, which was posted then
    sink.read(source, [2], [2])
    sink.engine.cancel(hanging)
    outcome = hanging.result(WAIT_S)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    assert not outcome.settled.done()
    sink.engine.close()
    outcome.settled.result(WAIT_S)
    source.engine.close()


def test_close_lets_running_reads_end() -> None:
    net, source, sink = loopback_pair()
    patient = Node.start_on(net, TestPool(fill=False), TransferSettings(close_s=WAIT_S))
    patient.add(source)
    net.script(source.name, Fault(FaultKind.HANG))
    running = patient.engine.read(patient.order(source, [1], [1]))
    patient.read(source, [2], [2])
    closing = threading.Thread(target=patient.engine.close)
    closing.start()
    later = patient.engine.read(patient.order(source, [2], [2]))
    while not isinstance(later.exception(WAIT_S), TransferError):
        later = patient.engine.read(patient.order(source, [2], [2]))
    assert closing.is_alive()
    net.settle(source.name)
    closing.join(WAIT_S)
    assert running.result(WAIT_S).status is ReadStatus.FAILED, "its page-table rows were not read any more"
    assert patient.pool.page(1) == source.pool.page(1)
    for node in (sink, source):
        node.engine.close()


def test_a_deadline_ends_the_wait() -> None:
    net, source, sink = loopback_pair()
    net.script(source.name, Fault(FaultKind.HANG))
    outcome = sink.engine.read(replace(sink.order(source, [1], [1]), deadline_s=0.05)).result(WAIT_S)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.elapsed_s >= 0.05
    net.settle(source.name)
    assert outcome.settled is not None
    outcome.settled.result(WAIT_S)
    for node in (sink, source):
        node.engine.close()


def test_a_thread_that_fails_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    net, source, sink = loopback_pair()
    net.script(source.name, Fault(FaultKind.HANG))
    hanging = sink.engine.read(sink.order(source, [1], [1]))

    def bug(self: TransferCore, *_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(TransferCore, "probe", bug)
    probing = sink.engine.probe(source.name)
    with pytest.raises(TransferError, match="is closed"):
        probing.result(WAIT_S)
    outcome = hanging.result(WAIT_S)
    assert outcome.status is ReadStatus.FAILED
    assert "a bug" in outcome.reason
    sink.engine.close()
    source.engine.close()


def test_a_thread_that_cant_even_close_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, sink = loopback_pair()

    def bug(self: TransferCore, *_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(TransferCore, "close", bug)
    monkeypatch.setattr(TransferCore, "probe", bug)
    with pytest.raises(TransferError, match="is closed"):
        sink.engine.probe(source.name).result(WAIT_S)
    for node in (sink, source):
        with pytest.raises(ZeroDivisionError):
            node.engine.close()


def test_an_engine_that_cant_start_says_why() -> None:
    net = LoopbackNet()
    name = peer_name("node")
    net.backend(AgentName(str(name)))
    with pytest.raises(ProtocolError, match="there already"):
        TransferEngine(net.backend, name, TestPool(fill=False).map())
    with pytest.raises(ConfigError, match="nixl, loopback"):
        backend_factory("carrier pigeon")


def test_the_thread_sleeps_when_nothing_moves_and_wakes_for_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = threading.Event()
    rest = engine_module._Pace.rest

    def noted(self: engine_module._Pace, now: float, *, reading: bool) -> float:
        wait_s = rest(self, now, reading=reading)
        if wait_s >= 30.0:
            asleep.set()
        return wait_s

    monkeypatch.setattr(engine_module._Pace, "rest", noted)
    net, name, pool = LoopbackNet(), peer_name("node"), TestPool(fill=False)
    sleepy = TransferSettings(idle_s=30.0)
    engine = TransferEngine(net.backend, name, pool.map(), settings=sleepy)
    monkeypatch.setattr(engine_module, "FIRST_SLEEP_S", 30.0)
    assert asleep.wait(WAIT_S)
    # within far less than the 30 s it would sleep
    engine.remove_peer(peer_name("nobody")).result(5.0)
    engine.close()
