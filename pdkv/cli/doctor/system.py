"""Checks of memory, limits and rights: what this process has against what the node will need.

Guarantees: nothing is allocated, touched or changed; a limit is a failure only where the node would meet it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdkv.cli.doctor.finding import Finding, fail, ok, size, warn
from pdkv.cli.doctor.needs import Needs
from pdkv.errors import ConfigError
from pdkv.machine.affinity import affinity
from pdkv.machine.devices import Devices
from pdkv.machine.files import ROOT
from pdkv.machine.resources import IPC_LOCK, SYS_PTRACE, HugePages, Memory, Process, numa_nodes

HUGE_PAGE_BYTES = 2 << 20
AGENTS, AGENTS_IN_A_FENCE = 2, 3
"""Each registers the pool, and pins it where there is an RDMA device (docs/decisions/0015)."""
CLOSE = 0.95
"""A pool that takes this share of what is there leaves an engine little."""
_PIN = (
    "raise it (ulimit -l, LimitMEMLOCK=, or the container runtime's default_ulimits), or give CAP_IPC_LOCK in the "
    "effective set: a container's added capability doesn't reach a process that isn't root"
)


def memlock(needs: Needs, process: Process, found: Devices) -> Finding:
    """What may be pinned: an RDMA device pins the pool, once an agent."""
    check, limit = "memlock", process.may_pin_bytes
    if limit is None:
        why = "CAP_IPC_LOCK is effective" if process.has(IPC_LOCK) else "no limit"
        return ok(check, f"as much as there is may be pinned ({why})")
    words = f"{size(limit)} may be pinned"
    if needs.on_device or not found.rdma:
        return ok(check, f"{words}; nothing is: {'the pool is on a GPU' if needs.on_device else 'no RDMA device'}")
    once, least, most = (size(n * needs.pool_bytes) for n in (1, AGENTS, AGENTS_IN_A_FENCE))
    if limit < AGENTS * needs.pool_bytes:
        return fail(check, f"{words}; two agents pin a pool of {once} each, {least}: registering it would fail", _PIN)
    if limit < AGENTS_IN_A_FENCE * needs.pool_bytes:
        return warn(check, f"{words}; enough for two agents, but a fence makes a third: {most}", _PIN)
    return ok(check, f"{words}; {most} are needed at most")


def copying(process: Process, transports: frozenset[str] | None, ucx_tls: str) -> Finding:
    """Reads on one host go over CMA: `transports` that UCX has, None if it couldn't be asked."""
    check = "cma"
    rights = "CAP_SYS_PTRACE " + ("is effective" if process.has(SYS_PTRACE) else "isn't")
    words = f"ptrace_scope {process.ptrace_scope}, {rights}"
    barred = process.ptrace_scope > 2 or (process.ptrace_scope == 2 and not process.has(SYS_PTRACE))
    if transports is not None and "cma" in transports:
        return ok(
            check, f"UCX has it ({words}); both processes need the same user, and PID namespaces that see each other"
        )
    if ucx_tls not in ("", "all"):
        return ok(check, f"left out by UCX_TLS={ucx_tls}")
    if transports is None and not barred:
        return ok(check, f"allowed ({words})")
    why = words if barred else f"{words}: process_vm_readv is kept from it, by seccomp or at build"
    todo = "set kernel.yama.ptrace_scope to 1, or give CAP_SYS_PTRACE; it matters only between nodes of one host"
    return warn(check, f"reads on this host go over TCP: {why}", todo)


def huge_pages(needs: Needs, memory: Memory) -> Finding:
    """What becomes of the pool's pages."""
    check = "huge pages"
    if needs.on_device or needs.memory in ("torch", "file"):
        return ok(check, f"not asked for: memory {needs.memory}")
    if needs.memory == "hugetlb":
        return _reserved(check, needs, memory)
    shared = needs.memory == "shared"
    mode, setting = (memory.shared_huge, "shmem_enabled") if shared else (memory.anonymous_huge, "enabled")
    path = f"/sys/kernel/mm/transparent_hugepage/{setting}"
    if mode in ("always", "madvise", "advise", "within_size", "force"):
        return ok(check, f"transparent ones ({setting}: {mode})")
    wanted = "advise" if shared else "madvise"
    todo = f"echo {wanted} > {path}" + (
        ", or memory anonymous" if shared else ", or memory hugetlb with pages reserved"
    )
    return warn(check, f"none ({setting}: {mode or 'not there'}): reads over CMA take up to twice as long", todo)


def _reserved(check: str, needs: Needs, memory: Memory) -> Finding:
    none = HugePages(HUGE_PAGE_BYTES, 0, 0)
    kept = next((h for h in memory.reserved_huge if h.page_bytes == HUGE_PAGE_BYTES), none)
    wanted = -(-needs.pool_bytes // HUGE_PAGE_BYTES) + 1
    words = f"{kept.free} of {kept.reserved} reserved ones of {size(HUGE_PAGE_BYTES)} are free, {wanted} are needed"
    if kept.free < wanted:
        todo = f"sysctl vm.nr_hugepages={kept.reserved - kept.free + wanted}, or memory anonymous"
        return fail(check, words, todo)
    return ok(check, words)


def pool(needs: Needs, memory: Memory) -> Finding:
    """Pool arithmetic against the memory that there is."""
    check, left = "memory", memory.available_bytes
    parts = f"{needs.pages:,} pages of {needs.page_bytes:,} B, {size(needs.pool_bytes)}"
    if needs.offload_bytes:
        parts += f", and {size(needs.offload_bytes)} for offloaded pages"
    where = "the cgroup leaves" if memory.cgroup_bytes is not None and left < memory.total_bytes else "there are"
    words = f"{parts}; {where} {size(left)}"
    if needs.memory == "file" and (short := _short_of_disk(needs)):
        return fail(check, f"{parts}; {short}", "take fewer pages, or another memory_path")
    if needs.host_bytes > left:
        todo = f"at most {max(left - needs.offload_bytes, 0) // needs.page_bytes:,} pages (pool_pages), or more memory"
        return fail(check, f"{words}: {size(needs.host_bytes - left)} short", todo)
    if needs.host_bytes > CLOSE * left:
        return warn(
            check, f"{words}: next to nothing is left for the engine", "take fewer pages, or offload fewer bytes"
        )
    return ok(check, words)


def _short_of_disk(needs: Needs) -> str:
    path = Path(needs.memory_path)
    have = path.stat().st_size if path.exists() else 0
    try:
        disk = os.statvfs(path if path.exists() else path.parent)
    except OSError as error:
        return f"{path} can't be had: {error.strerror}"
    free = disk.f_bavail * disk.f_frsize
    short = needs.pool_bytes - have > free
    return f"its file system has {size(free)} free" if short else ""


def numa(needs: Needs, found: Devices, root: Path = ROOT) -> Finding:
    """Where pool and transfer thread will be."""
    check, nodes = "numa", numa_nodes(root)
    try:
        place = affinity(needs.numa_node, found, nodes, needs.net_devices)
    except ConfigError as error:
        return fail(check, str(error), "name one of these")
    if place.node is None and len(nodes) > 1 and needs.numa_node == "auto":
        return warn(check, f"not bound: {place.why}", "net_devices with one NIC, or numa_node")
    if place.node is None:
        return ok(check, f"nothing is bound: {place.why}")
    words = f"node {place.node}: {place.why}"
    if not place.cpus:
        todo = "let the process run on that node's CPUs, or take numa_node none"
        return warn(check, f"{words}; this process may use none of its CPUs", todo)
    return ok(check, f"{words}; the transfer thread on its {len(place.cpus)} CPUs")


def socket_buffers(process: Process, wanted_bytes: int) -> Finding:
    """What a socket gets that asks for so much, which UCX does over TCP."""
    check, limit = "socket buffers", process.socket_buffer_bytes
    if limit is not None and limit < wanted_bytes:
        words = f"net.core.wmem_max gives {size(limit)} of {size(wanted_bytes)} that UCX asks for"
        return warn(check, f"{words}: reads over TCP are slower", f"sysctl net.core.wmem_max={wanted_bytes}")
    return ok(check, f"{size(wanted_bytes)} are granted")
