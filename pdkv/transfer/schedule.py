"""Which read is posted next, how large it is and on which line: the links are shared by rule.

Guarantees: as many bytes are under way as arrive in `under_way_s`, measured, so that whoever comes next waits for no
more, but behind the whole rest of a flow near its end for twice that; and the links never wait for us. Each peer has
its share of those bytes, so that one that stands still holds back no other, and its lines share that: the next read
goes to the one with the least under way. Flows take turns by bytes, also over several peers; a flow near its end goes
before those that are not; of what is posted while both wait, the others get an eighth. A flow that waits is served
after a bounded number of bytes, whatever comes meanwhile: who is new begins behind all that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdkv.transfer.lines import Line, Peer
from pdkv.transfer.orders import TransferSettings
from pdkv.transfer.tasks import Task, Wanted

LEAST_BYTES = 2 << 20
"""Under way at least."""
READS_AT_ONCE = 2
"""On one line at least, whatever their size: the next one is known there when one ends. One more is the
first of a flow near its end: it waits behind bytes that are under way, and not for the end of some as well."""
COPIED_SHARES = 4
"""Of what is to be under way, in one read over a lane that copies: between two of them 0.3 ms are lost."""
REST_SHARES = 2
"""Under way on one line at most with the whole rest of a flow near its end, in one read: in two it would wait twice
behind what is under way."""
LARGEST_AT_ONCE = 4
"""Under way at most: so many reads of the largest size, on each rail."""
LITTLE_BYTES = 16 << 20
"""A flow with so little left is near its end: a tail, a short request."""
LAST_SHARE = 16
"""So is one with a 16th of all its pages left: its last chunk."""
AHEAD = 7
"""Bytes that flows near their end get for one that others get."""
_SMOOTH = 4
"""A new measurement counts for a quarter."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: seconds, and the bytes that had arrived by then."""

    now: float
    arrived: int


class Window:
    """How many bytes are to be under way, by the rate at which they arrive, from all peers together."""

    def __init__(self, settings: TransferSettings, rails: int = 1) -> None:
        self._under_way_s = settings.under_way_s
        self._most = LARGEST_AT_ONCE * settings.read_max_bytes * rails
        self._rate = 0.0
        """Bytes a second."""
        self._arrived = 0

    @property
    def bytes(self) -> int:
        return int(min(self._most, max(LEAST_BYTES, self._rate * self._under_way_s)))

    def mark(self, now: float) -> Mark:
        return Mark(now, self._arrived)

    def arrived(self, count: int, posted: Mark, now: float) -> None:
        """A read that was posted at `posted` has brought so many bytes.

        What arrived meanwhile, its own and others' bytes, says how fast the links are, however long it stood in line.
        """
        self._arrived += count
        took_s = now - posted.now
        if took_s > 0:
            rate = (self._arrived - posted.arrived) / took_s
            self._rate += (rate - self._rate) / (_SMOOTH if self._rate else 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A read of so many bytes of pages at most, or of page-table rows, on that line."""

    task: Task
    line: Line
    most_bytes: int


@dataclass(slots=True, eq=False)
class _Flow:
    """Tasks of one flow that have pages left to be posted, in order."""

    tasks: deque[Task] = field(default_factory=deque)
    turn: int = 0
    """The lowest goes first; grows by the bytes it is served."""
    ending: bool = False

    def head(self) -> Task | None:
        while self.tasks and not self.tasks[0].left:
            self.tasks.popleft()
        return self.tasks[0] if self.tasks else None

    def near_end(self) -> bool:
        last = self.tasks[-1]
        page_bytes = last.peer.plan.page_bytes
        pages, after = (last.pages, 0) if last.flow is None else (last.flow.pages, last.flow.after)
        left = sum(task.left for task in self.tasks) + after * page_bytes
        return left <= max(LITTLE_BYTES, pages * page_bytes // LAST_SHARE)


class Schedule:
    """The tasks that have something to post."""

    def __init__(self, settings: TransferSettings, rails: int = 1) -> None:
        self.window = Window(settings, rails)
        self._largest = settings.read_max_bytes
        self._short: list[Task] = []
        """Probes, and orders of which only page-table rows are left: they cost no time on a link."""
        self._flows: dict[object, _Flow] = {}
        self._owed = 0.0
        """Bytes that flows not near their end are behind with; negative: ahead."""
        self._contended = False

    def add(self, task: Task) -> None:
        """It has something to post, or will have."""
        if not task.left:
            self._short.append(task)
            return
        flow = self._flows.setdefault(_key(task), _Flow())
        flow.tasks.append(task)
        self._place(flow, new=len(flow.tasks) == 1)

    def again(self, task: Task) -> None:
        """A part of it that was posted is to be posted anew."""
        if task in self._short:
            self._short.remove(task)
        if not task.left:
            self._short.append(task)
            return
        flow = self._flows.setdefault(_key(task), _Flow())
        if task not in flow.tasks:
            flow.tasks.appendleft(task)
        self._place(flow, new=len(flow.tasks) == 1)

    def choose(self) -> Choice | None:
        """What is to be posted now; None while nothing may be."""
        self._short = [task for task in self._short if not (task.over or task.failure)]
        for task in self._short:
            if task.due and not task.left:
                return Choice(task, task.line or min(task.peer.up, key=lambda line: line.load), 0)
        if not self._flows:
            return None
        open_ = list(self._open())
        ending = [choice for choice in open_ if choice[0].ending]
        others = [choice for choice in open_ if not choice[0].ending]
        self._contended = bool(ending and others)
        if not self._contended:
            self._owed = 0.0
        among = others if not ending or self._owed > 0 else ending
        return min(among, key=lambda choice: choice[0].turn)[1] if among else None

    def posted(self, task: Task, wanted: Wanted) -> None:
        """That read was posted."""
        if not wanted.bytes:
            return
        key = _key(task)
        flow = self._flows[key]
        if self._contended:
            self._owed += wanted.bytes / AHEAD if flow.ending else -wanted.bytes
        # who fell behind because its peer was full catches up by a little, not by all
        flow.turn = max(flow.turn, self._last(flow, ending=flow.ending) - LITTLE_BYTES) + wanted.bytes
        if not task.left:
            self._short.append(task)
        if flow.head() is None:
            del self._flows[key]
        else:
            self._place(flow, new=False)

    def _open(self) -> Iterator[tuple[_Flow, Choice]]:
        """Flows of which something may be posted, and what."""
        # tasks that have stopped leave nothing behind
        self._flows = {key: flow for key, flow in self._flows.items() if flow.head() is not None}
        heads = [(flow, flow.tasks[0]) for flow in self._flows.values() if flow.tasks[0].due]
        of: dict[Peer, int] = {}
        for _, head in heads:
            of[head.peer] = of.get(head.peer, 0) + 1
        for flow, head in heads:
            lines = head.peer.up
            share = self.window.bytes * of[head.peer] // (len(heads) * len(lines))
            # what is copied while it is posted runs beside no other read, and each begins with cold caches
            copied = all(line.lane.copied for line in lines)
            fit = COPIED_SHARES * share if copied else share // READS_AT_ONCE
            rest = -(-head.left // len(lines))
            begins = flow.ending and not head.outstanding
            if begins and min(line.under_way for line in lines) + rest <= REST_SHARES * share:
                fit = max(fit, rest)
            most = max(head.peer.plan.page_bytes, min(self._largest, fit))
            # the same for all of a peer's flows: small reads must not fill the room that a large one waits for
            at_once = READS_AT_ONCE + begins
            room = [line for line in lines if line.parts < at_once or line.under_way + most <= share]
            if room:
                least = min(room, key=lambda line: line.load)
                yield flow, Choice(head, least, min(most, rest))

    def _place(self, flow: _Flow, *, new: bool) -> None:
        """Behind those that wait, if it is new to them."""
        ending = flow.near_end()
        if new or ending is not flow.ending:
            flow.turn = self._last(flow, ending=ending)
            flow.ending = ending

    def _last(self, flow: _Flow, *, ending: bool) -> int:
        """The highest turn of others."""
        turns = [other.turn for other in self._flows.values() if other is not flow and other.ending is ending]
        return max(turns, default=flow.turn)


def _key(task: Task) -> object:
    return task if task.flow is None else task.flow.id
