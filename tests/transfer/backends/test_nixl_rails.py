"""Two rails over NIXL, each with agents of its own on the device that it names."""

from collections.abc import Iterator

import pytest

from pdkv.errors import TransferError
from pdkv.ids import PeerName
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.nixl import NixlBackend
from pdkv.transfer.engine import ReadStatus, TransferSettings
from pdkv.transfer.lines import Line
from tests.transfer.serve import TCP, WAIT_S, Reader, ServeOptions, Source, add

PAGES = 100
SMALL_PARTS = TransferSettings(read_max_bytes=1 << 20)


@pytest.fixture
def source() -> Iterator[Source]:
    one = Source(ServeOptions(num_pages=PAGES, environment=TCP, rails=2))
    yield one
    one.stop()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    one = Reader(PAGES, settings=SMALL_PARTS, rail_count=2)
    yield one
    one.engine.close()


def lines(reader: Reader, peer: PeerName) -> tuple[Line, ...]:
    return reader.engine._core.peers[peer].lines


def test_a_read_is_spread_over_both_rails_and_a_dead_source_is_lost_on_both(source: Source, reader: Reader) -> None:
    add(reader.engine, source.served)
    pages = list(range(1, PAGES))
    outcome = reader.read(source.served, pages)
    assert outcome.status is ReadStatus.DONE
    theirs = source.pool
    assert all(reader.pool.page(p) == theirs.page(p) for p in pages)
    first, second = (line.posted for line in lines(reader, source.name))
    assert first + second == outcome.bytes
    assert min(first, second) > outcome.bytes / 4
    status = reader.engine.status()
    assert [(rail.device, rail.lanes, rail.down) for rail in status.rails] == [
        ("lo 0", ("tcp",), ()),
        ("lo 1", ("tcp",), ()),
    ]
    assert all("tcp/lo" in line.lane.detail for line in lines(reader, source.name))
    future = reader.start_until_it_lands(source.served)
    source.kill()
    assert future.result(WAIT_S).status is ReadStatus.FAILED
    assert reader.engine.status().rotations == 0, "both ends were told, none waited for"


def test_a_device_that_is_not_there_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with pytest.raises(TransferError, match="can't make a UCX backend"):
        NixlBackend(AgentName("nowhere"), device="nosuch0")
