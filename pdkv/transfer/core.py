"""The transfer engine without its thread: peers, tasks and reads, moved on one step at a time.

Guarantees: one stalled peer holds back only reads of its own (a share of the bytes under way); a peer that
disconnected gets no new read; a peer is removed only when none of its reads is unsettled; adding and removing one peer
never overlap; a read that stays unsettled is fenced off, and settles with its agent's end, while other peers' reads
end well; a read that went astray on a line that is down is posted on another line only when it has proven to be over,
by its end or its agent's; `close` answers everything that is outstanding, after the agents are gone.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from functools import partial

import xxhash

from pdkv.errors import BoundsError, PdkvError, PeerLost, ProtocolError, TransferError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import PeerName
from pdkv.transfer.agents import Run
from pdkv.transfer.backends.base import BackendFactory, End, EndState, Lane
from pdkv.transfer.descriptors import plan
from pdkv.transfer.failover import Failover
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Peer
from pdkv.transfer.orders import (
    PeerOffer,
    Probe,
    ReadOrder,
    ReadOutcome,
    TransferSettings,
    TransferStatus,
)
from pdkv.transfer.rails import RailFactories, Rails
from pdkv.transfer.schedule import Schedule
from pdkv.transfer.tasks import SCRATCH, OrderTask, ProbeTask, Table, Task, Ticket, Wanted, held_back

logger = logging.getLogger(__name__)

FENCED = "its agent was fenced off and destroyed"


class TransferCore:
    """Owns the agents. Not thread-safe: everything but `status` is called from the thread that made it.

    Two agents a rail, so that a fence never cuts off peers that read from here: one serves, and lives as long as the
    core; another reads, and is replaced by a fence.
    """

    def __init__(
        self, rails: BackendFactory | RailFactories, name: PeerName, pool: PoolMap, settings: TransferSettings
    ) -> None:
        """One backend factory is one rail, over whatever device."""
        factories = {"": rails} if callable(rails) else rails
        self._pool = pool
        self._settings = settings
        self._tasks: list[Task] = []
        self._schedule = Schedule(settings, len(factories))
        self._stopped = ""
        self._soonest = math.inf
        """Of the deadlines; nothing is due before."""
        self._changed = False
        """There may be something to post or to tidy up, without a read that ended."""
        self._unsettled: tuple[Task, ...] = ()
        self.peers: dict[PeerName, Peer] = {}
        self._landing = LandingRows(settings.landing_rows)
        self._rails = Rails(factories, name, pool, self._landing, settings)
        self._failover = Failover(self._rails, settings, self._take)
        self._closed = False
        self.metadata, self.backend_name = self._rails.metadata, self._rails.backend_name

    @property
    def busy(self) -> bool:
        """Something is read or waits to be."""
        return bool(self._tasks)

    @property
    def reading(self) -> bool:
        """A posted read has not ended."""
        return self._rails.reading

    @property
    def carries(self) -> bool:
        """What peers read from here moves only while somebody looks: not where the reader's own thread copies."""
        return not self.peers or not all(line.lane.copied for peer in self.peers.values() for line in peer.lines)

    def status(self, now: float) -> TransferStatus:
        """From any thread: what the last step left."""
        readers = [rail.readers for rail in self._rails]
        return TransferStatus(
            agents=() if self._closed else self._rails.agents,
            rotations=sum(rotation.rotations for rotation in readers),
            unsettled=held_back(self._unsettled, now),
            fence_error="; ".join(filter(None, (rotation.error for rotation in readers))),
            registration=self._rails.registration,
            rails=self._rails.status(tuple(self.peers.values())),
        )

    def serve(self) -> None:
        """Let peers connect, and send what they read where that is ours to do."""
        self._rails.serve()

    def postpone(self, late_s: float) -> None:
        """Nobody looked for so long: deadlines of what is waited for move on by it."""
        for task in self._tasks:
            task.deadline += late_s
        self._soonest += late_s
        for peer in self.peers.values():
            for line in peer.lines:
                line.quiet_s += late_s

    def step(self, now: float) -> bool:
        """Collect ends, keep deadlines (against `now`, monotonic seconds), fence, post. True if a read moved."""
        moved = self._collect(now)
        if now >= self._soonest:
            self._give_up_late(now)
        if not self._stopped:
            if self._failover.watch(self.peers.values(), now):
                self._changed = True
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
        peer = Peer.offered(name, offer, plan(self._pool, offer.pool), len(self._rails))
        self._introduce(peer, ticket.drawn)
        peer.arrivals.append(ticket.future)
        self.peers[name] = peer
        first_read: Ticket[Probe] = Ticket(drawn=ticket.drawn)
        first_read.future.add_done_callback(partial(self._arrived, peer))
        self._take(ProbeTask(peer, SCRATCH, first_read, self._settings.connect_s))

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
        task = ProbeTask(peer, Wanted(Table.ROWS, row, SCRATCH.remote), ticket, self._settings.probe_s)
        task.release = partial(self._landing.give_back, row)
        self._take(task)

    def stop(self, reason: str) -> None:
        """Post nothing any more; what runs may end."""
        self._stopped, self._changed = reason, True
        for task in self._tasks:
            task.stop(reason)

    def close(self, reason: str) -> None:
        """Destroy the agents, then answer every task, and whoever waits for a peer to be gone. Raises what the backend
        raises: then nothing is settled, and no peer is gone."""
        try:
            for run in self._rails.close():
                run.task.ended(run.wanted, End(EndState.FAILED, reason), run.post_s)
        except Exception as error:
            self._answer_all(reason, error)
            raise
        self._answer_all(reason, None)
        self._closed, self._unsettled = True, ()

    def _answer_all(self, reason: str, error: Exception | None) -> None:
        for task in self._tasks:
            task.give_up(reason)
        self._tasks.clear()
        for peer in self.peers.values():
            peer.departed(error)
        self.peers.clear()

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
        refusal = peer.refusal() if self._settings.require_rdma else None
        error = first_read.exception() or refusal
        waiting, peer.arrivals = peer.arrivals, []
        if error is not None:
            peer.lost, peer.leaving = str(error), True
            self._changed = True
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _introduce(self, peer: Peer, now: float) -> None:
        """Make the peer known on all lines. Raises what `ReadingAgent.link` raises, unless another line is left."""
        for line in peer.lines:
            try:
                self._rails.linked(peer, line)
            except PdkvError as error:
                # another device may do, but what the peer says of itself is wrong by any
                one_line = isinstance(error, PeerLost | TransferError)
                if not (one_line and self._failover.failed(peer, line, str(error), now)):
                    self._rails.unlink(peer)
                    raise

    def _collect(self, now: float) -> bool:
        ended = self._rails.collect(now)
        if not ended:
            return False
        for agent, run, end in ended:
            if end.state is EndState.DONE:
                if run.wanted.bytes:
                    self._schedule.window.arrived(run.wanted.bytes, run.mark, now)
                self._failover.moved(run.task.peer, run.line, now)
                self._note_lane(run, agent.first_lane(run.line))
                run.task.ended(run.wanted, end, run.post_s)
            else:
                self._ended_without(run, end, now)
        return True

    def _note_lane(self, run: Run, lane: Lane | None) -> None:
        peer = run.task.peer
        if lane is not None:
            run.line.lane = lane
            if self._settings.require_rdma and not peer.arrivals and (refusal := peer.refusal()):
                self._lose(peer, str(refusal))

    def _ended_without(self, run: Run, end: End, now: float) -> None:
        """It didn't bring its data: another line has to, where there is one."""
        peer = run.task.peer
        elsewhere = self._failover.failed(peer, run.line, end.reason, now)
        if elsewhere and self._is_wanted(run):
            if end.state is EndState.FAILED:
                self._again(run)
            return  # LOST: it may still write, until its agent is gone
        # before the others stop: this one would end as FAILED with them, though nothing proves that it has
        if end.state is EndState.LOST:
            run.task.lost(end)
        else:
            run.task.ended(run.wanted, end, run.post_s)
        if end.disconnected and not elsewhere:
            self._lose(peer, end.reason)

    def _is_wanted(self, run: Run) -> bool:
        """Any line may bring it, and somebody waits for it."""
        return not run.task.failure and run.task.line is None

    def _again(self, run: Run) -> None:
        """Nothing lands any more by this run: its part may be posted anew."""
        run.task.again(run.wanted)
        self._schedule.again(run.task)

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
        for rail in self._rails:
            outstanding = rail.readers.outstanding
            # as a rule none: this is asked in every step
            if astray := [run for run in outstanding if run.stranded or run.task.ticket.future.done()]:
                since = now - self._settings.fence_after_s
                scarce = 2 * self._landing.free < self._settings.landing_rows
                stalled = [run.task.peer for run in astray if run.task.holds(since)]
                worn = scarce and any(run.task.ticket.future.done() and not run.task.pages for run in astray)
                stranded = any(run.stranded for run in astray)
                if (stalled or worn or stranded) and rail.readers.start(now, alone=not stranded):
                    what = "a line that is down" if stranded else "lost probes"
                    names = sorted({str(peer.name) for peer in stalled}) or [what]
                    logger.warning("reads from %s stay unsettled: fenced off", ", ".join(names))
                    for peer in stalled:
                        self._lose(peer, f"a read was unsettled for {self._settings.fence_after_s:g} s")
                    return  # one slow thing a step
            if settled := rail.readers.finish():
                self._settle(settled)

    def _settle(self, runs: list[Run]) -> None:
        """Their agent is gone: nothing lands any more."""
        self._changed = True
        for run in runs:
            if run.stranded and self._is_wanted(run):
                self._again(run)
            else:
                run.task.ended(run.wanted, End(EndState.FAILED, FENCED), run.post_s)

    def _post(self, now: float) -> bool:
        """One read a step at most: over a lane where the caller copies, posting is the whole copy.

        And so at most one peer is made known to a new agent, which takes some 10 ms.
        """
        chosen = self._schedule.choose()
        if chosen is None:
            return False
        task, line = chosen.task, chosen.line
        try:
            agent = self._rails.linked(task.peer, line)
        except PdkvError as error:
            # after a rotation: it was known to the agent before
            if task.line is not None:
                task.stop(str(error))
            if not self._failover.failed(task.peer, line, str(error), now):
                self._lose(task.peer, str(error))
            return True
        mark = self._schedule.window.mark(now)
        wanted = task.next(chosen.most_bytes)
        agent.post(task, line, wanted, mark)
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
        try:
            self._rails.unlink(peer)
        except PdkvError as refused:
            error = refused
        peer.departed(error)
