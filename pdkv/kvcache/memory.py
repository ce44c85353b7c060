"""Memory for a pool's buffers: mapped here, or taken from torch.

Guarantees: addresses are stable until `close`; nothing is touched before `commit`, so an anonymous pool costs memory
only where it is written; anonymous buffers start on a 2 MiB edge, because a huge page can't lie elsewhere (for files
the kernel chooses the address, and each buffer starts on a 2 MiB edge of the file); what the system made of the request
for huge pages, and of that for a NUMA node, is told as it is.

No tensor ever outlives its memory: each tensor holds a reference to the mapping it was cut from (through numpy, whose
arrays keep the exporting buffer alive), and the mapping is undone by its own destructor. So `close` gives this object's
references back, and the memory goes with the last tensor. Peers and NICs hold no references: close the transfer engine
first, because unmapping registered memory crashes a TCP target.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.page_layout import Memory
from pdkv.machine.affinity import allowed_cpus, prefer_node

MemoryKind = Literal["anonymous", "hugetlb", "shared", "file", "torch"]
"""anonymous: private to the process. hugetlb: the same on huge pages that the system keeps reserved (vm.nr_hugepages).
shared: a memfd. file: `path`, which stays. torch: from torch's allocator of a device, not zeroed."""
HUGE_PAGE_BYTES = 2 << 20
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_SMALL_PAGE_BYTES = 4096
_MAP_HUGETLB, _MAP_HUGE_2MIB = 0x40000, 21 << 26
"""Not in Python's mmap."""
_MADV_POPULATE_WRITE = 23
"""Not in Python's mmap yet."""
_COMMIT_BYTES, _COMMIT_THREADS = 64 << 20, 16


class PoolMemory:
    """Buffers of one pool: 1-D uint8 tensors, empty ones for lengths of 0. Made by `allocate`."""

    def __init__(self, kind: MemoryKind, buffers: Sequence[torch.Tensor], addresses: Sequence[int], huge: str) -> None:
        """`huge`: see `huge_pages`."""
        self.kind = kind
        self.addresses = tuple(addresses)
        self.huge_pages = huge
        """What became of huge pages, in words: the request's answer and the system's setting."""
        self.device = device = next((b.device for b in buffers), torch.device("cpu"))
        self._commit_s: float | None = None
        self._node: int | None = None
        self.memory: Memory = "DRAM" if device.type == "cpu" else "VRAM"
        self.device_index = device.index or 0
        self._sizes = tuple(b.numel() for b in buffers)
        self._buffers: tuple[torch.Tensor, ...] | None = tuple(buffers)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Raises `BoundsError` after `close`."""
        if self._buffers is None:
            raise BoundsError("pool memory", "closed", "open memory")
        return self._buffers

    @property
    def buffer_bytes(self) -> tuple[int, ...]:
        return self._sizes

    @property
    def closed(self) -> bool:
        return self._buffers is None

    def huge_page_bytes(self) -> int:
        """Bytes of mappings with these addresses that are on huge pages *now* (0 before the first touch).

        From /proc/self/smaps: the only proof. A neighbour that the kernel merged into the same mapping counts too, so
        this is capped by the pool's own length. 0 where there is no such file, and for device memory.
        """
        if self.memory == "VRAM" or not self._spans():
            return 0
        low, high = self._edges()
        return min(_huge_bytes_between(low, high), high - low)

    def bind(self, node: int) -> None:
        """Have pages come from that NUMA node when they are first touched, so call it before `commit`.

        Nothing happens to a file's memory and a device's. Raises `ConfigError` for a node that isn't there.
        """
        if self.memory == "VRAM" or self.kind == "file":
            return
        for address, length in self._spans():
            start = address - address % _SMALL_PAGE_BYTES
            prefer_node(start, -(-(address + length - start) // _SMALL_PAGE_BYTES) * _SMALL_PAGE_BYTES, node)
        self._node = node

    def node_bytes(self) -> dict[int, int]:
        """Bytes of the pool on each NUMA node *now*, from /proc/self/numa_maps: of whole mappings that begin in it."""
        if self.memory == "VRAM" or not self._spans():
            return {}
        low, high = self._edges()
        return _bytes_by_node(low - low % _SMALL_PAGE_BYTES, high)

    def commit(self, threads: int | None = None) -> None:
        """Have the system find the memory now, and not when a page is first written: what it hasn't got is an error
        here, and no read has to wait for it. Bytes stay as they are; nothing happens to a file's memory and a device's.

        The kernel zeroes it on as many CPUs as there are `threads`; None: all that this process may use, 16 at most.
        Raises `ConfigError` for memory that the system hasn't got.
        """
        if self.memory == "VRAM" or self.kind == "file":
            return
        began = time.monotonic()
        parts = [
            (at, min(_COMMIT_BYTES, address + length - at))
            for address, length in self._spans()
            for at in range(address, address + length, _COMMIT_BYTES)
        ]
        with ThreadPoolExecutor(threads or min(len(allowed_cpus()), _COMMIT_THREADS)) as workers:
            done = list(workers.map(_populated, *zip(*parts, strict=True))) if parts else []
        if not all(done):
            for buffer in self.buffers:
                view = buffer.numpy()[::_SMALL_PAGE_BYTES]
                view |= 0
        self._commit_s = time.monotonic() - began

    def settle(self) -> None:
        """Wait until the calling thread's kernels have done what they were started for: neither a NIC nor another
        thread's stream waits for them. Host memory has no kernels."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def facts(self) -> dict[str, str]:
        """What became of it, in words: kind, huge pages, numa, committed. Looks at nothing, so it costs nothing."""
        size = f"{sum(self._sizes):,} B"
        if self.memory == "VRAM":
            return {"kind": f"{size}, {self.kind}, device {self.device_index}"}
        return {
            "kind": f"{size}, {self.kind}",
            "huge pages": self.huge_pages,
            "numa": "not bound" if self._node is None else f"node {self._node}",
            "committed": "when it is touched" if self._commit_s is None else f"in {self._commit_s:.3g} s",
        }

    def _spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of the buffers that have any."""
        return [(a, n) for a, n in zip(self.addresses, self._sizes, strict=True) if n]

    def _edges(self) -> tuple[int, int]:
        spans = self._spans()
        return min(a for a, _ in spans), max(a + n for a, n in spans)

    def close(self) -> None:
        """Give the buffers back; idempotent. The memory goes when the last tensor cut from them does."""
        self._buffers = None


def allocate(
    buffer_bytes: Sequence[int],
    *,
    kind: MemoryKind = "anonymous",
    path: str | os.PathLike[str] | None = None,
    device: str = "cpu",
) -> PoolMemory:
    """One buffer for each length in bytes; mapped ones read as zeros (a file's as what it holds).

    Raises `ConfigError` on a negative length, an unknown kind, a missing or needless `path`, a device that this kind
    can't have, and on memory that the system refuses.
    """
    if kind not in get_args(MemoryKind):
        raise ConfigError("memory", kind, ", ".join(get_args(MemoryKind)))
    if any(n < 0 for n in buffer_bytes):
        raise ConfigError("buffer bytes", min(buffer_bytes), "at least 0")
    if (path is not None) != (kind == "file"):
        raise ConfigError("memory path", str(path), "a path for kind file, none for the others")
    if kind == "torch":
        return _from_torch(buffer_bytes, device)
    if device != "cpu":
        raise ConfigError("memory", kind, f"torch, for device {device}")
    sizes = [-(-n // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for n in buffer_bytes]
    starts = list(accumulate(sizes, initial=0))
    spare = 0 if kind == "hugetlb" and starts[-1] else HUGE_PAGE_BYTES  # to move the first buffer to an edge
    try:
        region, huge = _map(kind, starts[-1] + spare, path)
    except (OSError, OverflowError) as error:
        raise ConfigError("pool bytes", starts[-1], f"what the system grants ({error})") from error
    base = region.ctypes.data
    skew = -base % HUGE_PAGE_BYTES if kind in ("anonymous", "hugetlb") else 0
    spans = [(skew + start, n) for start, n in zip(starts, buffer_bytes, strict=False)]
    buffers = [torch.from_numpy(region[start : start + n]) for start, n in spans]
    return PoolMemory(kind, buffers, [base + start for start, _ in spans], huge)


def _from_torch(buffer_bytes: Sequence[int], device: str) -> PoolMemory:
    try:
        buffers = [torch.empty(n, dtype=torch.uint8, device=device) for n in buffer_bytes]
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ConfigError("pool bytes", sum(buffer_bytes), f"what {device} grants ({error})") from error
    return PoolMemory("torch", buffers, [b.data_ptr() for b in buffers], "not asked for: torch's allocator decides")


def _map(kind: MemoryKind, length: int, path: str | os.PathLike[str] | None) -> tuple[np.ndarray[Any, Any], str]:
    """A zeroed mapping as uint8 [length], which owns it, and the answer to the request for huge pages."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if kind == "hugetlb":
        # the kernel sets them aside here, and refuses if it hasn't so many
        mapping = mmap.mmap(-1, length, flags=private | _MAP_HUGETLB | _MAP_HUGE_2MIB)
        return np.frombuffer(mapping, np.uint8), "reserved ones of 2 MiB"
    if kind == "anonymous":
        mapping = mmap.mmap(-1, length, flags=private)
    else:
        fd = os.memfd_create("pdkv-pool") if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if path is None:
                os.ftruncate(fd, length)
            else:
                os.posix_fallocate(fd, 0, length)  # a full file system must refuse now, not kill us on first touch
            mapping = mmap.mmap(fd, length)
        finally:
            os.close(fd)
    huge = _ask_for_huge_pages(mapping, setting="enabled" if kind == "anonymous" else "shmem_enabled")
    return np.frombuffer(mapping, np.uint8), huge


def _ask_for_huge_pages(mapping: mmap.mmap, *, setting: str) -> str:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"refused: {error.strerror}"
    try:
        chosen = re.search(r"\[(\w+)\]", (_THP / setting).read_text())
    except OSError:
        return "asked for; the system doesn't say what it does"
    mode = chosen[1] if chosen else "unknown"
    granted = mode in ("always", "madvise", "advise", "within_size", "force")
    answer = "granted on touch" if granted else "asked for, but switched off"
    return f"{answer} (transparent_hugepage/{setting}: {mode})"


def _populated(address: int, length: int) -> bool:
    """Whether the kernel did it: it can from Linux 5.14 on, and only for whole pages."""
    start = address - address % _SMALL_PAGE_BYTES
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    done = madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), _MADV_POPULATE_WRITE)
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.EAGAIN):
        return False
    raise ConfigError("pool bytes", length, f"what the system has now ({os.strerror(number)})")


def _bytes_by_node(low: int, high: int) -> dict[int, int]:
    """Sum over the mappings that begin in [low, high); a binding makes one of its own."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return {}
    total: dict[int, int] = {}
    for line in lines:
        start, _, rest = line.partition(" ")
        if low <= int(start, 16) < high:
            size_kb = re.search(r"kernelpagesize_kB=(\d+)", rest)
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest):
                total[int(node)] = total.get(int(node), 0) + int(pages) * int(size_kb[1] if size_kb else 4) * 1024
    return total


def _huge_bytes_between(low: int, high: int) -> int:
    """Sum over the mappings that overlap [low, high)."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    total, ours = 0, False
    for line in lines:
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            ours = int(span[1], 16) < high and int(span[2], 16) > low
        elif ours and (kb := re.match(r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped|\w+_Hugetlb): +(\d+) kB", line)):
            total += int(kb[1]) * 1024
    return total
