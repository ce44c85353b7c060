"""One life of a simulated node: a process with the product's state machine, and simulated parts around it.

Guarantees: everything that the product decides is the product's code; a manager and a pool are watched, not changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from pdkv.contract import Contract
from pdkv.geometry.page_layout import PlacementKind, PoolMap, layer_major, page_major
from pdkv.ids import Incarnation, LocalPages, NodeId, PageHashes, PeerName, RequestId
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.memory import allocate
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.pool import Piece, SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import begin
from pdkv.node.keeper import KeeperSettings, PeerKeeper
from pdkv.node.oracle import Oracle
from pdkv.node.preemption import PreemptPolicy
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.stages import Stage
from pdkv.transfer.lines import serving_agent
from pdkv.transfer.orders import TransferSettings
from tests.simulation.fabric import ANYBODY, Fabric, Watch
from tests.simulation.model import FORMAT, PAGE, VOCAB, SimulatedEngine, contract
from tests.simulation.network import Directory, Network, RemoteSource
from tests.simulation.threads import SimulatedTransfer, SimulatedWorker
from tests.simulation.world import Process, World

NODES = ("d0", "d1", "p0", "p1")
_PLACEMENTS = {"page_major": page_major, "layer_major": layer_major}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a seed draws for all of its nodes."""

    prefill_pages: int
    decode_pages: int
    lease_ttl_s: float
    read_deadline_s: float
    fence_after_s: float
    silence_s: float
    pull_back_s: float | None
    borrow_s: float | None
    """None: no decode node has sources."""
    peer_pages_share: float
    keeper: KeeperSettings
    speculation: str
    one_sided: bool
    copied: bool
    landing_rows: int
    pace: float
    """How much longer than others its steps take."""
    window_pages: int | None
    """Pages that a request takes ahead of its need; None: all at once."""
    preempt: PreemptPolicy
    placements: tuple[PlacementKind, ...]
    chunk_pages: int
    rails: dict[str, int]
    """Of a node, by its role."""

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        window_pages = rng.choice((None, None, 1, 3))
        return cls(
            prefill_pages=rng.choice((12, 16, 28)),
            decode_pages=rng.choice((12, 16, 28)),
            lease_ttl_s=rng.choice((1.0, 3.0, 10.0)),
            read_deadline_s=rng.choice((0.5, 2.0, 8.0)),
            fence_after_s=rng.choice((0.5, 3.0)),
            silence_s=rng.choice((1.0, 5.0)),
            pull_back_s=rng.choice((0.3, 0.3, 2.0, 2.0, None)),
            borrow_s=rng.choice((0.3, 2.0, 2.0, None)),
            peer_pages_share=rng.choice((0.5, 1.0)),
            keeper=KeeperSettings(probe_s=rng.choice((2.0, 5.0)), retry_s=0.5, lost_s=5.0, forget_s=20.0),
            speculation=rng.choice(("none", "none", "none", "oracle")),
            landing_rows=rng.choice((12, 48)),
            one_sided=(lane := rng.random()) < 0.5,
            copied=lane < 0.25,
            pace=rng.choice((1.0, 1.0, 12.0)),
            window_pages=window_pages,
            preempt=PreemptPolicy.NONE if window_pages else rng.choice(tuple(PreemptPolicy)),
            placements=rng.choice((("page_major",), ("layer_major",), ("page_major", "layer_major"))),
            chunk_pages=rng.choice((1, 2, 4)),
            rails={role: rng.choice((1, 1, 2, 3)) for role in ("prefill", "decode")},
        )


class WatchedManager(CacheManager):
    """The product's manager, and the law that no page gets a new owner while a write may land in it."""

    def __init__(self, pool: SlotPool, life: Life) -> None:
        super().__init__(pool)
        self._life = life

    def reserve(self, hashes: PageHashes, total_pages: int, **limits: Any) -> Reservation:
        reservation = super().reserve(hashes, total_pages, **limits)
        self._life.require_quiet(reservation.pages)
        return reservation

    def grow(self, reservation: Reservation, count: int) -> None:
        have = len(reservation.sequence)
        super().grow(reservation, count)
        self._life.require_quiet(reservation.sequence[have:])


class _Claims(Watch):
    """Who has the pool's pages, for the fabric."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def claims(self, address: int) -> int | None:
        page = self._life.page_at(address)
        return None if page is None else self._life.holder(page)

    def corrupted(self, address: int) -> None:
        self._life.corrupted.add(self._life.page_at(address) or 0)


@dataclass(slots=True, eq=False)
class Life:
    """A node from its start to its end."""

    world: World
    process: Process
    role: str
    name: PeerName
    pool: SimulatedPool
    fabric: Fabric
    parts: NodeParts = field(init=False)
    node: Any = None
    transfer: SimulatedTransfer = field(init=False)
    workers: tuple[SimulatedWorker, ...] = ()
    corrupted: set[int] = field(default_factory=set)
    """Pages into which a fault put a wrong bit."""
    _spans: list[tuple[int, int, int]] = field(init=False)
    """Of each buffer: its first address, the one after its last, and the bytes of a page in it."""
    _views: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        pool = self.pool
        memory = zip(pool.memory.addresses, pool.memory.buffer_bytes, strict=True)
        pool.written = self.require_quiet
        self._spans = [(start, start + size, size // pool.num_pages) for start, size in memory]
        self._views = [pool.piece_view(piece).numpy() for piece in pool._page_pieces]

    @property
    def manager(self) -> CacheManager:
        return self.parts.manager

    @property
    def alive(self) -> bool:
        return not self.process.dead

    def page_at(self, address: int) -> int | None:
        """The page whose bytes of either cache are at an address; None for memory that isn't the pool's."""
        for start, end, stride in self._spans:
            if start <= address < end:
                return (address - start) // stride
        return None

    def holder(self, page: int) -> int:
        """Of a page that is reserved, private or held back; 0 otherwise. The sink may always be written to."""
        return int(self.manager.ownership._claims[page]) >> 3 if page else ANYBODY

    def require_quiet(self, pages: LocalPages, what: str = "got a new owner") -> None:
        """Nothing lands any more in pages to which `what` happens."""
        landing = [read for read in self.fabric.landing(self.process) if read.claims]
        if landing:
            at = {self.page_at(read.local[i]) for read in landing for i in read.left}
            given = sorted(at.intersection(pages))
            self.world.require(not given, f"{self.process.name}: pages {given} {what} under a read")

    def bytes_of(self, pages: LocalPages) -> np.ndarray:
        """uint8 [pages, page bytes], page-major."""
        return np.concatenate([view[pages.index] for view in self._views], axis=1)


class SimulatedPool(SlotPool):
    """Makes each view of its memory and its array once: torch takes longer for them than for a digest of a page."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        for buffer in self.memory.buffers:
            _with_array(buffer)
        self._kept: dict[Any, Any] = {}
        self._map: PoolMap = super().map()
        self.written: Callable[[LocalPages], None] = lambda pages: None
        """Told of pages before others are moved there."""

    def map(self) -> PoolMap:
        return self._map

    def piece_view(self, piece: Piece) -> Any:
        # a piece lives as long as its pool, and its hash takes longer than all the rest
        view = self._kept.get(id(piece))
        if view is None:
            view = self._kept[id(piece)] = _with_array(super().piece_view(piece))
        return view

    def _view(self, *of: Any, **more: Any) -> Any:
        key = (*of, *more.values())
        if key not in self._kept:
            self._kept[key] = super()._view(*of, **more)
        return self._kept[key]

    def copy_pages(self, source: LocalPages, target: LocalPages) -> None:
        self.written(target)
        super().copy_pages(source, target)


@cache
def _contract(weights: str, speculation: str, placement: PlacementKind) -> Contract:
    return replace(contract(weights, speculation), placement=placement)


def _with_array(view: Any) -> Any:
    array = view.numpy()
    view.numpy = lambda: array
    return view


def make_pool(rng: random.Random, pages: int, placement: PlacementKind) -> SimulatedPool:
    """Its memory is as another process left it."""
    place = _PLACEMENTS[placement](FORMAT, pages)
    memory = allocate(place.buffer_bytes, kind="torch")
    for buffer in memory.buffers:
        buffer.fill_(0xA5)
    return SimulatedPool(FORMAT, place, memory, PageTable(pages, first_generation=rng.getrandbits(64)))


class Fleet:
    """Makes lives of nodes, and knows the present ones."""

    def __init__(self, world: World, shape: Shape, at: Callable[[Life, Stage, RequestId], None]) -> None:
        self.world = world
        self.shape = shape
        self.network = Network(world)
        self.fabric = Fabric(world, one_sided=shape.one_sided, copied=shape.copied)
        self.lives: dict[str, Life] = {}
        self.all_lives: list[Life] = []
        self.checked: Callable[..., None] = lambda life, order, outcome: None
        """Told of every read's outcome."""
        self.started: Callable[[Life], None] = lambda life: None
        """Told of every node before it serves."""
        self._at = at
        self._rng = random.Random(world.random.random())

    def start(self, name: str, weights: str = "simulated") -> Life:
        """The node's first life, or its next one."""
        rng, shape = self._rng, self.shape
        role = "prefill" if name.startswith("p") else "decode"
        process = Process(self.world, name)
        pages = shape.prefill_pages if role == "prefill" else shape.decode_pages
        pool = make_pool(rng, pages, shape.placements[int(name[1:]) % len(shape.placements)])
        peer = PeerName(NodeId(name), Incarnation(f"{rng.getrandbits(128):032x}"))
        life = Life(self.world, process, role, peer, pool, self.fabric)
        settings = TransferSettings(
            read_max_bytes=2 * FORMAT.page_bytes,
            look_bytes=FORMAT.page_bytes,
            landing_rows=shape.landing_rows,
            connect_s=5.0,
            probe_s=1.0,
            fence_after_s=shape.fence_after_s,
            fence_every_s=1.0,
            line_stall_s=0.3,
            line_retry_s=0.5,
        )
        claims, rails = _Claims(life), shape.rails[role]
        life.transfer = SimulatedTransfer(self.fabric, process, claims, peer, pool.map(), settings, rails=rails)
        life.transfer.checked = lambda order, outcome: self.checked(life, order, outcome)
        life.workers = (SimulatedWorker(process, 0.004 * shape.pace), SimulatedWorker(process, 0.001))
        engine = SimulatedEngine(pool)
        drafter = Oracle(engine, VOCAB, acceptance=0.7, seed=1) if shape.speculation == "oracle" else None
        life.parts = NodeParts(
            name=peer,
            contract=_contract(weights, shape.speculation, pool.placement.kind),
            pool=pool,
            manager=WatchedManager(pool, life),
            verifier=Verifier(pool),
            transfer=life.transfer,
            engine=engine,
            steps=life.workers[0],
            digests=life.workers[1],
            drafter=drafter,
            at=lambda stage, request: self._at(life, stage, request),
        )
        before = self.lives.get(name)
        if before is not None:
            for rail in range(rails):
                self.fabric.inherit(serving_agent(before.name, rail), serving_agent(peer, rail))
        self.lives[name] = life
        self.all_lives.append(life)
        process.call_soon(self._boot, life)
        return life

    def _boot(self, life: Life) -> None:
        shape, process = self.shape, life.process
        if life.role == "prefill":
            settings = PrefillSettings(shape.chunk_pages * PAGE, shape.lease_ttl_s, pull_back_s=shape.pull_back_s)
            life.node = PrefillNode(life.parts, settings)
            probe = life.node.peers.prove
        else:
            decode_settings = DecodeSettings(
                prefill_addresses=("p0", "p1"),
                read_deadline_s=shape.read_deadline_s,
                queue_limit=6,
                reserve_window_pages=shape.window_pages,
                preempt=shape.preempt,
                offload_bytes=20 * FORMAT.page_bytes,
                silence_s=shape.silence_s,
                recompute_chunk_tokens=shape.chunk_pages * PAGE,
                peer_pages_share=shape.peer_pages_share,
                lease_ttl_s=shape.lease_ttl_s,
            )
            if shape.borrow_s is not None:
                others = tuple(name for name in NODES if name != process.name)
                decode_settings = replace(
                    decode_settings, source_addresses=others, borrow_s=shape.borrow_s, locate_s=0.05
                )
            sources = Directory(self.network, process, RemoteSource)
            life.node = DecodeNode(life.parts, Directory(self.network, process), decode_settings, sources)
            probe = life.node.links.probe
            if life.node.settings.source_addresses:
                process.create_task(self._meet(life))
        # The book's own clock is the machine's.
        life.node.peers.now = process.time
        life.node.keeper = PeerKeeper(life.node.peers, probe, shape.keeper)
        process.create_task(life.node.keeper.run())
        process.create_task(life.node.watch_leases())
        self.started(life)
        self.network.listen(process, life.node)

    async def _meet(self, life: Life) -> None:
        """A decode node's sources, before its requests would."""
        for address in life.node.settings.source_addresses:
            begin(life.node.borrowing._sources.of(address))

    def kill(self, life: Life) -> None:
        """As by SIGKILL. The caller raises `Killed` if it is the process that runs now."""
        self.world.note("kill", life.process.name)
        life.process.kill()
        self.network.hang_up(life.process)
        self.fabric.lost(life.process)
