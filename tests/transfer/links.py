"""A link that is modelled, for a schedule: a queue with a rate, looked at every half a millisecond."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.lines import Line, Peer
from pdkv.transfer.orders import Flow, TransferSettings
from pdkv.transfer.schedule import Choice, Mark, Schedule
from pdkv.transfer.tasks import Table, Task, Ticket, Wanted
from tests.transfer.pools import peer_name

GBIT = 125_000_000
"""Bytes a second."""
PAGE = 3_450_000
"""Of the real model, about."""
LOOK_S = 0.0005
SETTINGS = TransferSettings()
NONE = np.zeros(0, np.int32)


def peer(page_bytes: int = PAGE, lines: int = 1) -> Peer:
    ways = tuple(Line(i, AgentName("there"), b"") for i in range(lines))
    return Peer(peer_name("prefill"), None, SimpleNamespace(page_bytes=page_bytes), ways)  # type: ignore[arg-type]


class Pages(Task):
    """So many pages, and rows after them."""

    def __init__(self, source: Peer, pages: int, flow: Flow | None = None) -> None:
        super().__init__(source, Ticket(), 1e9)
        self.pages, self.flow = pages, flow
        self.page_bytes = source.plan.page_bytes
        self._left = pages
        self.rows = False
        self.began_s = self.ended_s = 0.0
        self.served = 0

    @property
    def due(self) -> bool:
        return self._left > 0 or (not self.rows and not self.outstanding)

    @property
    def left(self) -> int:
        return self._left * self.page_bytes

    def next(self, most_bytes: int) -> Wanted:
        if not self._left:
            self.rows = True
            return Wanted(Table.ROWS, NONE, NONE)
        part = min(self._left, max(1, most_bytes // self.page_bytes))
        self._left -= part
        self.served += part * self.page_bytes
        return Wanted(Table.PAGES, NONE, NONE, part * self.page_bytes)

    def ended(self, *_: Any) -> None:
        self.outstanding -= 1
        self.over = self.rows and not self.outstanding

    again = lost = stop = give_up = ended


@dataclass
class Link:
    """Serves reads one after the other, on each rail; rail i at `rates[i]`."""

    rates: tuple[float, ...]
    bunches: bool = False
    """As over TCP: a read ends with all that were posted on its rail before its own end was known."""
    schedule: Schedule = field(init=False)
    now: float = 0.0
    most_under_way: int = 0
    free_at: list[float] = field(init=False)
    served: list[int] = field(init=False)
    """Bytes, by rail."""
    running: list[tuple[float, Choice, Wanted, Mark]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = Schedule(SETTINGS, len(self.rates))
        self.free_at = [0.0] * len(self.rates)
        self.served = [0] * len(self.rates)

    def add(self, *tasks: Pages) -> None:
        for task in tasks:
            task.began_s = self.now
            self.schedule.add(task)

    def look(self) -> None:
        ended = [read for read in self.running if self.at(read) <= self.now]
        self.running = [read for read in self.running if self.at(read) > self.now]
        for _, read, wanted, mark in ended:
            read.line.finished(wanted.bytes)
            self.schedule.window.arrived(wanted.bytes, mark, self.now)
            read.task.ended(wanted, None, 0.0)
            if isinstance(read.task, Pages) and read.task.over:
                read.task.ended_s = self.now
        while (chosen := self.schedule.choose()) is not None:
            task, line = chosen.task, chosen.line
            mark, wanted = self.schedule.window.mark(self.now), task.next(chosen.most_bytes)
            task.outstanding += 1
            line.began(wanted.bytes, self.now)
            self.schedule.posted(task, wanted)
            self.free_at[line.rail] = max(self.now, self.free_at[line.rail]) + wanted.bytes / self.rates[line.rail]
            self.served[line.rail] += wanted.bytes
            self.running.append((self.free_at[line.rail], chosen, wanted, mark))
        self.most_under_way = max(self.most_under_way, sum(wanted.bytes for _, _, wanted, _ in self.running))
        self.now += LOOK_S

    def at(self, read: tuple[float, Choice, Wanted, Mark]) -> float:
        """When it ends."""
        return self.free_at[read[1].line.rail] if self.bunches else read[0]

    def run(self, *tasks: Pages) -> None:
        while not all(task.over for task in tasks):
            self.look()


def took(*tasks: Pages) -> list[float]:
    return [task.ended_s - task.began_s for task in tasks]


def post(schedule: Schedule) -> Task | None:
    """The next read, without a link; whose it is."""
    chosen = schedule.choose()
    if chosen is None:
        return None
    wanted = chosen.task.next(chosen.most_bytes)
    chosen.line.began(wanted.bytes, 0.0)
    chosen.task.outstanding += 1
    schedule.posted(chosen.task, wanted)
    return chosen.task
