"""Memory of a machine, and what this process may do with it.

Guarantees: what is said to be available is what the tighter of machine and cgroup leaves; a limit that isn't set is
None, never a large number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdkv.machine.files import ROOT, chosen, entries, id_list, number, text

IPC_LOCK, SYS_PTRACE = 14, 19
"""Bits of a capability set (linux/capability.h)."""
_KIB = 1024
_UNLIMITED_BYTES = 1 << 60
"""A cgroup of version 1 without a limit says a number above this."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """Of one size, reserved for mappings that ask for them."""

    page_bytes: int
    reserved: int
    free: int
    """Not in use, not promised to a mapping, and within what the cgroup lets have."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A machine's memory, as this process sees it."""

    total_bytes: int
    available_bytes: int
    """Of machine and cgroup, what the tighter one leaves."""
    cgroup_bytes: int | None
    """The cgroup's limit."""
    anonymous_huge: str
    """transparent_hugepage/enabled: "always", "madvise", "never"; empty without."""
    shared_huge: str
    """The same of memfds: shmem_enabled."""
    reserved_huge: tuple[HugePages, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """Limits and rights of this process."""

    memlock_bytes: int | None
    """None: no limit."""
    memlock_hard_bytes: int | None
    capabilities: int
    """The effective set, a bit each."""
    ptrace_scope: int
    """Of Yama; 0 where there is none."""
    socket_buffer_bytes: int | None
    """net.core.wmem_max: the most that a socket gets which asks for its buffer; None where it isn't shown."""

    def has(self, capability: int) -> bool:
        return bool(self.capabilities >> capability & 1)

    @property
    def may_pin_bytes(self) -> int | None:
        """None: as much as there is."""
        return None if self.has(IPC_LOCK) else self.memlock_bytes


def memory(root: Path = ROOT) -> Memory:
    info = dict(re.findall(r"^(\w+): +(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE))
    available = int(info.get("MemAvailable", 0)) * _KIB
    limit, used = _cgroup(root)
    left = available if limit is None else min(available, max(limit - used, 0))
    huge = root / "sys/kernel/mm"
    return Memory(
        total_bytes=int(info.get("MemTotal", 0)) * _KIB,
        available_bytes=left,
        cgroup_bytes=limit,
        anonymous_huge=chosen(huge / "transparent_hugepage/enabled"),
        shared_huge=chosen(huge / "transparent_hugepage/shmem_enabled"),
        reserved_huge=tuple(_reserved(path, root) for path in entries(huge / "hugepages")),
    )


def process(root: Path = ROOT) -> Process:
    lock = re.search(r"^Max locked memory +(\S+) +(\S+)", text(root / "proc/self/limits"), re.MULTILINE)
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", text(root / "proc/self/status"), re.MULTILINE)
    return Process(
        memlock_bytes=_limit(lock[1]) if lock else None,
        memlock_hard_bytes=_limit(lock[2]) if lock else None,
        capabilities=int(effective[1], 16) if effective else 0,
        ptrace_scope=number(root / "proc/sys/kernel/yama/ptrace_scope", 0) or 0,
        socket_buffer_bytes=number(root / "proc/sys/net/core/wmem_max"),
    )


def numa_nodes(root: Path = ROOT) -> Mapping[int, frozenset[int]]:
    """Node to its CPUs: those with memory."""
    folder = root / "sys/devices/system/node"
    with_memory = id_list(text(folder / "has_memory")) or id_list(text(folder / "online"))
    return {node: id_list(text(folder / f"node{node}/cpulist")) for node in sorted(with_memory)}


def _reserved(path: Path, root: Path) -> HugePages:
    size_kb = int(re.sub(r"\D", "", path.name) or 0)
    free = (number(path / "free_hugepages", 0) or 0) - (number(path / "resv_hugepages", 0) or 0)
    name = f"{size_kb // 1024}MB" if size_kb < 1 << 20 else f"{size_kb >> 20}GB"
    # what a cgroup doesn't let have is missed at the first touch, by a signal
    for controller, files in _GROUP_FILES:
        if group := _limited(root, controller, tuple(f"hugetlb.{name}.{file}" for file in files)):
            free = min(free, (group.limit - group.used) // (size_kb * _KIB))
    return HugePages(size_kb * _KIB, number(path / "nr_hugepages", 0) or 0, max(free, 0))


_GROUP_FILES = (("", ("max", "current")), ("hugetlb", ("limit_in_bytes", "usage_in_bytes")))
"""Controller (of version 1; none for version 2) and its files of limit and use."""


def _limit(word: str) -> int | None:
    return int(word) if word.isdigit() else None


@dataclass(frozen=True, slots=True)
class _Limited:
    """A cgroup with a limit, in bytes."""

    folder: Path
    limit: int
    used: int


def _limited(root: Path, controller: str, files: tuple[str, ...]) -> _Limited | None:
    """This process's group of a controller; None if that has no limit. `files`: of the limit, and of what is used."""
    lines = (line.split(":", 2) for line in text(root / "proc/self/cgroup").splitlines())
    paths = {parts[1]: parts[2] for parts in lines if len(parts) == 3}
    mount = root / "sys/fs/cgroup" / controller
    # within a container the path of its own group is often not there: it is mounted at the top
    for folder in (mount / paths.get(controller, "").lstrip("/"), mount):
        limit = number(folder / files[0])
        if limit is not None and limit < _UNLIMITED_BYTES:
            return _Limited(folder, limit, number(folder / files[1], 0) or 0)
    return None


def _cgroup(root: Path) -> tuple[int | None, int]:
    """Limit and use in bytes, without cached files, which make room; version 2, then version 1."""
    for controller, files, cached in (
        ("", ("memory.max", "memory.current"), "inactive_file"),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ):
        if group := _limited(root, controller, files):
            found = re.search(rf"^{cached} (\d+)", text(group.folder / "memory.stat"), re.MULTILINE)
            return group.limit, group.used - (int(found[1]) if found else 0)
    return None, 0
