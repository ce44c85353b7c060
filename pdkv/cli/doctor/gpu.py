"""Checks of a pool on a GPU: the card, its nearest NIC, and how a NIC reaches its memory.

Guarantees: a node with its pool in host memory needs none of these, and gets none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.cli.doctor.finding import Finding, fail, ok, size, warn
from pdkv.cli.doctor.needs import Needs
from pdkv.kvcache.gpudirect import Flush
from pdkv.machine.devices import Devices, lets_use, shared_path
from pdkv.machine.files import ROOT, text

_DMABUF_SINCE = (5, 12)
"""Linux that hands GPU memory to a NIC's driver by dmabuf."""


@dataclass(frozen=True, slots=True)
class Card:
    """What CUDA says of the pool's device."""

    name: str
    address: str
    """On the PCI bus, as "0000:3b:00.0"."""
    free_bytes: int
    flush: Flush


def look(device: str) -> Card | str:
    """Why there is none, otherwise."""
    import torch

    from pdkv.kvcache.gpudirect import flush_of

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    try:
        facts: Any = torch.cuda.get_device_properties(device)
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        return str(error)
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return Card(facts.name, address, free, flush_of(torch.device(device)))


def gpu(needs: Needs, card: Card | str) -> Finding:
    """The pool's own device, and whether the pool fits."""
    check = "gpu"
    if isinstance(card, str):
        return fail(
            check,
            f"device {needs.device} can't be used: {card}",
            "torch for CUDA and a driver that fits, or device cpu",
        )
    words = f"{card.name} at {card.address}, {size(card.free_bytes)} free; the pool takes {size(needs.pool_bytes)}"
    if needs.pool_bytes > card.free_bytes:
        return fail(check, words, f"at most {card.free_bytes // needs.page_bytes:,} pages (pool_pages)")
    return ok(check, words)


def nearest_nic(needs: Needs, card: Card, found: Devices) -> Finding:
    """Whether the NIC that carries the pages shares its PCIe switch, or at least its socket, with the GPU."""
    check = "gpu and nic"
    own = next((g for g in found.gpus if g.address == card.address), None)
    if own is None or not found.usable_rdma:
        return ok(check, "no usable RDMA device" if own else f"{card.address} isn't shown in /sys: nothing to compare")
    distances = {device.name: shared_path(device.pci, own.pci) for device in found.usable_rdma}
    best = [name for name, common in distances.items() if common == max(distances.values())]
    used = [d for d in found.usable_rdma if lets_use(needs.net_devices, d.name)]
    far = [d.name for d in used if d.name not in best]
    words = f"nearest to {card.address}: {', '.join(best)}"
    if needs.net_devices in ("", "all"):
        return ok(check, f"{words}; UCX chooses by distance (one node a GPU: net_devices {best[0]}:1)")
    if far:
        return warn(check, f"{words}; net_devices names {', '.join(far)}", f"net_devices {best[0]}:1")
    return ok(check, words)


def gpudirect(card: Card, found: Devices, root: Path = ROOT) -> Iterator[Finding]:
    """How a NIC reaches GPU memory, and when a kernel sees what it wrote."""
    if found.usable_rdma:
        yield _path(root)
    check = "gpudirect flush"
    if card.flush is Flush.MISSING:
        todo = "a driver and CUDA of 11.3 or later: until then a digest may come too early, and a read fails as damaged"
        yield warn(check, "neither ordered by the platform nor offered by the driver", todo)
    else:
        yield ok(check, f"{card.flush.value} before each digest")


def _path(root: Path) -> Finding:
    check = "gpudirect"
    if (root / "sys/module/nvidia_peermem").exists():
        return ok(check, "nvidia_peermem is loaded")
    release = re.match(r"(\d+)\.(\d+)", text(root / "proc/sys/kernel/osrelease"))
    kernel = (int(release[1]), int(release[2])) if release else (0, 0)
    if "Open Kernel Module" in text(root / "proc/driver/nvidia/version") and kernel >= _DMABUF_SINCE:
        return ok(check, f"by dmabuf (open kernel module, Linux {kernel[0]}.{kernel[1]})")
    todo = "modprobe nvidia_peermem, or NVIDIA's open kernel module on Linux 5.12 or later"
    return warn(check, "neither nvidia_peermem nor dmabuf: reads are staged in host memory", todo)
