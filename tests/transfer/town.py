"""Two nodes with rails over one loopback net, on a clock set by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pdkv.errors import TransferError
from pdkv.transfer.backends.base import AgentName, Backend
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.core import TransferCore
from pdkv.transfer.lines import Line, serving_agent
from pdkv.transfer.orders import ReadOrder, ReadOutcome, TransferSettings
from pdkv.transfer.tasks import Ticket
from tests.transfer.pools import Announced, TestPool, offer_of, peer_name

T = TypeVar("T")
PAGE = TestPool(num_pages=2, fill=False).fmt.page_bytes
SETTINGS = TransferSettings(read_max_bytes=PAGE, fence_every_s=0.0, line_stall_s=1.0)
PAGES = list(range(1, 13))
TICK_S = 0.05
AT_ONCE_S = 0.5
"""Less than a line may be quiet."""
LONG_S = 8.0


class Town:
    """`sink` reads from `source`, each with some rails; nothing happens but by `step`, and that takes TICK_S."""

    def __init__(self, here: int = 2, there: int = 2, *, connect: bool = True) -> None:
        self.net = LoopbackNet()
        self.began = self.now = time.monotonic()
        self.broken: set[str] = set()
        """Devices of the sink on which no agent can be made."""
        self.source_name, self.source_pool = peer_name("prefill"), TestPool(seed=1)
        self.sink_pool = TestPool(fill=False)
        rails = {f"there{i}": self.net.backend for i in range(there)}
        self.source = TransferCore(rails, self.source_name, self.source_pool.map(), SETTINGS)
        mine = {f"here{i}": self.factory(f"here{i}") for i in range(here)}
        self.sink = TransferCore(mine, peer_name("decode"), self.sink_pool.map(), SETTINGS)
        if connect:
            self.done(self.add())

    def factory(self, device: str) -> Callable[[AgentName], Backend]:
        def make(name: AgentName) -> Backend:
            if device in self.broken:
                raise TransferError(f"no device {device}")
            return self.net.backend(name)

        return make

    def add(self) -> Future[None]:
        ticket: Ticket[None] = Ticket(drawn=self.now)
        self.sink.add_peer(self.source_name, offer_of(self.source.metadata, self.source_pool), ticket)
        return ticket.future

    def order(self, pages: list[int], deadline_s: float = 30.0) -> ReadOrder:
        announced = Announced.of(self.source_name, self.source_pool)
        return announced.order(pages, pages[::-1], self.sink_pool.num_pages, deadline_s)

    def read(self, pages: list[int] = PAGES, deadline_s: float = 30.0) -> Future[ReadOutcome]:
        ticket: Ticket[ReadOutcome] = Ticket(drawn=self.now)
        self.sink.read(self.order(pages, deadline_s), ticket)
        return ticket.future

    def agent(self, rail: int) -> AgentName:
        """That serves on a rail of the source."""
        return serving_agent(self.source_name, rail)

    def line(self, number: int) -> Line:
        return self.sink.peers[self.source_name].lines[number]

    def step(self, seconds: float = TICK_S) -> None:
        until = self.now + seconds
        while self.now < until:
            for _ in range(4):
                self.sink.step(self.now)
            self.now += TICK_S

    def done(self, future: Future[T], within_s: float = LONG_S) -> T:
        until = self.now + within_s
        while not future.done() and self.now < until:
            self.step()
        assert future.done(), f"no answer within {within_s} s"
        return future.result()

    def right(self, pages: list[int] = PAGES) -> bool:
        return all(
            self.sink_pool.page(here) == self.source_pool.page(there)
            for here, there in zip(pages, pages[::-1], strict=True)
        )

    def late_writes(self, rail: int) -> bool:
        """Whether something lands in the sink's pool when that rail goes on."""
        self.sink_pool.set_pages(0xAA)
        self.net.join(self.agent(rail))
        self.step(0.5)
        return any(self.sink_pool.page(p) != b"\xaa" * PAGE for p in PAGES)


def some_done(town: Town) -> None:
    """The order that runs has brought its first pages."""
    while not any(any(town.sink_pool.page(p)) for p in PAGES):
        town.sink.step(town.now)


def down(town: Town) -> None:
    """Rail 1 is down, and its reads have come over the other."""
    future = town.read()
    town.net.cut(town.agent(1))
    some_done(town)
    town.done(future)
    assert town.line(1).down
