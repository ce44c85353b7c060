"""NICs and GPUs of a machine, and where they sit.

Guarantees: a device is listed whether it can be used or not, and says which; a NUMA node that the machine doesn't name
(-1, as on machines with one) is None.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pdkv.machine.files import ROOT, entries, number, text

NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""First byte of the PCI class of a GPU: VGA or 3D controller."""
_NO_GID = re.compile(r"^[0:]*$")
_LINK_LOCAL = re.compile(r"^fe80:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device."""

    number: int
    state: str
    """As "ACTIVE", "DOWN"."""
    link_layer: str
    """"InfiniBand" or "Ethernet"; empty where it isn't said, as of EFA."""
    gbit_per_s: float | None
    roce_gids: tuple[int, ...] = ()
    """Indices of RoCE v2 GIDs that belong to an address which isn't link-local: what can be routed between hosts."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A device in /sys/class/infiniband."""

    name: str
    ports: tuple[RdmaPort, ...]
    numa_node: int | None
    openable: bool
    """This process may open its /dev/infiniband/uverbs: a container often sees /sys without that."""
    pci: str
    """Path of the PCI device, from which distances follow."""

    @property
    def usable(self) -> bool:
        return self.openable and any(port.active for port in self.ports)


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface of this network namespace."""

    name: str
    up: bool
    physical: bool
    """It has a device behind it, unlike lo, bridges and veth pairs."""
    gbit_per_s: float | None
    """None where the driver doesn't say."""
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU on the PCI bus; a container may see GPUs that it wasn't given."""

    address: str
    """As "0000:3b:00.0"."""
    numa_node: int | None
    pci: str


@dataclass(frozen=True, slots=True)
class Devices:
    rdma: tuple[RdmaDevice, ...] = ()
    net: tuple[NetDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @property
    def usable_rdma(self) -> tuple[RdmaDevice, ...]:
        return tuple(device for device in self.rdma if device.usable)


def devices(root: Path = ROOT) -> Devices:
    verbs = {text(path / "ibdev"): path.name for path in entries(root / "sys/class/infiniband_verbs")}
    return Devices(
        rdma=tuple(_rdma(path, root, verbs) for path in entries(root / "sys/class/infiniband")),
        net=tuple(_net(path) for path in entries(root / "sys/class/net") if path.is_dir()),
        gpus=tuple(_gpu(path) for path in entries(root / "sys/bus/pci/devices") if _is_gpu(path)),
    )


def lets_use(net_devices: str, name: str) -> bool:
    """Whether UCX_NET_DEVICES, as "all", "mlx5_0:1,eth0" or "^lo", allows a device; empty allows all."""
    if net_devices in ("", "all"):
        return True
    listed = {each.strip().partition(":")[0] for each in net_devices.removeprefix("^").split(",")}
    return (name in listed) is not net_devices.startswith("^")


def shared_path(one: str, other: str) -> int:
    """Bridges that two PCI paths have in common: the more, the nearer."""
    return len(os.path.commonpath([one, other]).split("/")) if one and other else 0


def _rdma(path: Path, root: Path, verbs: dict[str, str]) -> RdmaDevice:
    node = root / "dev/infiniband" / verbs.get(path.name, "")
    return RdmaDevice(
        name=path.name,
        ports=tuple(_port(port) for port in entries(path / "ports")),
        numa_node=_numa_node(path / "device"),
        openable=path.name in verbs and os.access(node, os.R_OK | os.W_OK),
        pci=_pci(path / "device"),
    )


def _port(path: Path) -> RdmaPort:
    rate = re.match(r"([\d.]+) Gb/sec", text(path / "rate"))
    gids = []
    for kind in entries(path / "gid_attrs/types"):
        gid = text(path / "gids" / kind.name)
        if text(kind) == "RoCE v2" and not _NO_GID.match(gid) and not _LINK_LOCAL.match(gid):
            gids.append(int(kind.name))
    return RdmaPort(
        number=int(path.name),
        state=text(path / "state").rpartition(" ")[2],
        link_layer=text(path / "link_layer"),
        gbit_per_s=float(rate[1]) if rate else None,
        roce_gids=tuple(sorted(gids)),
    )


def _net(path: Path) -> NetDevice:
    mbit_per_s = number(path / "speed")
    return NetDevice(
        name=path.name,
        # lo and tunnels say "unknown" while they work
        up=text(path / "operstate") in ("up", "unknown"),
        physical=(path / "device").exists(),
        gbit_per_s=mbit_per_s / 1000 if mbit_per_s is not None and mbit_per_s > 0 else None,
        numa_node=_numa_node(path / "device"),
    )


def _is_gpu(path: Path) -> bool:
    return text(path / "vendor") == NVIDIA and text(path / "class").startswith(_DISPLAY)


def _gpu(path: Path) -> Gpu:
    return Gpu(path.name, _numa_node(path), _pci(path))


def _numa_node(path: Path) -> int | None:
    node = number(path / "numa_node")
    return None if node is None or node < 0 else node


def _pci(path: Path) -> str:
    return os.path.realpath(path) if path.exists() else ""
