"""The transfer engine without its thread: peers, tasks and reads, moved on one step at a time.

Guarantees: one stalled peer holds back only reads of its own (a share of the bytes under way); a peer that
disconnected gets no new read; a peer is removed only when none of its reads is unsettled; adding and removing one peer
never overlap; a read that stays unsettled is fenced off, and settles with its agent's end, while other peers' reads
end well; `close` answers everything that is outstanding, after the agents are gone.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from functools import partial

import numpy as np
import xxhash

from pdkv.errors import BoundsError, LaneRefused, PdkvError, PeerLost, ProtocolError, TransferError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import SINK_PAGE, PeerName
from pdkv.transfer.agents import ReadingAgent, Run, serving
from pdkv.transfer.backends.base import AgentName, BackendFactory, End, EndState
from pdkv.transfer.descriptors import plan
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.orders import PeerOffer, Probe, ReadOrder, ReadOutcome, TransferSettings, TransferStatus, Unsettled
from pdkv.transfer.rotation import Rotation
from pdkv.transfer.schedule import Schedule
from pdkv.transfer.tasks import OrderTask, Peer, ProbeTask, Table, Task, Ticket, Wanted

logger = logging.getLogger(__name__)

FENCED = "its agent was fenced off and destroyed"
_SCRATCH = np.array([SINK_PAGE], np.int32)
"""Piece 0 of page 0 on either side: the write sink, which anybody may read and overwrite."""


class TransferCore:
    """Owns the agents. Not thread-safe: everything but `status` is called from the thread that made it.

    Two agents, so that a fence never cuts off peers that read from here: one serves, under the node's name, and lives
    as long as the core; another reads, and is replaced by a fence.
    """

    def __init__(self, factory: BackendFactory, name: PeerName, pool: PoolMap, settings: TransferSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._tasks: list[Task] = []
        self._schedule = Schedule(settings)
        self._stopped = ""
        self._soonest = math.inf
        """Of the deadlines; nothing is due before."""
        self._changed = False
        """There may be something to post or to tidy up, without a read that ended."""
        self._unsettled: tuple[Task, ...] = ()
        self.peers: dict[PeerName, Peer] = {}
        self._landing = LandingRows(settings.landing_rows)

        def reader(number: int) -> ReadingAgent:
            # the number first: UCX keeps only the beginning of a name
            agent = AgentName(f"read{number}.{name}")
            return ReadingAgent(agent, factory(agent), pool, self._landing)

        self._readers = Rotation(reader, every_s=settings.fence_every_s)
        own = AgentName(str(name))
        self._serving, self._registration = serving(partial(factory, own), pool)
        self._own: tuple[str, ...] = (own,)
        self.metadata = self._serving.metadata()
        self.backend_name = self._serving.name

    @property
    def busy(self) -> bool:
        """Something is read or waits to be."""
        return bool(self._tasks)

    @property
    def reading(self) -> bool:
        """A posted read has not ended."""
        return self._readers.reading

    def status(self, now: float) -> TransferStatus:
        """From any thread: what the last step left."""
        rows: dict[PeerName, Unsettled] = {}
        for task in self._unsettled:
            if task.pages and not task.over and task.unsettled_since is not None:
                name, age_s = task.peer.name, now - task.unsettled_since
                row = rows.get(name, Unsettled(name, 0, 0, 0.0))
                rows[name] = Unsettled(name, row.reads + 1, row.pages + task.pages, max(row.oldest_s, age_s))
        agents = (*self._own, *(agent.name for agent in self._readers.agents))
        unsettled, readers = tuple(rows.values()), self._readers
        return TransferStatus(agents, readers.rotations, unsettled, readers.error, self._registration)

    def serve(self) -> None:
        """Let peers connect, and send what they read where that is ours to do."""
        self._serving.progress()

    def postpone(self, late_s: float) -> None:
        """Nobody looked for so long: deadlines of what is waited for move on by it."""
        for task in self._tasks:
            task.deadline += late_s
        self._soonest += late_s

    def step(self, now: float) -> bool:
        """Collect ends, keep deadlines (against `now`, monotonic seconds), fence, post. True if a read moved."""
        moved = self._collect(now)
        if now >= self._soonest:
            self._give_up_late(now)
        if not self._stopped:
            self._fence(now)
        if moved or self._changed:
            # with nothing new there is nothing to post, and an idle step has to be cheap
            self._changed = self._post(now)
            self._tidy(now)
        return moved or self._changed

    def add_peer(self, name: PeerName, offer: PeerOffer, ticket: Ticket[None]) -> None:
        """Answered once a scratch read from the peer is done and its lane is known. Idempotent for equal metadata.

        Raises, or answers with, `ProtocolError` (metadata damaged or another's), `ContractMismatch` (segments differ),
        `BoundsError` (memory that is not registered there), `PeerLost`, `DeadlineExceeded`, `LaneRefused`.
        """
        have = xxhash.xxh3_64_intdigest(offer.metadata)
        if have != offer.checksum:
            raise ProtocolError(f"agent metadata of {name} is damaged", have=have, announced=offer.checksum)
        known = self.peers.get(name)
        if known is not None and known.offer.metadata == offer.metadata and not known.lost and not known.leaving:
            if known.arrivals:
                known.arrivals.append(ticket.future)
            else:
                ticket.future.set_result(None)
            return
        if known is not None:
            if self._holds_reads(known):
                raise PeerLost(f"{name} was here before and has reads that have not settled", peer=name)
            self._forget(known)
        peer = Peer(name, offer, plan(self._pool, offer.pool))
        self._readers.current().link(peer)
        peer.arrivals.append(ticket.future)
        self.peers[name] = peer
        first_read: Ticket[Probe] = Ticket(drawn=ticket.drawn)
        first_read.future.add_done_callback(partial(self._arrived, peer))
        wanted = Wanted(Table.PAGES, _SCRATCH, _SCRATCH)
        self._take(ProbeTask(peer, wanted, first_read, self._settings.connect_s))

    def remove_peer(self, name: PeerName, ticket: Ticket[None]) -> None:
        """Takes no new read for it at once; answered when its last read has settled and it is gone."""
        peer = self.peers.get(name)
        if peer is None:
            ticket.future.set_result(None)
            return
        peer.leaving = self._changed = True
        peer.departures.append(ticket.future)

    def read(self, order: ReadOrder, ticket: Ticket[ReadOutcome]) -> None:
        """Raises `PeerLost` for a peer that is not there, `BoundsError` for pages outside the pools."""
        peer = self._connected(order.peer)
        peer.plan.check(order.local, order.remote)
        if len(order) > self._settings.landing_rows:
            raise BoundsError("pages of one read order", len(order), f"at most {self._settings.landing_rows}")
        task = OrderTask(order, peer, ticket, self._landing)
        if peer.lost:
            task.stop(peer.lost)
        else:
            self._take(task)

    def cancel(self, future: Future[ReadOutcome]) -> None:
        """Answer that read now. Nothing happens if it has its answer."""
        for task in self._tasks:
            if task.ticket.future is future:
                task.give_up("cancelled")
                self._changed = True

    def probe(self, name: PeerName, ticket: Ticket[Probe]) -> None:
        """One page-table row of the peer. Raises, or answers with, `PeerLost`, `DeadlineExceeded`, `TransferError`."""
        peer = self._connected(name)
        if peer.lost:
            raise PeerLost(f"{name}: {peer.lost}", peer=name, reason=peer.lost)
        row = self._landing.take(1)
        task = ProbeTask(peer, Wanted(Table.ROWS, row, _SCRATCH), ticket, self._settings.probe_s)
        task.release = partial(self._landing.give_back, row)
        self._take(task)

    def stop(self, reason: str) -> None:
        """Post nothing any more; what runs may end."""
        self._stopped = reason
        self._changed = True
        for task in self._tasks:
            task.stop(reason)

    def close(self, reason: str) -> None:
        """Destroy the agents, then answer every task. Raises what the backend raises: then nothing is settled."""
        try:
            self._settle(self._readers.close(), reason)
        finally:
            for task in self._tasks:
                task.give_up(reason)
            self._tasks.clear()
            self._serving.close()
        for peer in self.peers.values():
            for waiting in peer.departures:
                waiting.set_result(None)
        self.peers.clear()
        self._own, self._unsettled = (), ()

    def _take(self, task: Task) -> None:
        self._changed = True
        self._tasks.append(task)
        self._schedule.add(task)
        self._soonest = min(self._soonest, task.deadline)

    def _connected(self, name: PeerName) -> Peer:
        if self._stopped:
            raise TransferError(self._stopped, peer=name)
        peer = self.peers.get(name)
        if peer is None or peer.arrivals or peer.leaving:
            raise PeerLost(f"{name} is not connected", peer=name)
        return peer

    def _arrived(self, peer: Peer, first_read: Future[Probe]) -> None:
        """The scratch read has its answer: so has whoever added the peer."""
        error = first_read.exception() or self._refusal(peer)
        waiting, peer.arrivals = peer.arrivals, []
        if error is not None:
            peer.lost, peer.leaving = str(error), True
            self._changed = True
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _refusal(self, peer: Peer) -> LaneRefused | None:
        if peer.lane.rdma or not self._settings.require_rdma:
            return None
        return LaneRefused(
            f"RDMA is required, but reads from {peer.name} go over {peer.lane.name}",
            peer=peer.name,
            lane=peer.lane.name,
            detail=peer.lane.detail,
        )

    def _collect(self, now: float) -> bool:
        ended = [(agent, run, end) for agent in self._readers.agents for run, end in agent.collect()]
        for agent, run, end in ended:
            peer = run.task.peer
            if end.state is EndState.DONE and run.wanted.bytes:
                self._schedule.window.arrived(run.wanted.bytes, run.mark, now)
            if end.state is EndState.DONE and (lane := agent.first_lane(peer)) is not None:
                peer.lane = lane
                if not peer.arrivals and (refused := self._refusal(peer)):
                    self._lose(peer, str(refused))
            # before the others stop: this one would end as FAILED with them, though nothing proves that it has
            if end.state is EndState.LOST:
                run.task.lost(end)
            else:
                run.task.ended(run.wanted, end, run.post_s)
            if end.disconnected:
                self._lose(peer, end.reason)
        return bool(ended)

    def _lose(self, peer: Peer, reason: str) -> None:
        """No new read from it; those that run end by themselves or are fenced off."""
        if not peer.lost:
            peer.lost = reason
            self._changed = True
            for task in self._tasks:
                if task.peer is peer:
                    task.stop(reason)

    def _fence(self, now: float) -> None:
        """Peers with a read that has been unsettled for too long are lost, and the agent that it runs on goes. So does
        one whose probes without an end keep most of the landing rows: there would soon be none to read anything with.
        """
        since = now - self._settings.fence_after_s
        outstanding = self._readers.outstanding
        stalled = [run.task.peer for run in outstanding if run.task.holds(since)]
        scarce = 2 * self._landing.free < self._settings.landing_rows
        worn = scarce and any(run.task.ticket.future.done() and not run.task.pages for run in outstanding)
        if (stalled or worn) and self._readers.start(now):
            names = sorted({str(p.name) for p in stalled}) or ["lost probes"]
            logger.warning("reads from %s stay unsettled: fenced off", ", ".join(names))
            for peer in stalled:
                self._lose(peer, f"a read was unsettled for {self._settings.fence_after_s:g} s")
            return  # one slow thing a step
        self._settle(self._readers.finish(), FENCED)

    def _settle(self, runs: list[Run], reason: str) -> None:
        """Their agent is gone: nothing lands any more."""
        self._changed |= bool(runs)
        for run in runs:
            run.task.ended(run.wanted, End(EndState.FAILED, reason), run.post_s)

    def _post(self, now: float) -> bool:
        """One read a step at most: over a lane where the caller copies, posting is the whole copy.

        And so at most one peer is made known to a new agent, which takes some 10 ms.
        """
        chosen = self._schedule.choose()
        if chosen is None:
            return False
        task, most_bytes = chosen
        agent = self._readers.current()
        try:
            agent.link(task.peer)
        except PdkvError as error:
            # after a rotation: it was known to the agent before
            self._lose(task.peer, str(error))
            return True
        mark = self._schedule.window.mark(now)
        wanted = task.next(most_bytes)
        agent.post(task, wanted, mark)
        self._schedule.posted(task, wanted)
        return True

    def _give_up_late(self, now: float) -> None:
        for task in self._tasks:
            if now >= task.deadline and not task.over:
                task.give_up("no end within the deadline")
        waiting = (task.deadline for task in self._tasks if not task.ticket.future.done())
        self._soonest = min(waiting, default=math.inf)
        self._changed = True

    def _tidy(self, now: float) -> None:
        if any(task.over for task in self._tasks):
            self._tasks = [task for task in self._tasks if not task.over]
        for peer in tuple(self.peers.values()):
            if peer.leaving and not self._holds_reads(peer):
                self._forget(peer)
        self._unsettled = tuple(task for task in self._tasks if task.ticket.future.done())
        for task in self._unsettled:
            task.unsettled_since = now if task.unsettled_since is None else task.unsettled_since

    def _holds_reads(self, peer: Peer) -> bool:
        return bool(peer.running) or any(task.peer is peer and not task.over for task in self._tasks)

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.name]
        error: PdkvError | None = None
        for agent in self._readers.agents:
            try:
                agent.unlink(peer)
            except PdkvError as refused:
                error = refused
        for future in peer.departures:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
