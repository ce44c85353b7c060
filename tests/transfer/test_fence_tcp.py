"""Law 2 over a real wire, between processes: a page is given away only when nothing can write to it any more.

Reads over TCP are cut off in the middle, the pages are given to somebody else, and every byte of them is watched.
"""

import signal
import time
from collections.abc import Iterator

import pytest

from pdkv.transfer.agents import ReadingAgent
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.nixl import NixlBackend, _Read
from pdkv.transfer.descriptors import plan
from pdkv.transfer.engine import ReadStatus, TransferSettings
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Peer
from pdkv.transfer.orders import PeerOffer
from pdkv.transfer.schedule import Mark
from pdkv.transfer.tasks import OrderTask, Ticket
from tests.transfer.pools import TestPool
from tests.transfer.serve import TCP, WAIT_S, Reader, ServeOptions, Source, add

PAGES = 400
"""Of 361 KiB each: enough that a read is still under way when something happens to it."""
FIRST, SECOND = list(range(1, PAGES // 2)), list(range(PAGES // 2, PAGES))
MARK = b"\xaa"
HASTY = TransferSettings(fence_after_s=0.3, fence_every_s=0.5, read_max_bytes=8 << 20, under_way_s=1.0)
"""With much under way."""


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Source]]:
    roles = ("stalled", "healthy")
    options = [ServeOptions(node, PAGES, seed=seed, environment=TCP) for seed, node in enumerate(roles, start=11)]
    found = {one.node: Source(one) for one in options}
    yield found
    for source in found.values():
        source.stop()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """It knows no lane but TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    reader = Reader(PAGES, settings=HASTY)
    yield reader
    reader.engine.close()


def equal(pool: TestPool, source: Source, pages: list[int]) -> bool:
    theirs = source.pool
    return all(pool.page(p) == theirs.page(p) for p in pages)


def marked(pool: TestPool, pages: list[int]) -> bool:
    return all(pool.page(p) == MARK * pool.fmt.page_bytes for p in pages)


def test_a_stopped_source_is_fenced_off_and_nobody_else_notices(mine: Reader, sources: dict[str, Source]) -> None:
    stalled, healthy = sources["stalled"], sources["healthy"]
    for source in (stalled, healthy):
        add(mine.engine, source.served)
    future = mine.start_until_it_lands(stalled.served, deadline_s=0.5, pages=FIRST)
    meanwhile = []
    try:
        stalled.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        while not future.done():
            meanwhile.append(mine.read(healthy.served, SECOND))
        outcome = future.result()
        assert outcome.status is ReadStatus.UNSETTLED
        assert outcome.settled is not None
        while not outcome.settled.done():
            assert time.monotonic() < stopped_at + WAIT_S
            meanwhile.append(mine.read(healthy.served, SECOND))
        status = mine.engine.status()
        assert (status.rotations, status.unsettled) == (1, ())
        assert "unsettled for 0.3 s" in mine.read(stalled.served, [1]).reason
        mine.pool.set_pages(MARK[0])
    finally:
        stalled.signal(signal.SIGCONT)
    meanwhile += [mine.read(healthy.served, SECOND) for _ in range(5)]
    assert {o.status for o in meanwhile} == {ReadStatus.DONE}
    assert equal(mine.pool, healthy, SECOND)
    assert marked(mine.pool, FIRST)
    add(mine.engine, stalled.served)
    assert mine.read(stalled.served, [1, 2]).status is ReadStatus.DONE
    assert equal(mine.pool, stalled, [1, 2])
    assert marked(mine.pool, FIRST[2:])


def test_pages_of_an_aborted_read_are_given_away_only_when_nothing_lands(
    mine: Reader, sources: dict[str, Source]
) -> None:
    """The next owner's bytes are watched while the agent that the aborted read was posted on goes on reading."""
    source = sources["healthy"]
    add(mine.engine, source.served)
    assert mine.read(source.served, SECOND).status is ReadStatus.DONE
    future = mine.start_until_it_lands(source.served, pages=FIRST)
    mine.engine.cancel(future)
    outcome = future.result(WAIT_S)
    assert outcome.status is ReadStatus.UNSETTLED
    assert outcome.settled is not None
    assert not outcome.settled.done(), "most of it is still on its way"
    outcome.settled.result(WAIT_S)
    mine.pool.set_pages(MARK[0])
    for _ in range(5):
        assert mine.read(source.served, SECOND).status is ReadStatus.DONE
    assert marked(mine.pool, FIRST)


def test_a_released_read_still_writes(monkeypatch: pytest.MonkeyPatch, sources: dict[str, Source]) -> None:
    """The control: NIXL without a quarantine. It calls the read released, and most of its pages come after."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pool, served = TestPool(PAGES, fill=False), sources["healthy"].served
    backend = NixlBackend(AgentName("control"))
    agent = ReadingAgent(AgentName("control"), backend, pool.map(), LandingRows(1), 1)
    offer = PeerOffer(served.metadata, served.checksum, served.map)
    peer = Peer.offered(served.announced.name, offer, plan(pool.map(), served.map), 1)
    (line,) = peer.lines
    order = served.announced.order(FIRST, FIRST, PAGES)
    task = OrderTask(order, peer, Ticket(), LandingRows(PAGES))
    agent.link(peer, line)
    agent.post(task, line, task.next(len(FIRST) * pool.fmt.page_bytes), Mark(0.0, 0))
    until = time.monotonic() + WAIT_S
    while not any(pool.page(FIRST[0])):
        assert not agent.collect(0.0), "it can't have ended"
        assert time.monotonic() < until
    (posted,) = agent.running.pop().posted
    assert isinstance(posted, _Read)
    backend._drop(posted)
    pool.set_pages(MARK[0])
    # until the last one has come, or the source would be cut off in the middle
    while marked(pool, FIRST[-1:]):
        backend.progress()
        assert time.monotonic() < until
    late = sum(not marked(pool, [p]) for p in FIRST)
    assert late > len(FIRST) // 2
    agent.close()
