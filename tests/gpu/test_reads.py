"""Pages travel over NIXL into a GPU's memory, out of it, and from one pool there to another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdkv.ids import LocalPages, PageHashes, PeerName, RemotePages
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.engine import ReadOrder, ReadStatus, TransferEngine
from tests.kvcache.pools import pages_of, tiny_format
from tests.transfer.pools import peer_name

pytestmark = pytest.mark.gpu
WAIT_S = 30.0
PAGES = 9


class Node:
    """A pool with a transfer engine."""

    def __init__(self, device: str) -> None:
        self.name: PeerName = peer_name("node")
        memory = "anonymous" if device == "cpu" else "torch"
        self.pool = SlotPool.create(tiny_format(), PAGES, memory=memory, device=device)  # type: ignore[arg-type]
        self.engine = TransferEngine(backend_factory("nixl"), self.name, self.pool.map())

    def fill(self) -> None:
        for buffer in self.pool.memory.buffers:
            buffer.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, buffer.numel(), dtype=np.uint8)))
        self.pool.memory.settle()

    def read(self, source: Node, local: list[int], remote: list[int]) -> ReadStatus:
        engine, count = source.engine, len(local)
        self.engine.add_peer(source.name, engine.metadata, engine.metadata_checksum, source.pool.map()).result(WAIT_S)
        order = ReadOrder(
            source.name,
            LocalPages.checked(np.array(local, np.int32), PAGES),
            RemotePages.checked(np.array(remote, np.int32), PAGES),
            np.zeros(count, np.uint64),
            PageHashes(bytes(32 * count)),
            WAIT_S,
        )
        return self.engine.read(order).result(WAIT_S).status


@pytest.fixture
def made() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.engine.close()


@pytest.mark.parametrize(("there", "here"), [("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")])
def test_what_arrives_is_what_was_there(there: str, here: str, made: list[Node], device: str) -> None:
    places = {"cpu": "cpu", "gpu": device}
    source, sink = Node(places[there]), Node(places[here])
    made += [source, sink]
    source.fill()
    assert sink.read(source, [1, 2, 8], [5, 6, 3]) is ReadStatus.DONE
    mine = digest_pages(sink.pool, pages_of(sink.pool, 1, 2, 8))
    assert np.array_equal(mine, digest_pages(source.pool, pages_of(source.pool, 5, 6, 3)))
    assert sink.engine.status().registration.regions == 1
