"""Two transfer cores over one loopback net, stepped by hand: no thread, no clock."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TypeVar

from pdkv.ids import PeerName
from pdkv.transfer.agents import ReadingAgent
from pdkv.transfer.backends.faulty import FaultPlan, faulty_rails
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.core import TransferCore
from pdkv.transfer.orders import PeerOffer, ReadOrder, ReadOutcome, TransferSettings
from pdkv.transfer.tasks import Ticket
from tests.transfer.pools import Announced, TestPool, offer_of, peer_name

T = TypeVar("T")
STEPS = 1000
FAR_S = 1e6
"""Later than any deadline here."""


class CorePair:
    """`sink` reads from `source`, with the plan's faults; both pools hold 16 tiny pages."""

    def __init__(
        self,
        *,
        settings: TransferSettings | None = None,
        connect: bool = True,
        plan: FaultPlan | None = None,
        rails: int = 1,
    ) -> None:
        self.net = LoopbackNet()
        self.settings = settings or TransferSettings()
        self.rails = faulty_rails({str(i): self.net.backend for i in range(rails)}, plan or FaultPlan())
        self.source_name, self.sink_name = peer_name("prefill"), peer_name("decode")
        self.source_pool, self.sink_pool = TestPool(seed=1), TestPool(fill=False)
        self.source = self.core(self.source_name, self.source_pool)
        self.sink = TransferCore(self.rails, self.sink_name, self.sink_pool.map(), self.settings)
        if connect:
            self.done(self.add(self.source_name, offer_of(self.source.metadata, self.source_pool)))

    @property
    def reader(self) -> ReadingAgent:
        """The sink's agent for new reads, on its first rail."""
        return next(iter(self.sink._rails)).readers.current()

    def core(self, name: PeerName, pool: TestPool) -> TransferCore:
        rails = dict.fromkeys(self.rails, self.net.backend)
        return TransferCore(rails, name, pool.map(), self.settings)

    def add(self, name: PeerName, offer: PeerOffer) -> Future[None]:
        ticket: Ticket[None] = Ticket()
        self.sink.add_peer(name, offer, ticket)
        return ticket.future

    def remove(self, name: PeerName) -> Future[None]:
        ticket: Ticket[None] = Ticket()
        self.sink.remove_peer(name, ticket)
        return ticket.future

    def other(self, node: str, seed: int) -> tuple[PeerName, TestPool]:
        """One more source, added to the sink."""
        name, pool = peer_name(node), TestPool(seed=seed)
        core = self.core(name, pool)
        self.done(self.add(name, offer_of(core.metadata, pool)))
        return name, pool

    def order(self, local: list[int], remote: list[int], deadline_s: float = 1000.0) -> ReadOrder:
        announced = Announced.of(self.source_name, self.source_pool)
        return announced.order(local, remote, self.sink_pool.num_pages, deadline_s)

    def read(self, local: list[int], remote: list[int]) -> Future[ReadOutcome]:
        return self.post(self.order(local, remote))

    def read_from(self, source: tuple[PeerName, TestPool], local: list[int], remote: list[int]) -> Future[ReadOutcome]:
        return self.post(Announced.of(*source).order(local, remote, self.sink_pool.num_pages, 1000.0))

    def post(self, order: ReadOrder) -> Future[ReadOutcome]:
        ticket: Ticket[ReadOutcome] = Ticket()
        self.sink.read(order, ticket)
        return ticket.future

    def step(self, times: int = 1, *, later_s: float = 0.0) -> None:
        for _ in range(times):
            self.source.step(time.monotonic())
            self.sink.step(time.monotonic() + later_s)

    def done(self, future: Future[T], *, later_s: float = 0.0) -> T:
        """Step until it has its answer."""
        for _ in range(STEPS):
            if future.done():
                return future.result()
            self.step(later_s=later_s)
        raise TimeoutError(f"no answer after {STEPS} steps")
