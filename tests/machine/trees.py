"""Machines made of files: what /sys and /proc of other machines look like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PCI = "sys/devices/pci0000:00"


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write files; a content that starts with "-> " is a link to a path below the root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(root / content.removeprefix("-> "))
        else:
            path.write_text(content + "\n", "utf-8")
    return root


def rdma_nic(
    name: str = "mlx5_0", *, node: int = 0, state: str = "4: ACTIVE", link: str = "InfiniBand", slot: str = "01:00.0"
) -> dict[str, str]:
    """With its verbs device in /dev."""
    at, port = f"sys/class/infiniband/{name}", f"sys/class/infiniband/{name}/ports/1"
    return {
        f"{PCI}/{slot}/numa_node": str(node),
        f"{at}/device": f"-> {PCI}/{slot}",
        f"{port}/state": state,
        f"{port}/rate": "400 Gb/sec (4X NDR)",
        f"{port}/link_layer": link,
        f"sys/class/infiniband_verbs/uverbs-{name}/ibdev": name,
        f"dev/infiniband/uverbs-{name}": "",
    }


def roce_gid(name: str, index: int, gid: str, kind: str = "RoCE v2") -> dict[str, str]:
    port = f"sys/class/infiniband/{name}/ports/1"
    return {f"{port}/gid_attrs/types/{index}": kind, f"{port}/gids/{index}": gid}


def net_device(name: str = "eth0", *, node: int = -1, state: str = "up", slot: str = "02:00.0") -> dict[str, str]:
    return {
        f"{PCI}/{slot}/numa_node": str(node),
        f"sys/class/net/{name}/device": f"-> {PCI}/{slot}",
        f"sys/class/net/{name}/operstate": state,
        f"sys/class/net/{name}/speed": "100000",
    }


def gpu(slot: str = "03:00.0", *, node: int = 0) -> dict[str, str]:
    return {
        f"{PCI}/{slot}/vendor": "0x10de",
        f"{PCI}/{slot}/class": "0x030200",
        f"{PCI}/{slot}/numa_node": str(node),
        f"sys/bus/pci/devices/0000:{slot.rpartition('/')[2]}": f"-> {PCI}/{slot}",
    }


def numa(nodes: Mapping[int, str]) -> dict[str, str]:
    """Node to its CPUs, as "0-3"."""
    folder = "sys/devices/system/node"
    listed = ",".join(map(str, nodes))
    return {f"{folder}/has_memory": listed} | {f"{folder}/node{n}/cpulist": cpus for n, cpus in nodes.items()}


def process(*, memlock: str = "8388608", capabilities: int = 0, ptrace_scope: int = 0) -> dict[str, str]:
    return {
        "proc/self/limits": f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {memlock}  {memlock}  bytes",
        "proc/self/status": f"Name:\tpdkv\nCapEff:\t{capabilities:016x}",
        "proc/sys/kernel/yama/ptrace_scope": str(ptrace_scope),
        "proc/sys/net/core/wmem_max": "4194304",
    }


def memory(available_gib: int = 64, *, huge: str = "always [madvise] never", reserved: int = 0) -> dict[str, str]:
    """`reserved` huge pages of 2 MiB."""
    kib = available_gib << 20
    folder = "sys/kernel/mm"
    return {
        "proc/meminfo": f"MemTotal:  {2 * kib} kB\nMemFree:  {kib} kB\nMemAvailable:  {kib} kB",
        f"{folder}/transparent_hugepage/enabled": huge,
        f"{folder}/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force",
        f"{folder}/hugepages/hugepages-2048kB/nr_hugepages": str(reserved),
        f"{folder}/hugepages/hugepages-2048kB/free_hugepages": str(reserved),
        f"{folder}/hugepages/hugepages-2048kB/resv_hugepages": "0",
    }
