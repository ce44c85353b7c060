"""NIXL between processes: lanes, faults as a peer's death shows them, and the fence."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pdkv.errors import ContractMismatch, MissingDependency, TransferError
from pdkv.geometry.page_layout import PlacementKind
from pdkv.transfer.backends import nixl as nixl_module
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.nixl import NixlBackend
from pdkv.transfer.engine import ReadStatus, TransferSettings
from tests.transfer.pools import tiny_format
from tests.transfer.serve import TCP, WAIT_S, Reader, ServeOptions, Source, add

LARGE = 400
"""Pages of 361 KiB: enough that a read over TCP is still under way when something happens to it."""

ROLES = {
    "cma": ServeOptions(seed=1),
    "layers": ServeOptions(seed=2, kind="layer_major"),
    "cma victim": ServeOptions(seed=3, num_pages=LARGE),
    "tcp": ServeOptions(seed=4, num_pages=LARGE, environment=TCP),
    "tcp victim": ServeOptions(seed=5, num_pages=LARGE, environment=TCP),
    "tcp fenced": ServeOptions(seed=6, num_pages=LARGE, environment=TCP),
    "doomed": ServeOptions(seed=7, num_pages=LARGE),
}


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Source]]:
    """All processes start at once: most of their start is importing."""
    found = {role: Source(options) for role, options in ROLES.items()}
    yield found
    for source in found.values():
        source.stop()


MakeReader = Callable[..., Reader]


@pytest.fixture
def reader() -> Iterator[MakeReader]:
    made: list[Reader] = []

    def make(
        num_pages: int = 16, kind: PlacementKind = "page_major", settings: TransferSettings | None = None
    ) -> Reader:
        made.append(Reader(num_pages, kind, settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents made in this test know no other lane."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


# --- two processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["page_major", "layer_major"])
@pytest.mark.parametrize("role", ["cma", "layers"])
def test_bytes_are_equal(sources: dict[str, Source], reader: MakeReader, kind: PlacementKind, role: str) -> None:
    mine, source = reader(kind=kind), sources[role]
    add(mine.engine, source.served)
    outcome = mine.read(source.served, [1, 2, 3, 9, 12, 5])
    assert outcome.status is ReadStatus.DONE
    assert not outcome.stale.any()
    assert outcome.bytes == outcome.backend_bytes
    assert all(mine.pool.page(p) == source.pool.page(p) for p in (1, 2, 3, 9, 12, 5))
    assert not any(any(mine.pool.page(p)) for p in (4, 6, 15))
    assert mine.engine.lane(source.name) == "cma"


def test_bytes_are_equal_over_tcp(sources: dict[str, Source], reader: MakeReader, tcp: None) -> None:
    mine, source = reader(LARGE, "layer_major"), sources["tcp"]
    add(mine.engine, source.served)
    pages = list(range(LARGE - 1, 0, -1))
    outcome = mine.read(source.served, pages)
    assert outcome.status is ReadStatus.DONE
    assert outcome.bytes == outcome.backend_bytes
    theirs = source.pool
    assert all(mine.pool.page(p) == theirs.page(p) for p in pages)
    assert mine.engine.lane_detail(source.name).detail.startswith("software emulation tcp/")


class Looking:
    """A witness: what lay at an order's places when it was told of them; its page i is page i + 1."""

    def __init__(self, mine: Reader) -> None:
        self.pool = mine.pool
        self.landed_parts: list[slice] = []
        self.landed_bytes: list[bytes] = []

    def begins(self, part: slice) -> None:
        assert not self.landed_parts

    def landed(self, part: slice) -> None:
        self.landed_parts.append(part)
        self.landed_bytes += [self.pool.page(place + 1) for place in range(part.start, part.stop)]


def seen(mine: Reader, source: Source) -> Looking:
    """Of pages 1 to 15, read two at once."""
    looking, pages = Looking(mine), list(range(1, 16))
    add(mine.engine, source.served)
    order = replace(source.served.announced.order(pages, pages, mine.pool.num_pages), witness=looking)
    outcome = mine.engine.read(order).result(WAIT_S)
    assert (outcome.status, outcome.backend_bytes) == (ReadStatus.DONE, outcome.bytes)
    assert all(mine.pool.page(p) == source.pool.page(p) for p in pages)
    return looking


def test_over_cma_each_page_is_there_when_its_witness_is_told(sources: dict[str, Source], reader: MakeReader) -> None:
    """Or digests would quietly be made after the read again, at a fifth of the rate."""
    mine = reader(settings=TransferSettings(look_bytes=2 * tiny_format().page_bytes))
    looking, source = seen(mine, sources["cma"]), sources["cma"]
    assert mine.engine.copies(source.name)
    assert [(part.start, part.stop) for part in looking.landed_parts] == [(i, min(i + 2, 15)) for i in range(0, 15, 2)]
    assert looking.landed_bytes == [source.pool.page(page) for page in range(1, 16)]


def test_over_tcp_nobody_is_told(sources: dict[str, Source], reader: MakeReader, tcp: None) -> None:
    mine = reader(settings=TransferSettings(look_bytes=1))
    assert seen(mine, sources["tcp"]).landed_parts == []
    assert not mine.engine.copies(sources["tcp"].name)


@pytest.mark.parametrize("what", ["reuse", "rehash"])
def test_what_changed_over_there_is_stale(sources: dict[str, Source], reader: MakeReader, what: str) -> None:
    mine, source = reader(), sources["cma"]
    add(mine.engine, source.served)
    page = {"reuse": 7, "rehash": 8}[what]
    source.ask(what, page)
    assert mine.read(source.served, [page, 9, 10]).stale.tolist() == [True, False, False]


def test_the_process_says_nothing_on_its_own_output(
    sources: dict[str, Source], reader: MakeReader, capfd: pytest.CaptureFixture[str]
) -> None:
    mine, source = reader(), sources["cma"]
    add(mine.engine, source.served)
    mine.engine.close()
    assert capfd.readouterr() == ("", "")


def test_lanes_are_told_apart_by_asking_alone(sources: dict[str, Source], reader: MakeReader) -> None:
    """UCX names the lane once a configuration: a second TCP peer beside a CMA one says nothing of its own."""
    mine = reader()
    expected = {"cma": "cma", "tcp": "tcp", "tcp fenced": "tcp", "layers": "cma"}
    for role in expected:
        add(mine.engine, sources[role].served)
    assert {role: mine.engine.lane(sources[role].name) for role in expected} == expected
    assert mine.read(sources["tcp fenced"].served, [1]).status is ReadStatus.DONE


def test_other_tcp_segments_are_refused(
    sources: dict[str, Source], reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment longer than the receiver's ends the connection, or the process."""
    for key in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        monkeypatch.setenv(key, "64k")
    with pytest.raises(ContractMismatch, match="UCX_TCP_RX_SEG_SIZE=64k"):
        add(reader().engine, sources["cma"].served)


# --- the peer dies or stops -----------------------------------------------------------------------------------------


def test_killed_over_cma_is_noticed_within_a_second(sources: dict[str, Source], reader: MakeReader) -> None:
    """CMA and TCP are all lanes without an RDMA NIC: UCX takes no other shared memory where it must report failures."""
    mine, victim = reader(LARGE, settings=TransferSettings(read_max_bytes=1 << 20)), sources["cma victim"]
    add(mine.engine, victim.served)
    assert mine.engine.lane(victim.name) == "cma"
    future = mine.start_until_it_lands(victim.served)
    victim.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    # one that was posted before UCX knew may still end well: the kernel copies from a process it can find
    while (outcome := future.result(WAIT_S)).status is ReadStatus.DONE:
        future = mine.start(victim.served, list(range(1, LARGE)))
    assert time.monotonic() - killed_at < 1.0
    assert outcome.status is ReadStatus.FAILED
    assert "Disconnect" in outcome.reason
    assert mine.read(victim.served, [3]).status is ReadStatus.FAILED
    mine.engine.remove_peer(victim.name).result(WAIT_S)


def test_connections_are_watched_for_hosts_that_vanish(
    sources: dict[str, Source], reader: MakeReader, tcp: None
) -> None:
    """The other end's host says nothing when it vanishes, and our end of a read waits for bytes: only probes tell."""
    before = set(tcp_sockets())
    mine = reader()
    add(mine.engine, sources["tcp"].served)
    assert mine.read(sources["tcp"].served, [1]).status is ReadStatus.DONE
    ours = {fd: options for fd, options in tcp_sockets().items() if fd not in before}
    assert (1, 2, 1, 3) in ours.values()


def tcp_sockets() -> dict[int, tuple[int, ...]]:
    """Keep-alive of this process's TCP sockets by descriptor: on or off, seconds until, seconds between, probes."""
    found = {}
    wanted = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                on = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                found[int(name)] = (on, *(one.getsockopt(socket.IPPROTO_TCP, option) for option in wanted))
        except OSError:
            continue
    return found


def test_killed_over_tcp_ends_failed_and_nothing_lands_any_more(
    sources: dict[str, Source], reader: MakeReader, tcp: None
) -> None:
    mine, victim, healthy = reader(LARGE), sources["tcp victim"], sources["tcp"]
    for source in (victim, healthy):
        add(mine.engine, source.served)
    future = mine.start_until_it_lands(victim.served)
    victim.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    outcome = future.result(WAIT_S)
    assert time.monotonic() - killed_at < 1.0
    assert outcome.status is ReadStatus.FAILED
    assert "Disconnect" in outcome.reason
    mine.pool.set_pages(0xAA)
    # many polls of the same agent, and the proof that it lives: the other peer's pages come
    for _ in range(3):
        assert mine.read(healthy.served, list(range(1, 100))).status is ReadStatus.DONE
    assert all(mine.pool.page(p) == b"\xaa" * mine.pool.fmt.page_bytes for p in range(100, LARGE))
    mine.engine.remove_peer(victim.name).result(WAIT_S)
    assert mine.read(healthy.served, [1]).status is ReadStatus.DONE


def test_stopped_is_unsettled_at_the_deadline_and_settles_when_it_goes_on(
    sources: dict[str, Source], reader: MakeReader, tcp: None
) -> None:
    mine, source = reader(LARGE), sources["tcp"]
    add(mine.engine, source.served)
    try:
        future = mine.start_until_it_lands(source.served, deadline_s=1.0)
        source.signal(signal.SIGSTOP)
        outcome = future.result(WAIT_S)
        assert outcome.status is ReadStatus.UNSETTLED
        assert "deadline" in outcome.reason
        assert outcome.settled is not None
        assert not outcome.settled.done()
        leaving = mine.engine.remove_peer(source.name)
        assert not leaving.done()
        mine.pool.set_pages(0xAA)
    finally:
        source.signal(signal.SIGCONT)
    outcome.settled.result(WAIT_S)
    leaving.result(WAIT_S)
    # why the pages had to be held back, and the control of the fence below
    assert any(mine.pool.page(p) == source.pool.page(p) for p in range(1, LARGE))


def test_closing_the_engine_is_a_fence(sources: dict[str, Source], reader: MakeReader, tcp: None) -> None:
    mine, source, later = reader(LARGE), sources["tcp fenced"], reader(LARGE)
    add(mine.engine, source.served)
    add(later.engine, source.served)
    try:
        future = mine.start_until_it_lands(source.served)
        source.signal(signal.SIGSTOP)
        mine.engine.close()
        assert future.result(WAIT_S).status is ReadStatus.FAILED
        mine.pool.set_pages(0xAA)
    finally:
        source.signal(signal.SIGCONT)
    # it sends what it had begun, to nobody, and goes on serving
    assert later.read(source.served, list(range(1, LARGE))).status is ReadStatus.DONE
    assert all(mine.pool.page(p) == b"\xaa" * mine.pool.fmt.page_bytes for p in range(1, LARGE))


def test_a_source_outlives_a_reader_that_is_killed(sources: dict[str, Source], reader: MakeReader) -> None:
    source, doomed, mine = sources["layers"], sources["doomed"], reader()
    assert doomed.served
    assert source.served
    doomed.ask("read for ever", source.served)
    doomed.kill()
    add(mine.engine, source.served)
    assert mine.read(source.served, [1, 2, 3]).status is ReadStatus.DONE
    assert source.stop() == 0


# --- the edge -------------------------------------------------------------------------------------------------------


def test_an_agent_that_somebody_holds_is_not_called_destroyed() -> None:
    wrapper = SimpleNamespace(agent=object())
    nixl_module._destroy(wrapper)
    held = object()
    with pytest.raises(TransferError, match="may still land"):
        nixl_module._destroy(SimpleNamespace(agent=held))


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingDependency, match="pip install nixl"):
        NixlBackend(AgentName("a"))
