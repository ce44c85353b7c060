"""Where the transfer thread runs, and what registering took: an engine by itself, in a net of its own."""

from __future__ import annotations

import os
import threading
import time

import pytest

from pdkv.transfer import engine as engine_module
from pdkv.transfer.backends.base import AgentName, Backend
from pdkv.transfer.backends.loopback import LoopbackBackend, LoopbackNet
from pdkv.transfer.core import TransferCore
from pdkv.transfer.engine import WORK_S, TransferEngine, TransferSettings
from tests.transfer.pools import TestPool, peer_name


def test_the_thread_runs_where_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """What can't be had is said, and the engine works all the same."""
    seen: list[set[int]] = []

    def factory(name: AgentName) -> Backend:
        seen.append(os.sched_getaffinity(0))
        return LoopbackNet().backend(name)

    here = os.sched_getaffinity(0)
    for cpus in ({max(here)}, {max(here) + 1000}):
        settings = TransferSettings(cpus=frozenset(cpus))
        TransferEngine(factory, peer_name("n"), TestPool(fill=False).map(), settings=settings).close()
    assert seen == [{max(here)}, here]
    assert os.sched_getaffinity(0) == here
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["the transfer thread stays where it is"]


def test_status_says_what_registering_the_pool_took() -> None:
    pool = TestPool(fill=False).map()
    engine = TransferEngine(LoopbackNet().backend, peer_name("n"), pool)
    registration = engine.status().registration
    engine.close()
    assert (registration.regions, registration.bytes) == (1, pool.regions[0].length)
    assert 0 < registration.seconds < 1
    assert str(registration).startswith(f"{registration.bytes:,} B as 1 region in ")


@pytest.mark.parametrize("carries", [True, False])
def test_looks_that_take_long_are_bytes_only_where_the_thread_carries_them(
    monkeypatch: pytest.MonkeyPatch, *, carries: bool
) -> None:
    """On a busy machine every look takes long: where readers copy for themselves the thread sleeps all the same."""
    looked = threading.Semaphore(0)

    class Slow(LoopbackBackend):
        def progress(self) -> None:
            until_s = time.thread_time() + 2 * WORK_S
            while time.thread_time() < until_s:
                pass
            looked.release()

    monkeypatch.setattr(TransferCore, "carries", carries)
    net, settings = LoopbackNet(), TransferSettings(idle_s=3600.0, reading_s=0.0005)
    pool = TestPool(fill=False).map()
    engine = TransferEngine(lambda name: Slow(net, name), peer_name("n"), pool, settings=settings)
    looks = 0
    while looks < 500 and looked.acquire(timeout=0.5):
        looks += 1
    engine.close()
    assert (looks == 500) is carries


def test_while_peers_hold_leases_the_thread_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at once, however long it would have slept."""
    monkeypatch.setattr(engine_module, "WORK_S", 3600.0)  # on a busy machine each look would tell of bytes
    looked = threading.Semaphore(0)

    class Watched(LoopbackBackend):
        def progress(self) -> None:
            looked.release()

    def looks(count: int, within_s: float) -> bool:
        return all(looked.acquire(timeout=within_s) for _ in range(count))

    net = LoopbackNet()
    settings = TransferSettings(idle_s=3600.0, reading_s=0.0005)
    engine = TransferEngine(
        lambda name: Watched(net, name), peer_name("n"), TestPool(fill=False).map(), settings=settings
    )
    while looks(1, 0.5):
        pass  # until it sleeps for an hour
    engine.expect_reads(peers_may=True)
    assert looks(100, 10.0)
    engine.expect_reads(peers_may=False)
    while looks(1, 0.5):
        pass
    engine.close()
