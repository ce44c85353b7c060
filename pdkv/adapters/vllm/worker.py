"""The worker's half: an engine's blocks as a pdkv node, behind calls that an engine's step can make.

Guarantees: nothing but the making and `close` waits for anything: orders go to an event loop in a thread of its own,
and results wait to be fetched; blocks of a prompt that was held are given back only when nobody reads them, those of a
load only when nothing can land in them; a load that failed, with whatever error, says which of its blocks it didn't
bring; what is held or loaded is told to have ended, once, unless the worker itself ends first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pdkv.adapters.vllm.adapters import Adapters
from pdkv.adapters.vllm.holds import Holds, Listeners, Terms
from pdkv.adapters.vllm.loads import Loaded, Loads, Tolerance, Wanted
from pdkv.adapters.vllm.orders import Hold, Load, StepOrders
from pdkv.adapters.vllm.settings import Settings
from pdkv.adapters.vllm.source import BlockSource
from pdkv.adapters.vllm.tally import Tally
from pdkv.contract import Contract
from pdkv.errors import ContractMismatch, Difference, IntegrityError, PdkvError
from pdkv.ids import LocalPages, NodeId, PageHashes, PeerName, new_incarnation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import Station
from pdkv.node.flow import Worker
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
T = TypeVar("T")


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

    def over(self, load: Load, pages: int, *, failed: bool) -> None:
        """`pages`: so many of its first blocks were brought. Without blocks the engine doesn't wait for it."""
        if load.blocks:
            self.received.add(load.request_id)
        if load.blocks and failed:
            self.failed.add(load.request_id)
            self.bad_blocks.update(load.blocks[pages:])


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a worker."""

    node_id: NodeId
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
        """Of one step. After the end nothing is held, and no load brings anything."""
        if not orders.holds and not orders.loads:
            return
        try:
            self._loop.call_soon_threadsafe(self._node.take, orders)
        except RuntimeError:  # the loop is closed
            log.info("%s has ended: so do %d holds and %d loads", self.name, len(orders.holds), len(orders.loads))
            with self._lock:
                self._results.sent.update(hold.request_id for hold in orders.holds)
                for load in orders.loads:
                    self._results.over(load, 0, failed=True)

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
        security = settings.security_of(station.name.node)
        self._directory = GrpcDirectory(security, ClientSettings(settings.connect_s, settings.find_s + 5.0))
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
        self._server = GrpcServer(endpoint, Services(source=service, visit=self.station.intro), security)
        self._adapters, self._files = Adapters(), Worker("adapters")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._kept: set[str] = set()
        """Requests whose blocks the engine hasn't got back."""

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
            self._begin(run(), _heard)
        log.info("%s serves its engine's blocks at %s", self.station.name, address)

    async def close(self) -> None:
        """Loads that run are cut off: their blocks are the engine's again once the transfer engine is closed."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop(LAST_WORDS_S)
        await self._directory.close()
        self._holds.digests.close()
        self._files.close()

    def take(self, orders: StepOrders) -> None:
        for hold in orders.holds:
            self._kept.add(hold.request_id)
            self._begin(self._hold(hold), partial(self._held, hold))
        for load in orders.loads:
            self._begin(self._load(load), partial(self._loaded, load))

    async def _hold(self, hold: Hold) -> None:
        pages = self._pages(hold.blocks)
        await self._holds.add(hold.request_id, pages, await self._names(hold))
        self.tally.held(len(pages))

    def _held(self, hold: Hold, task: asyncio.Task[None]) -> None:
        if (error := task.exception()) is not None:
            _tell(f"request {hold.request_id} can't be kept for another engine", error)
            self._sent(hold.request_id)

    async def _load(self, load: Load) -> Loaded:
        pages, names = self._pages(load.blocks), await self._names(load)
        return await self._loads.load(Wanted(load.request_id, names, load.first_page, pages, self._address(load)))

    def _loaded(self, load: Load, task: asyncio.Task[Loaded]) -> None:
        error = task.exception()
        loaded = task.result() if error is None else Loaded(error=_named(error))
        wanted = len(load.blocks)
        if (why := error or loaded.error) and (wanted or error):
            missing = f"{wanted - loaded.pages} of {wanted} pages were not loaded from {self._address(load)}"
            _tell(f"request {load.request_id}: {missing}", why)
        self.tally.loaded(loaded, wanted)
        self._note(lambda results: results.over(load, loaded.pages, failed=loaded.error is not None))

    def _address(self, load: Load) -> str:
        return f"{load.host}:{load.port + self._rank}"

    def _pages(self, blocks: Sequence[int]) -> LocalPages:
        return LocalPages.checked(blocks, self.station.pool.num_pages)

    async def _names(self, of: Hold | Load) -> PageHashes:
        fingerprint = bytes(32) if self._settings.shadow else self.station.contract.content_fingerprint
        adapter = of.prompt.adapter
        key = await self._files.run(self._adapters.key, adapter) if adapter is not None else ""
        return of.prompt.names(fingerprint, key, self.station.pool.fmt.page_tokens)

    def _sent(self, request_id: str) -> None:
        """Once: the engine doesn't know the request afterwards."""
        if request_id in self._kept:
            self._kept.remove(request_id)
            self._note(lambda results: results.sent.add(request_id))

    def _begin(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> None:
        """`ended` is not told if this node ends first."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def over(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                ended(task)

        task.add_done_callback(over)


def _station(settings: Settings, identity: Identity, pool: SlotPool) -> Station:
    name = PeerName(identity.node_id, new_incarnation())
    limits = TransferSettings(require_rdma=settings.require_rdma)
    transfer = TransferEngine(backend_factory(settings.backend), name, pool.map(), settings=limits)
    return Station(name, identity.contract, pool, transfer)


def _heard(task: asyncio.Task[None]) -> None:
    """One that runs for the node's life and fails is a bug; the engine goes on without what it was to do."""
    if (error := task.exception()) is not None:
        _tell("a task of the connector has ended", error)


def _tell(what: str, error: BaseException) -> None:
    """With its traceback, if it is none of those that are raised on purpose."""
    foreign = None if isinstance(error, PdkvError) else error
    log.log(
        logging.ERROR if foreign else logging.WARNING, "%s: %s: %s", what, type(error).__name__, error, exc_info=foreign
    )


def _named(error: BaseException) -> PdkvError:
    """One that nobody raised on purpose, as of a device without memory: something of this node doesn't work."""
    return error if isinstance(error, PdkvError) else IntegrityError(f"{type(error).__name__}: {error}")
