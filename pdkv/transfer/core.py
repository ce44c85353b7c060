"""The transfer engine without its thread: peers, tasks and reads, moved on one step at a time.

Guarantees: one stalled peer holds back only reads of its own (a bounded number of reads a peer); a peer that
disconnected gets no new read; a peer is removed only when none of its reads is unsettled; adding and removing one peer
never overlap; `close` answers everything that is outstanding, after the agent is gone.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from pdkv.errors import BoundsError, LaneRefused, PdkvError, PeerLost, ProtocolError, TransferError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import SINK_PAGE, PeerName
from pdkv.transfer.backends.base import AgentName, Backend, Posted, Prepared, Side
from pdkv.transfer.descriptors import plan, table_rows
from pdkv.transfer.landing import ROW_BYTES, LandingRows
from pdkv.transfer.orders import Probe, ReadOrder, ReadOutcome, TransferSettings
from pdkv.transfer.tasks import Landing, OrderTask, Peer, ProbeTask, Task, Ticket, Wanted

_SCRATCH = np.array([SINK_PAGE], np.int32)
"""Piece 0 of page 0 on either side: the write sink, which anybody may read and overwrite."""


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """What a peer sent about itself. `checksum` is xxh3_64 of `metadata`."""

    metadata: bytes
    checksum: int
    pool: PoolMap


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    task: Task
    wanted: Wanted
    posted: Posted
    post_s: float


class TransferCore:
    """Owns a backend. Not thread-safe: everything is called from the thread that made the backend."""

    def __init__(self, backend: Backend, pool: PoolMap, settings: TransferSettings) -> None:
        self._backend = backend
        self._pool = pool
        self._settings = settings
        self._tasks: deque[Task] = deque()
        self._running: list[_Running] = []
        self._stopped = ""
        self.peers: dict[PeerName, Peer] = {}
        rows = LandingRows(settings.landing_rows)
        for region in pool.regions:
            backend.register(region.address, region.length, pool.memory, pool.device)
        for address, length in ((pool.table_base, pool.table_region.length), (rows.address, rows.length)):
            backend.register(address, length, "DRAM", 0)
        self._landing = Landing(rows, backend.prepare(None, rows.table(), "DRAM"))
        self.metadata = backend.metadata()
        self.backend_name = backend.name

    @property
    def busy(self) -> bool:
        """Something is read or waits to be."""
        return bool(self._tasks)

    @property
    def reading(self) -> bool:
        """A posted read has not ended."""
        return bool(self._running)

    def step(self, now: float) -> bool:
        """Serve peers, collect ends, keep deadlines (against `now`, monotonic seconds), post. True if a read moved."""
        self._backend.progress()
        moved = self._collect()
        for task in tuple(self._tasks):
            if now >= task.deadline and not task.over:
                task.give_up("no end within the deadline")
        moved |= self._post()
        self._tidy()
        return moved

    def add_peer(self, name: PeerName, offer: PeerOffer, ticket: Ticket[None]) -> None:
        """Answered once a scratch read from the peer is done and its lane is known. Idempotent for equal metadata.

        Raises, or answers with, `ProtocolError` (metadata damaged or another's), `ContractMismatch` (segments differ),
        `BoundsError` (memory that is not registered there), `PeerLost`, `DeadlineExceeded`, `LaneRefused`.
        """
        have = xxhash.xxh3_64_intdigest(offer.metadata)
        if have != offer.checksum:
            raise ProtocolError(f"agent metadata of {name} is damaged", have=have, announced=offer.checksum)
        known = self.peers.get(name)
        if known is not None and known.metadata == offer.metadata and not known.lost and not known.leaving:
            if known.arrivals:
                known.arrivals.append(ticket.future)
            else:
                ticket.future.set_result(None)
            return
        if known is not None:
            if self._holds_reads(known):
                raise PeerLost(f"{name} was here before and has reads that have not settled", peer=name)
            self._forget(name, known)
        peer = self._introduce(name, offer)
        peer.arrivals.append(ticket.future)
        self.peers[name] = peer
        first_read: Ticket[Probe] = Ticket(drawn=ticket.drawn)
        first_read.future.add_done_callback(partial(self._arrived, peer))
        wanted = Wanted(Side(peer.local, _SCRATCH), Side(peer.remote, _SCRATCH))
        self._tasks.append(ProbeTask(peer, wanted, first_read, self._settings.connect_s))

    def remove_peer(self, name: PeerName, ticket: Ticket[None]) -> None:
        """Takes no new read for it at once; answered when its last read has settled and it is gone."""
        peer = self.peers.get(name)
        if peer is None:
            ticket.future.set_result(None)
            return
        peer.leaving = True
        peer.departures.append(ticket.future)

    def read(self, order: ReadOrder, ticket: Ticket[ReadOutcome]) -> None:
        """Raises `PeerLost` for a peer that is not there, `BoundsError` for pages outside the pools."""
        peer = self._connected(order.peer)
        peer.plan.check(order.local, order.remote)
        if len(order) > self._settings.landing_rows:
            raise BoundsError("pages of one read order", len(order), f"at most {self._settings.landing_rows}")
        task = OrderTask(order, peer, ticket, self._landing, self._settings.read_max_bytes)
        if peer.lost:
            task.stop(peer.lost)
        else:
            self._tasks.append(task)

    def cancel(self, future: Future[ReadOutcome]) -> None:
        """Answer that read now. Nothing happens if it has its answer."""
        for task in tuple(self._tasks):
            if task.ticket.future is future:
                task.give_up("cancelled")

    def probe(self, name: PeerName, ticket: Ticket[Probe]) -> None:
        """One page-table row of the peer. Raises, or answers with, `PeerLost`, `DeadlineExceeded`, `TransferError`."""
        peer = self._connected(name)
        if peer.lost:
            raise PeerLost(f"{name}: {peer.lost}", peer=name, reason=peer.lost)
        row = self._landing.rows.take(1)
        wanted = Wanted(Side(self._landing.prepared, row), Side(peer.rows, _SCRATCH))
        task = ProbeTask(peer, wanted, ticket, self._settings.probe_s)
        task.release = partial(self._landing.rows.give_back, row)
        self._tasks.append(task)

    def stop(self, reason: str) -> None:
        """Post nothing any more; what runs may end."""
        self._stopped = reason
        for task in tuple(self._tasks):
            task.stop(reason)

    def close(self, reason: str) -> None:
        """Destroy the agent, then answer every task. Raises what the backend raises: then nothing is settled."""
        tasks, self._tasks = tuple(self._tasks), deque()
        try:
            self._backend.close()
        except PdkvError:
            for task in tasks:
                task.give_up(reason)
            raise
        self._running.clear()
        for task in tasks:
            task.fenced(reason)
        for peer in self.peers.values():
            for waiting in peer.departures:
                waiting.set_result(None)
        self.peers.clear()

    def _connected(self, name: PeerName) -> Peer:
        if self._stopped:
            raise TransferError(self._stopped, peer=name)
        peer = self.peers.get(name)
        if peer is None or peer.arrivals or peer.leaving:
            raise PeerLost(f"{name} is not connected", peer=name)
        return peer

    def _introduce(self, name: PeerName, offer: PeerOffer) -> Peer:
        """Make a peer's memory readable. Leaves nothing behind if it raises."""
        agent = AgentName(str(name))
        mine, theirs = self._pool, offer.pool
        reading = plan(mine, theirs)
        self._backend.add_peer(agent, offer.metadata)
        prepared: list[Prepared] = []
        try:
            for owner, table, memory in (
                (None, reading.local_table(), mine.memory),
                (agent, reading.remote_table(), theirs.memory),
                (agent, table_rows(theirs, ROW_BYTES), "DRAM"),
            ):
                prepared.append(self._backend.prepare(owner, table, memory))
        except PdkvError:
            for held in prepared:
                self._backend.release(held)
            self._backend.remove_peer(agent)
            raise
        local, remote, rows = prepared
        return Peer(agent, offer.metadata, reading, local, remote, rows)

    def _arrived(self, peer: Peer, first_read: Future[Probe]) -> None:
        """The scratch read has its answer: so has whoever added the peer."""
        error = first_read.exception()
        if error is None:
            peer.lane = self._backend.lane(peer.agent)
            if self._settings.require_rdma and not peer.lane.rdma:
                error = LaneRefused(
                    f"RDMA is required, but reads from {peer.agent} go over {peer.lane.name}",
                    peer=peer.agent,
                    lane=peer.lane.name,
                    detail=peer.lane.detail,
                )
        waiting, peer.arrivals = peer.arrivals, []
        if error is not None:
            peer.lost, peer.leaving = str(error), True
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _collect(self) -> bool:
        ended = [(run, end) for run in self._running if (end := self._backend.poll(run.posted)) is not None]
        for run, end in ended:
            self._running.remove(run)
            task, peer = run.task, run.task.peer
            task.running -= 1
            peer.running -= 1
            # before the others stop: this one would end as FAILED with them, though nothing proves that it has
            task.ended(run.wanted, end, run.post_s)
            if end.disconnected and not peer.lost:
                peer.lost = end.reason
                for other in tuple(self._tasks):
                    if other.peer is peer:
                        other.stop(end.reason)
        return bool(ended)

    def _post(self) -> bool:
        """At most one read a peer and step: over a lane where the caller copies, posting is the whole copy."""
        served: list[Peer] = []
        for task in tuple(self._tasks):
            peer = task.peer
            if task.over or peer.running >= self._settings.reads_per_peer or any(p is peer for p in served):
                continue
            wanted = task.next()
            if wanted is None:
                continue
            began = time.monotonic()
            posted = self._backend.post(wanted.local, wanted.remote)
            self._running.append(_Running(task, wanted, posted, time.monotonic() - began))
            task.running += 1
            peer.running += 1
            served.append(peer)
            # to the end of the queue: tasks of one peer take turns
            self._tasks.remove(task)
            self._tasks.append(task)
        return bool(served)

    def _tidy(self) -> None:
        if any(task.over for task in self._tasks):
            self._tasks = deque(task for task in self._tasks if not task.over)
        for name, peer in tuple(self.peers.items()):
            if peer.leaving and not self._holds_reads(peer):
                self._forget(name, peer)

    def _holds_reads(self, peer: Peer) -> bool:
        return bool(peer.running) or any(task.peer is peer and not task.over for task in self._tasks)

    def _forget(self, name: PeerName, peer: Peer) -> None:
        del self.peers[name]
        for prepared in (peer.local, peer.remote, peer.rows):
            self._backend.release(prepared)
        try:
            self._backend.remove_peer(peer.agent)
        except PdkvError as error:
            for future in peer.departures:
                future.set_exception(error)
            return
        for future in peer.departures:
            future.set_result(None)
