"""The worker's half: an engine's blocks as a pdkv node, behind calls that an engine's step can make.

Guarantees: nothing but the making and `close` waits for anything: orders go to an event loop in a thread of its own,
and results wait to be fetched; blocks of a prompt that was held are given back only when nobody reads them, those of a
load only when nothing can land in them; a load that failed says which of its blocks it didn't bring.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pdkv.adapters.vllm.holds import Holds, Listeners, Terms
from pdkv.adapters.vllm.loads import Loaded, Loads, Tolerance, Wanted
from pdkv.adapters.vllm.orders import Hold, Load, StepOrders
from pdkv.adapters.vllm.settings import Settings
from pdkv.adapters.vllm.source import BlockSource
from pdkv.adapters.vllm.tally import Tally
from pdkv.contract import Contract
from pdkv.errors import BoundsError, ContractMismatch, Difference, PdkvError
from pdkv.ids import LocalPages, NodeId, PageHashes, PeerName, new_incarnation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import Station
from pdkv.node.keeper import KeeperSettings, PeerKeeper
from pdkv.node.links import SourceLinks
from pdkv.node.peers import PeerBook
from pdkv.rpc.client import ClientSettings, GrpcDirectory
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.engine import TransferEngine
from pdkv.transfer.orders import TransferSettings

log = logging.getLogger(__name__)
LAST_WORDS_S = 1.0


@dataclass(slots=True)
class Results:
    """What has ended since the last step."""

    sent: set[str] = field(default_factory=set)
    """Requests whose held blocks the engine may have back."""
    received: set[str] = field(default_factory=set)
    """Loads that ended, those that failed included."""
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    """Of failed loads: those that were not brought."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a worker."""

    node_id: str
    rank: int
    """In its tensor-parallel group: it reads from the same one of another engine's."""
    contract: Contract


class WorkerSide:
    """Of one worker. Everything but `_Node` runs in the engine's thread."""

    def __init__(self, settings: Settings, identity: Identity, pool: SlotPool) -> None:
        """Returns when it serves. Raises what keeps it from serving, as a port that is in use."""
        self.tally = Tally()
        self._lock = threading.Lock()
        self._results = Results()
        self._loop = asyncio.new_event_loop()
        started: Future[_Node] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(
            target=self._main, args=(settings, identity, pool, started), name="pdkv", daemon=True
        )
        self._thread.start()
        self._node = started.result()

    @property
    def name(self) -> PeerName:
        return self.station.name

    @property
    def contract(self) -> Contract:
        return self.station.contract

    @property
    def station(self) -> Station:
        """As its peers know it."""
        return self._node.station

    def begin(self, orders: StepOrders) -> None:
        """Of one step."""
        if orders.holds or orders.loads:
            self._loop.call_soon_threadsafe(self._node.take, orders)

    def results(self) -> Results:
        with self._lock:
            results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Tell nobody anything more, and destroy the agents: nothing lands afterwards. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _main(self, settings: Settings, identity: Identity, pool: SlotPool, started: Future[_Node]) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(settings, identity, pool, started))

    async def _serve(self, settings: Settings, identity: Identity, pool: SlotPool, started: Future[_Node]) -> None:
        with ExitStack() as stack:
            try:
                station = _station(settings, identity, pool)
                stack.callback(station.transfer.close)
                node = _Node(settings, identity.rank, station, self._note, self.tally)
                await node.start()
            except PdkvError as error:
                started.set_exception(error)
                return
            except BaseException as error:
                started.set_exception(error)
                raise
            started.set_result(node)
            try:
                await self._end.wait()
            finally:
                await node.close()

    def _note(self, note: Callable[[Results], None]) -> None:
        with self._lock:
            note(self._results)


class _Node:
    """On the loop."""

    def __init__(
        self, settings: Settings, rank: int, station: Station, note: Callable[..., None], tally: Tally
    ) -> None:
        self._settings, self._note, self.tally = settings, note, tally
        self.station, self._rank = station, rank
        self.peers = PeerBook(self.station)
        self.peers.overlook = self._differs
        self._directory = GrpcDirectory(settings.security, ClientSettings(settings.connect_s, settings.find_s + 5.0))
        allowed = tuple(pattern.strip() for pattern in settings.allow.split(","))
        self._links = SourceLinks(self.station, self.peers, self._directory.sources, allowed=allowed)
        self._keeper = PeerKeeper(self.peers, self._links.probe, KeeperSettings())
        verifier = Verifier(station.pool)
        self._holds = Holds(
            verifier,
            station.name,
            Terms(settings.hold_s, settings.lease_s, settings.find_s),
            Listeners(self._sent, lambda lent: station.transfer.expect_reads(peers_may=lent)),
        )
        tolerance = Tolerance(settings.shadow, tally.refused)
        self._loads = Loads(self.station, self._links, verifier, self._holds.digests, tolerance)
        service = BlockSource(self.station, self.peers, self._holds, settings.lease_s)
        endpoint = Endpoint(f"{settings.bind or settings.host}:{settings.port + rank}", settings.host)
        self._server = GrpcServer(endpoint, Services(source=service, visit=self.station.intro), settings.security)
        self._tasks: set[asyncio.Task[None]] = set()

    def _differs(self, differences: Sequence[Difference]) -> bool:
        """In shadow mode whoever says that it is in it, too, is let in: what differs is counted and told. Segments that
        differ are refused by the transfer engine: there are no places for them."""
        error = ContractMismatch(differences)
        self.tally.refused(error)
        overlooked = self._settings.shadow and all(d.field != "seed_rule" for d in differences)
        log.warning("another engine's contract %s: %s", "is overlooked" if overlooked else "is refused", error)
        return overlooked

    async def start(self) -> None:
        address = await self._server.start()
        for run in (self._holds.watch, self._keeper.run):
            self._begin(run())
        log.info("%s serves its engine's blocks at %s", self.station.name, address)

    async def close(self) -> None:
        """Loads that run are cut off: their blocks are the engine's again once the transfer engine is closed."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop(LAST_WORDS_S)
        await self._directory.close()
        self._holds.digests.close()

    def take(self, orders: StepOrders) -> None:
        for hold in orders.holds:
            self._begin(self._hold(hold))
        for load in orders.loads:
            self._begin(self._load(load))

    async def _hold(self, hold: Hold) -> None:
        try:
            pages = self._pages(hold.blocks)
        except BoundsError as error:
            log.error("request %s can't be kept for another engine: %s", hold.request_id, error)
            self._sent(hold.request_id)
            return
        await self._holds.add(hold.request_id, pages, self._names(hold))
        self.tally.held(len(pages))

    async def _load(self, load: Load) -> None:
        address = f"{load.host}:{load.port + self._rank}"
        try:
            pages = self._pages(load.blocks)
        except BoundsError as error:
            loaded = Loaded(error=error)
        else:
            loaded = await self._loads.load(Wanted(load.request_id, self._names(load), load.first_page, pages, address))
        wanted = len(load.blocks)
        if not wanted:
            return  # the engine doesn't wait for it
        self.tally.loaded(loaded, wanted)
        if (why := loaded.error) is not None:
            words = f"{wanted - loaded.pages} of {wanted} pages were not loaded from {address}"
            log.warning("request %s: %s: %s: %s", load.request_id, words, why.kind, why)

        def note(results: Results) -> None:
            results.received.add(load.request_id)
            if loaded.error is not None:
                results.failed.add(load.request_id)
                results.bad_blocks.update(load.blocks[loaded.pages :])

        self._note(note)

    def _pages(self, blocks: Sequence[int]) -> LocalPages:
        return LocalPages.checked(blocks, self.station.pool.num_pages)

    def _names(self, of: Hold | Load) -> PageHashes:
        fingerprint = bytes(32) if self._settings.shadow else self.station.contract.content_fingerprint
        return of.prompt.names(fingerprint, self.station.pool.fmt.page_tokens)

    def _sent(self, request_id: str) -> None:
        self._note(lambda results: results.sent.add(request_id))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_heard)


def _station(settings: Settings, identity: Identity, pool: SlotPool) -> Station:
    name = PeerName(NodeId(identity.node_id), new_incarnation())
    limits = TransferSettings(require_rdma=settings.require_rdma)
    transfer = TransferEngine(backend_factory(settings.backend), name, pool.map(), settings=limits)
    return Station(name, identity.contract, pool, transfer)


def _heard(task: asyncio.Task[None]) -> None:
    """A task that fails with anything but a cancellation is a bug; the engine goes on without what it was to do."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the connector failed", exc_info=error)
