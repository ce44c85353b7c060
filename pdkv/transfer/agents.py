"""Agents on this node's pool: the one that serves, and one that reads, with everything that is bound to it.

Guarantees: what was prepared on an agent is used on that agent alone; a read counts as outstanding until its end is
proven, also after the backend gave it up; once `close` has returned, nothing lands through this agent any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdkv.errors import PdkvError
from pdkv.geometry.page_layout import PoolMap
from pdkv.transfer.backends.base import AgentName, Backend, End, EndState, Lane, Posted, Prepared, Side
from pdkv.transfer.descriptors import table_rows
from pdkv.transfer.landing import ROW_BYTES, LandingRows
from pdkv.transfer.lines import Line, Peer
from pdkv.transfer.orders import Registration
from pdkv.transfer.schedule import Mark
from pdkv.transfer.tasks import Table, Task, Wanted


def serving(make: Callable[[], Backend], pool: PoolMap) -> tuple[Backend, Registration]:
    """The agent whose metadata peers get: pool and page table are registered on it, and it never reads.

    Raises what making or registering raises, with nothing left behind.
    """
    backend = make()
    try:
        registration = _register_pool(backend, pool)
        backend.register(pool.table_base, pool.table_region.length, "DRAM", 0)
    except PdkvError:
        backend.close()
        raise
    return backend, registration


@dataclass(slots=True, eq=False)
class Run:
    """A read that was posted."""

    task: Task
    line: Line
    wanted: Wanted
    mark: Mark
    posted: list[Posted] = field(default_factory=list)
    """What the backend has not ended; one, or the pieces that a witness was to see."""
    post_s: float = 0.0
    bytes: int = 0
    """Of pieces that ended DONE, as the backend counted; so `descriptors`."""
    descriptors: int = 0
    failure: End | None = None
    """How a piece ended otherwise: the first one, but one that is LOST before one that is not."""
    stranded: bool = False
    """Its line is down: once nothing lands by it any more, another line brings it."""


@dataclass(slots=True, eq=False)
class _Link:
    """A peer on one agent: what is prepared for reading from it."""

    local: Prepared
    remote: Prepared
    rows: Prepared
    """The peer's page table; index = page."""
    proven: bool = False
    """A read of it has ended well here."""


class ReadingAgent:
    """One agent that reads into the pool and the landing rows. Raises as `serving` does."""

    def __init__(self, name: AgentName, backend: Backend, pool: PoolMap, landing: LandingRows, look_bytes: int) -> None:
        self.name = name
        self._look_bytes = look_bytes
        self.running: list[Run] = []
        self.lost: list[Run] = []
        """Given up by the backend without proof of their end."""
        self._backend = backend
        self._pool = pool
        self._links: dict[Line, _Link] = {}
        try:
            _register_pool(backend, pool)
            backend.register(landing.address, landing.length, "DRAM", 0)
            self._landing = backend.prepare(None, landing.table(), "DRAM")
        except PdkvError:
            backend.close()
            raise

    def knows(self, line: Line) -> bool:
        return line in self._links

    def link(self, peer: Peer, line: Line) -> None:
        """Make a peer's memory readable here by that line, if it isn't. Leaves nothing behind if it raises.

        Raises `ProtocolError` (metadata damaged or another's), `BoundsError` (memory that is not registered there),
        `PeerLost`.
        """
        if not self.knows(line):
            self._links[line] = self._linked(peer, line)

    def unlink(self, line: Line) -> None:
        """Only when none of its reads runs. Raises `TransferError` if the backend can't let it go."""
        link = self._links.pop(line, None)
        if link is not None:
            for prepared in (link.local, link.remote, link.rows):
                self._backend.release(prepared)
            self._backend.remove_peer(line.agent)

    def post(self, task: Task, line: Line, wanted: Wanted, mark: Mark) -> None:
        """Start a read on a line that is linked."""
        link = self._links[line]
        if wanted.table is Table.PAGES:
            mine, theirs = link.local, link.remote
        else:
            mine, theirs = self._landing, link.rows
        task.outstanding += 1
        line.began(wanted.bytes, mark.now)
        run = Run(task, line, wanted, mark)
        self.running.append(run)
        seen = wanted.witness if line.lane.copied else None
        for piece in [wanted] if seen is None else wanted.split(self._look_bytes):
            began = time.monotonic()
            run.posted.append(self._backend.post(Side(mine, piece.local), Side(theirs, piece.remote)))
            run.post_s += time.monotonic() - began
            if seen is not None:
                self._poll(run)
                if run.failure:
                    return
                if not run.posted:
                    seen.landed(piece.part)

    def collect(self, now: float) -> list[tuple[Run, End]]:
        """Reads that have ended since; those that ended LOST stay outstanding."""
        self._backend.progress()
        if not self.running:
            return []
        ended = [(run, end) for run in self.running if (end := self._poll(run)) is not None]
        for run, end in ended:
            self.running.remove(run)
            run.line.finished(run.wanted.bytes)
            run.line.quiet_s = now
            if end.state is EndState.LOST:
                self.lost.append(run)
            else:
                run.task.outstanding -= 1
        return ended

    def _poll(self, run: Run) -> End | None:
        """When all of it has ended, how it did: the worst of its pieces."""
        running = []
        for posted in run.posted:
            end = self._backend.poll(posted)
            if end is None:
                running.append(posted)
            elif end.state is EndState.DONE:
                run.bytes += end.bytes
                run.descriptors += end.descriptors
            else:
                run.failure = end if run.failure is None else _worse(run.failure, end)
        run.posted = running
        if running:
            return None
        return run.failure or End(EndState.DONE, bytes=run.bytes, descriptors=run.descriptors)

    def first_lane(self, line: Line) -> Lane | None:
        """What carries the line's reads, when the first of them has just ended well; None after that."""
        link = self._links.get(line)
        if link is None or link.proven:
            return None
        link.proven = True
        return self._backend.lane(line.agent)

    def close(self) -> list[Run]:
        """Destroy it. What was outstanding can't write any more. Raises `TransferError`: then it still can."""
        self._backend.close()
        outstanding = self.running + self.lost
        for run in outstanding:
            run.task.outstanding -= 1
        for run in self.running:
            run.line.finished(run.wanted.bytes)
        self.running, self.lost = [], []
        self._links.clear()
        return outstanding

    def _linked(self, peer: Peer, line: Line) -> _Link:
        agent, theirs = line.agent, peer.offer.pool
        self._backend.add_peer(agent, line.metadata)
        prepared: list[Prepared] = []
        try:
            for owner, table, memory in (
                (None, peer.plan.local_table(), self._pool.memory),
                (agent, peer.plan.remote_table(), theirs.memory),
                (agent, table_rows(theirs, ROW_BYTES), "DRAM"),
            ):
                prepared.append(self._backend.prepare(owner, table, memory))
        except PdkvError:
            for held in prepared:
                self._backend.release(held)
            self._backend.remove_peer(agent)
            raise
        local, remote, rows = prepared
        return _Link(local, remote, rows)


def _worse(one: End, other: End) -> End:
    """Of two pieces that brought nothing: LOST, if either is; disconnected, if either says so."""
    worst = other if other.state is EndState.LOST else one
    return replace(worst, disconnected=one.disconnected or other.disconnected)


def _register_pool(backend: Backend, pool: PoolMap) -> Registration:
    began = time.monotonic()
    for region in pool.regions:
        backend.register(region.address, region.length, pool.memory, pool.device)
    size = sum(region.length for region in pool.regions)
    return Registration(len(pool.regions), size, time.monotonic() - began)
