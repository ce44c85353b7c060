"""A second process that serves a pool over NIXL, and an engine here that reads from it: two nodes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from pdkv.geometry.page_layout import PlacementKind, PoolMap
from pdkv.ids import PeerName
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.backends.base import BackendFactory
from pdkv.transfer.engine import ReadOutcome, TransferEngine, TransferSettings
from tests.transfer.pools import Announced, TestPool, peer_name

TCP = (("UCX_TLS", "tcp,self"),)
WAIT_S = 30.0
"""Longer than anything here takes; a test that gets there has failed."""


@dataclass(frozen=True)
class Served:
    """What the serving process says of itself."""

    announced: Announced
    metadata: bytes
    checksum: int
    map: PoolMap


@dataclass(frozen=True)
class ServeOptions:
    node: str = "prefill"
    num_pages: int = 16
    kind: PlacementKind = "page_major"
    seed: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    rails: int = 0
    """Over the loopback device; 0: one over any."""


def rails(count: int) -> dict[str, BackendFactory]:
    devices = {f"lo {i}": "lo" for i in range(count)} or {"": ""}
    return {name: backend_factory("nixl", device) for name, device in devices.items()}


class Source:
    """The process, and the way to ask things of it."""

    def __init__(self, options: ServeOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        self.options = options

    @cached_property
    def served(self) -> Served:
        """Waits until it serves."""
        answer = self._answer()
        assert isinstance(answer, Served)
        return answer

    @property
    def name(self) -> PeerName:
        return self.served.announced.name

    @property
    def pool(self) -> TestPool:
        """The same bytes, made here."""
        return TestPool(self.options.num_pages, self.options.kind, self.options.seed)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ask(self, what: str, *arguments: Any) -> Any:
        """Returns when it is done over there."""
        self._pipe.send((what, arguments))
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Returns when the process is gone."""
        self._process.kill()
        self._process.join(WAIT_S)

    def stop(self) -> int:
        """Close the engine over there and end; the exit status."""
        if self._process.is_alive():
            self._pipe.send(("stop", ()))
        self._process.join(WAIT_S)
        if self._process.is_alive():
            self.kill()
        return self._process.exitcode or 0

    def _answer(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("the serving process says nothing")
        return self._pipe.recv()


def add(engine: TransferEngine, source: Served) -> None:
    engine.add_peer(source.announced.name, source.metadata, source.checksum, source.map).result(WAIT_S)


class Reader:
    """An engine of this process."""

    def __init__(
        self,
        num_pages: int = 16,
        kind: PlacementKind = "page_major",
        settings: TransferSettings | None = None,
        rail_count: int = 0,
    ) -> None:
        self.pool = TestPool(num_pages, kind, fill=False)
        self.engine = TransferEngine(rails(rail_count), peer_name("decode"), self.pool.map(), settings=settings)

    def start(self, source: Served, pages: list[int], deadline_s: float = WAIT_S) -> Future[ReadOutcome]:
        return self.engine.read(source.announced.order(pages, pages, self.pool.num_pages, deadline_s))

    def read(self, source: Served, pages: list[int]) -> ReadOutcome:
        return self.start(source, pages).result(WAIT_S)

    def start_until_it_lands(
        self, source: Served, deadline_s: float = WAIT_S, pages: list[int] | None = None
    ) -> Future[ReadOutcome]:
        """A read of those or all pages, returned when some of its bytes are there."""
        self.pool.set_pages(0)
        pages = pages or list(range(1, self.pool.num_pages))
        future = self.start(source, pages, deadline_s)
        while not any(self.pool.page(pages[0])):
            assert not future.done(), future.result()
        return future


def _serve(pipe: Connection, options: ServeOptions) -> None:
    # NIXL imports torch to ask for its CUDA version; many processes at once wait long for that
    sys.modules.setdefault("torch", ModuleType("torch"))
    os.environ.update(options.environment)
    pool = TestPool(options.num_pages, options.kind, options.seed)
    name = peer_name(options.node)
    engine = TransferEngine(rails(options.rails), name, pool.map())
    pipe.send(Served(Announced.of(name, pool), engine.metadata, engine.metadata_checksum, pool.map()))
    while True:
        what, arguments = pipe.recv()
        match what:
            case "reuse":
                pool.table["generation"][arguments[0]] += np.uint64(1)
            case "rehash":
                pool.table["hash"][arguments[0]][5] ^= 1
            case "read for ever":
                (served,) = arguments
                add(engine, served)
                threading.Thread(target=_read_for_ever, args=(engine, served, pool), daemon=True).start()
            case "stop":
                engine.close()
                return
        pipe.send(what)


def _read_for_ever(engine: TransferEngine, served: Served, pool: TestPool) -> None:
    pages = list(range(1, min(pool.num_pages, served.announced.num_pages)))
    order = served.announced.order(pages, pages, pool.num_pages)
    while True:
        engine.read(order).result(WAIT_S)
