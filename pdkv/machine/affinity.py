"""Which NUMA node a pool and the transfer thread belong to: the one of the NIC that carries the pages.

Guarantees: a node is chosen only if the devices that may be used agree on it, or if it was named; where there is
nothing to choose, that is said and nothing is done; what the kernel made of a binding can be asked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.machine.devices import Devices, lets_use

AUTO, NONE = "auto", "none"
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_PREFERRED = 1
"""MPOL_PREFERRED: other nodes help out when that one is full, where MPOL_BIND would have the process killed."""
_OF_ADDRESS = 2
"""MPOL_F_ADDR."""
_MASK_BITS = 1024


@dataclass(frozen=True, slots=True)
class Affinity:
    """Where things should be, and why."""

    node: int | None
    """None: nothing is bound."""
    cpus: frozenset[int]
    """Of that node, those that this process may use; empty: the thread stays where it is."""
    why: str


def affinity(wanted: str, found: Devices, nodes: Mapping[int, frozenset[int]], net_devices: str = "") -> Affinity:
    """`wanted`: "auto", "none" or a node's number; `net_devices`: those that UCX may use, as it writes them.

    Raises `ConfigError` for a node that the machine hasn't.
    """
    if wanted == NONE:
        return Affinity(None, frozenset(), "not asked for")
    if wanted != AUTO:
        return _on(_named(wanted, nodes), nodes, "it was named")
    if len(nodes) < 2:
        return Affinity(None, frozenset(), "the machine has one node")
    places = _nics(found, net_devices)
    by_node = sorted({node for node in places.values() if node is not None})
    words = ", ".join(f"{name} on node {'?' if node is None else node}" for name, node in places.items())
    if len(by_node) == 1:
        return _on(by_node[0], nodes, f"of {words}")
    if not by_node:
        return Affinity(None, frozenset(), f"no NIC says its node ({words or 'none found'})")
    return Affinity(None, frozenset(), f"NICs are on several nodes ({words}): name one in net_devices, or a node")


def allowed_cpus() -> frozenset[int]:
    """Of the calling thread."""
    return frozenset(os.sched_getaffinity(0))


def prefer_node(address: int, length: int, node: int) -> None:
    """Have pages of [address, address + length) come from that node when they are first touched. Page-aligned.

    Raises `ConfigError` if the kernel refuses.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    number = _system_call(_MBIND, "mbind")
    pointers = (ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_long(_PREFERRED), mask)
    if _libc().syscall(ctypes.c_long(number), *pointers, ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError("numa_node", node, f"a node that memory can be bound to ({reason}), or none")


def preferred_node(address: int) -> int | None:
    """The node that memory at this address comes from by a binding of its own; None without one."""
    mode = ctypes.c_int(-1)
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    number = _system_call(_GET_MEMPOLICY, "get_mempolicy")
    found = _libc().syscall(
        ctypes.c_long(number),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_OF_ADDRESS),
    )
    if found != 0 or mode.value != _PREFERRED:
        return None
    return next((64 * i + word.bit_length() - 1 for i, word in enumerate(mask) if word), None)


def _on(node: int, nodes: Mapping[int, frozenset[int]], why: str) -> Affinity:
    return Affinity(node, nodes[node] & allowed_cpus(), why)


def _named(wanted: str, nodes: Mapping[int, frozenset[int]]) -> int:
    if not wanted.isdigit() or int(wanted) not in nodes:
        raise ConfigError("numa_node", wanted, ", ".join((AUTO, NONE, *map(str, nodes))))
    return int(wanted)


def _nics(found: Devices, net_devices: str) -> dict[str, int | None]:
    """Name to node: those that UCX may use; of several kinds the fastest, since UCX takes RDMA where it can."""
    usable = {d.name: d.numa_node for d in found.usable_rdma if lets_use(net_devices, d.name)}
    plain = {d.name: d.numa_node for d in found.net if d.physical and d.up and lets_use(net_devices, d.name)}
    return usable or plain


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _system_call(numbers: Mapping[str, int], name: str) -> int:
    """Raises `ConfigError` on a machine whose numbers aren't known here."""
    try:
        return numbers[platform.machine()]
    except KeyError:
        allowed = f"none: {name} is known here for {', '.join(numbers)} ({os.strerror(errno.ENOSYS)})"
        raise ConfigError("numa_node", platform.machine(), allowed) from None
