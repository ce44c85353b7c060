"""Pools of plain memory for the transfer tests: bytes, a page table and the map a peer needs."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, PlacementKind, PoolMap, layer_major, page_format, page_major, pool_map
from pdkv.ids import Incarnation, LocalPages, NodeId, PageHashes, PeerName, RemotePages, UInt64Array, new_incarnation
from pdkv.transfer.orders import PeerOffer, ReadOrder

TABLE_ROW = np.dtype([("generation", "<u8"), ("hash", np.uint8, 32), ("state", np.uint8), ("pad", np.uint8, 23)])
HUGE = 2 << 20
Bytes = npt.NDArray[np.uint8]


def tiny_format() -> PageFormat:
    return page_format(model_shape(load_config("tiny")))


def peer_name(node: str, incarnation: str | None = None) -> PeerName:
    return PeerName(NodeId(node), Incarnation(incarnation) if incarnation else new_incarnation())


def memory(size: int) -> Bytes:
    """Zeroed bytes on huge pages where there are any."""
    block = mmap.mmap(-1, max(size, 1) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    every = np.frombuffer(block, np.uint8)
    start = -every.ctypes.data % HUGE
    return every[start : start + size]


@dataclass
class TestPool:
    """A pool in buffers of its own; every byte, generation and hash is a function of `seed`."""

    __test__ = False

    num_pages: int = 16
    kind: PlacementKind = "page_major"
    seed: int = 0
    fill: bool = True
    fmt: PageFormat = field(default_factory=tiny_format)

    def __post_init__(self) -> None:
        place = {"page_major": page_major, "layer_major": layer_major}[self.kind]
        self.placement = place(self.fmt, self.num_pages)
        self.buffers = [memory(size) for size in self.placement.buffer_bytes]
        block = memory((self.num_pages + 1) * TABLE_ROW.itemsize)
        self.table = block[: self.num_pages * TABLE_ROW.itemsize].view(TABLE_ROW)
        random = np.random.default_rng(self.seed)
        if self.fill:
            for buffer in self.buffers:
                buffer[:] = random.integers(0, 256, buffer.size, np.uint8)
        self.table["generation"] = random.integers(1, 2**63, self.num_pages, np.uint64)
        self.table["hash"] = random.integers(0, 256, (self.num_pages, 32), np.uint8)
        self.table["state"] = 1

    def map(self) -> PoolMap:
        addresses = [int(b.ctypes.data) for b in self.buffers]
        return pool_map(self.fmt, self.placement, addresses, int(self.table.ctypes.data), 64, "DRAM", 0)

    def page(self, page: int) -> bytes:
        """Bytes of a page in segment order, whatever the placement."""
        parts = []
        for segment, place in zip(self.fmt.segments, self.placement.places, strict=True):
            start = place.offset + page * place.stride
            parts.append(self.buffers[place.buffer][start : start + segment.length].tobytes())
        return b"".join(parts)

    def set_pages(self, value: int) -> None:
        for buffer in self.buffers:
            buffer[:] = value

    def hashes(self, pages: list[int]) -> PageHashes:
        return PageHashes(self.table["hash"][pages].tobytes())

    def generations(self, pages: list[int]) -> UInt64Array:
        return self.table["generation"][pages].astype(np.uint64)


def offer_of(metadata: bytes, pool: TestPool) -> PeerOffer:
    return PeerOffer(metadata, xxhash.xxh3_64_intdigest(metadata), pool.map())


@dataclass(frozen=True)
class Announced:
    """What a source says about pages of its pool; small enough to cross a pipe."""

    name: PeerName
    num_pages: int
    generations: list[int]
    hashes: bytes

    @classmethod
    def of(cls, name: PeerName, pool: TestPool) -> Announced:
        every = list(range(pool.num_pages))
        return cls(name, pool.num_pages, pool.generations(every).tolist(), pool.hashes(every).raw)

    def order(self, local: list[int], remote: list[int], local_pages: int, deadline_s: float = 20.0) -> ReadOrder:
        rows = np.frombuffer(self.hashes, np.uint8).reshape(-1, 32)
        return ReadOrder(
            peer=self.name,
            local=LocalPages.checked(local, local_pages),
            remote=RemotePages.checked(remote, self.num_pages),
            generations=np.array([self.generations[p] for p in remote], np.uint64),
            hashes=PageHashes(rows[remote].tobytes()),
            deadline_s=deadline_s,
        )
