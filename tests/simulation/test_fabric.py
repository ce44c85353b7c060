"""Reads of a simulated NIC: in pieces, from what is there by then, and watched."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pdkv.errors import PeerLost, ProtocolError
from pdkv.geometry.page_layout import page_major
from pdkv.ids import Incarnation, LocalPages, NodeId, PageHashes, PeerName, RemotePages
from pdkv.kvcache.memory import allocate
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.pool import SlotPool
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus, TransferSettings
from tests.simulation.fabric import Fabric, ReadFault, SimulatedBackend, Watch
from tests.simulation.model import FORMAT
from tests.simulation.threads import SimulatedTransfer
from tests.simulation.world import Process, Violation, World

PAGES = 12
SETTINGS = TransferSettings(read_max_bytes=2 * FORMAT.page_bytes, landing_rows=16, fence_after_s=2.0)


class Claims(Watch):
    """Page p of the pool belongs to `holders[p]`."""

    def __init__(self, pool: SlotPool) -> None:
        self.holders = dict.fromkeys(range(1, PAGES), 7) | {0: -1}
        self.corrupt: list[int] = []
        self._start, self._size = pool.memory.addresses[0], pool.memory.buffer_bytes[0]

    def claims(self, address: int) -> int | None:
        if self._start <= address < self._start + self._size:
            return self.holders[(address - self._start) // FORMAT.page_bytes]
        return None

    def corrupted(self, address: int) -> None:
        self.corrupt.append((address - self._start) // FORMAT.page_bytes)


class Node:
    def __init__(self, world: World, fabric: Fabric, name: str, fill: int) -> None:
        self.process = Process(world, name)
        self.name = PeerName(NodeId(name), Incarnation(f"{len(world.processes):032x}"))
        place = page_major(FORMAT, PAGES)
        self.table = PageTable(PAGES, first_generation=1000 * len(world.processes))
        self.pool = SlotPool(FORMAT, place, allocate(place.buffer_bytes, kind="torch"), self.table)
        self.bytes = self.pool.memory.buffers[0].numpy().reshape(PAGES, -1)
        self.bytes[:] = fill
        self.watch = Claims(self.pool)
        self.transfer = SimulatedTransfer(fabric, self.process, self.watch, self.name, self.pool.map(), SETTINGS)


class Scene:
    """A reader, and a source whose pages 1 to 11 are sealed."""

    def __init__(self, seed: int = 0, *, one_sided: bool = True, copied: bool = False) -> None:
        self.world = World(seed)
        self.fabric = Fabric(self.world, one_sided=one_sided, copied=copied)
        self.reader, self.source = Node(self.world, self.fabric, "d0", 0), Node(self.world, self.fabric, "p0", 9)
        self.every = LocalPages.checked(np.arange(1, PAGES), PAGES)
        self.hashes = PageHashes(bytes(range(32)) * len(self.every))
        self.source.table.seal(self.every, self.hashes)
        assert self.come(self.connect(self.source)) is None

    def connect(self, node: Node) -> Future[None]:
        offer = node.transfer
        return self.reader.transfer.add_peer(node.name, offer.metadata, offer.metadata_checksum, node.pool.map())

    def read(self, *pages: int, deadline_s: float = 5.0) -> Future[ReadOutcome]:
        local = LocalPages.checked(pages, PAGES)
        order = ReadOrder(
            self.source.name,
            local,
            RemotePages.checked(pages, PAGES),
            self.source.table.generations(local),
            self.source.table.hashes(local),
            deadline_s,
        )
        return self.reader.transfer.read(order)

    def come(self, future: Future[Any], limit_s: float = 60.0) -> Any:
        assert self.world.run(future.done, self.world.now + limit_s), self.world.broken_law
        return future.exception() or future.result()

    def rest(self, seconds: float) -> None:
        self.world.run(lambda: False, self.world.now + seconds)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.world.end()


def test_a_read_brings_bytes_and_says_that_its_pages_were_fresh(scene: Scene) -> None:
    outcome = scene.come(scene.read(3, 1, 7))
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert outcome.bytes == outcome.backend_bytes == 3 * FORMAT.page_bytes
    assert (scene.reader.bytes[[1, 3, 7]] == 9).all()
    assert (scene.reader.bytes[[2, 4]] == 0).all()
    assert scene.reader.transfer.lane(scene.source.name) == "simulated"


def test_a_source_that_changes_amid_a_read_is_torn_and_found_out() -> None:
    torn = 0
    for seed in range(30):
        scene = Scene(seed)
        scene.fabric.slow_until["d0"] = 100.0
        future = scene.read(1, 2, 3, 4)
        scene.rest(0.2)
        if future.done():
            continue
        scene.source.table.bump(scene.every)
        scene.source.bytes[:] = 5
        outcome = scene.come(future)
        kept = set(scene.reader.bytes[1:5].reshape(-1).tolist())
        torn += kept == {5, 9}
        assert outcome.stale.all() or kept == {9}
        scene.world.end()
    assert torn > 5


def test_a_failed_read_settles_at_once_and_a_lost_one_goes_on_writing_until_the_fence(scene: Scene) -> None:
    scene.fabric.script("d0", ReadFault("fail"))
    assert scene.come(scene.read(1)).status is ReadStatus.FAILED
    scene.fabric.script("d0", ReadFault("lose"))
    outcome = scene.come(scene.read(2))
    assert outcome.status is ReadStatus.UNSETTLED
    assert not outcome.settled.done()
    assert scene.come(outcome.settled) is None
    assert scene.reader.transfer.status().rotations == 1
    scene.reader.watch.holders[2] = 8
    scene.rest(20.0)
    assert not scene.world.broken_law


@pytest.mark.parametrize("kind", ["late", "hang"])
def test_a_read_past_its_deadline_is_given_up_and_settles_later(scene: Scene, kind: str) -> None:
    scene.fabric.script("d0", ReadFault(kind, 1.5 if kind == "late" else 0.0))
    outcome = scene.come(scene.read(1, deadline_s=0.5))
    assert outcome.status is ReadStatus.UNSETTLED
    assert scene.world.now == pytest.approx(0.5, abs=0.05)
    assert scene.come(outcome.settled) is None
    assert scene.reader.transfer.status().rotations == (0 if kind == "late" else 1)


def test_a_page_that_is_given_away_under_a_read_is_a_broken_law(scene: Scene) -> None:
    scene.fabric.script("d0", ReadFault("late", 1.0))
    scene.read(1)
    scene.rest(0.001)
    scene.reader.watch.holders[1] = 8
    with pytest.raises(Violation, match="writes to a page it lost"):
        scene.rest(5.0)


def test_two_reads_into_the_same_bytes_are_a_broken_law(scene: Scene) -> None:
    scene.fabric.script("d0", ReadFault("late", 1.0))
    scene.read(1, 2)
    scene.rest(0.001)
    scene.read(2, 3)
    with pytest.raises(Violation, match="two reads write to the same bytes"):
        scene.rest(5.0)


@pytest.mark.parametrize("kind", ["corrupt-main", "corrupt-index"])
def test_a_wrong_bit_is_in_the_cache_that_was_meant(scene: Scene, kind: str) -> None:
    scene.fabric.script("d0", ReadFault(kind))
    assert scene.come(scene.read(4)).status is ReadStatus.DONE
    wrong = np.flatnonzero(scene.reader.bytes[4] != 9).tolist()
    assert len(wrong) == 1
    assert (wrong[0] >= FORMAT.main_bytes) is (kind == "corrupt-index")
    assert scene.reader.watch.corrupt == [4]


def test_where_reads_are_copied_a_wrong_bit_may_follow_the_right_bytes_before_the_end() -> None:
    seen = set()
    for seed in range(60):
        scene = Scene(seed, copied=True)
        scene.fabric.script("d0", ReadFault("corrupt-main"))
        future = scene.read(4)
        scene.world.run(lambda scene=scene: bool((scene.reader.bytes[4] == 9).all()), scene.world.now + 1.0)
        amid = not future.done()
        assert scene.come(future).status is ReadStatus.DONE
        wrong = bool((scene.reader.bytes[4] != 9).any())
        assert wrong is (scene.reader.watch.corrupt == [4])
        seen.add((amid, wrong))
        scene.world.end()
    assert (True, True) in seen, "right first, then wrong"
    assert (False, True) in seen, "wrong at once"


def test_reads_from_a_process_that_died_end_or_go_on_in_its_heirs_memory() -> None:
    ends = set()
    for seed in range(40):
        scene = Scene(seed)
        scene.fabric.slow_until["d0"] = 100.0
        future = scene.read(1, 2, 3, 4)
        scene.rest(0.02)
        scene.source.process.kill()
        scene.fabric.lost(scene.source.process)
        heir = Node(scene.world, scene.fabric, "p0", 3)
        scene.fabric.inherit(str(scene.source.name), str(heir.name))
        outcome = scene.come(future)
        assert outcome.status is not ReadStatus.DONE or outcome.stale.all()
        ends.add(outcome.status)
        assert isinstance(scene.come(scene.reader.transfer.probe(scene.source.name)), PeerLost)
        assert scene.come(scene.connect(heir)) is None
        assert not scene.world.broken_law
        scene.world.end()
    assert ends >= {ReadStatus.FAILED, ReadStatus.UNSETTLED}


def test_a_name_is_taken_once_and_metadata_is_checked(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match="there already"):
        SimulatedBackend(scene.fabric, scene.reader.process, str(scene.reader.name))
    offer = scene.source.transfer
    other = PeerName(NodeId("p1"), scene.source.name.incarnation)
    future = scene.reader.transfer.add_peer(other, offer.metadata, offer.metadata_checksum, scene.source.pool.map())
    assert isinstance(scene.come(future), ProtocolError)


def test_a_cut_link_and_a_source_that_stands_still_hold_reads_up_and_no_others() -> None:
    for one_sided in (True, False):
        scene = Scene(one_sided=one_sided)
        scene.fabric.cut("p0", "d0", 2.0)
        assert scene.come(scene.read(1)).status is ReadStatus.DONE
        assert 2.0 < scene.world.now < 2.2
        scene.source.process.stop_for(3.0)
        assert scene.come(scene.read(2)).status is ReadStatus.DONE
        assert (scene.world.now < 2.4) is one_sided
        scene.fabric.cut("p0", "d0", 100.0)
        scene.fabric.mend()
        before = scene.world.now
        assert scene.come(scene.read(3)).status is ReadStatus.DONE
        assert scene.world.now < before + 0.2
        scene.world.end()


def test_a_reader_that_stood_still_gives_its_reads_the_time_that_it_missed(scene: Scene) -> None:
    scene.fabric.script("d0", ReadFault("late", 4.5))
    future = scene.read(1, deadline_s=2.0)
    scene.rest(0.5)
    scene.reader.process.stop_for(3.0)
    assert scene.come(future).status is ReadStatus.DONE
    scene.fabric.script("d0", ReadFault("hang"))
    began = scene.world.now
    future = scene.read(1, deadline_s=2.0)
    scene.rest(0.5)
    scene.reader.process.jump(30.0)
    assert scene.come(future).status is ReadStatus.UNSETTLED
    assert 2.0 < scene.world.now - began < 3.0
