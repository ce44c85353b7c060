"""A node's needs, and machines to hold against them."""

from __future__ import annotations

from typing import Any

from pdkv.cli.doctor.needs import Needs
from pdkv.machine.devices import Devices, Gpu, NetDevice, RdmaDevice, RdmaPort
from pdkv.machine.resources import HugePages, Memory, Process

MIB, GIB = 1 << 20, 1 << 30


def needs(**more: Any) -> Needs:
    """A GiB of pages in plain memory, any lane."""
    plain: dict[str, Any] = {
        "pages": 1024,
        "page_bytes": MIB,
        "memory": "anonymous",
        "memory_path": "",
        "device": "cpu",
        "offload_bytes": 0,
        "ucx_tls": "",
        "net_devices": "",
        "require_rdma": False,
        "numa_node": "auto",
    }
    return Needs(**{**plain, **more})


def process(**more: Any) -> Process:
    plain: dict[str, Any] = {
        "memlock_bytes": None,
        "memlock_hard_bytes": None,
        "capabilities": 0,
        "ptrace_scope": 0,
        "socket_buffer_bytes": 4 * MIB,
    }
    return Process(**{**plain, **more})


def memory(**more: Any) -> Memory:
    plain: dict[str, Any] = {
        "total_bytes": 128 * GIB,
        "available_bytes": 64 * GIB,
        "cgroup_bytes": None,
        "anonymous_huge": "madvise",
        "shared_huge": "never",
        "reserved_huge": (HugePages(2 * MIB, 0, 0),),
    }
    return Memory(**{**plain, **more})


def nic(name: str = "mlx5_0", *, pci: str = "", openable: bool = True, **port: Any) -> RdmaDevice:
    plain: dict[str, Any] = {"number": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "gbit_per_s": 400.0}
    return RdmaDevice(name, (RdmaPort(**{**plain, **port}),), 0, openable, pci)


ETHERNET = NetDevice("eth0", up=True, physical=True, gbit_per_s=10.0, numa_node=0)
NO_RDMA = Devices(net=(ETHERNET,))
WITH_RDMA = Devices(rdma=(nic(),), net=(ETHERNET,))
WITH_GPU = Devices(
    rdma=(nic("near", pci="/a/b/c/1"), nic("far", pci="/a/d/2")), gpus=(Gpu("0000:03:00.0", 0, "/a/b/c/3"),)
)
