"""How fast this host's network says it is.

Guarantees: only ports of real devices that are up count, and only if the system knows their rate; what it doesn't know
is 0, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SYS_CLASS = Path("/sys/class")


@dataclass(frozen=True, slots=True)
class Port:
    """A network interface, or a port of an RDMA device, by the name that UCX has for it."""

    name: str
    gbit_per_s: float


def ports(root: Path = SYS_CLASS) -> list[Port]:
    """The fastest first."""
    found = [*_ethernet(root / "net"), *_rdma(root / "infiniband")]
    return sorted(found, key=lambda port: -port.gbit_per_s)


def link_gbit_per_s(devices: Sequence[str] = (), root: Path = SYS_CLASS) -> float:
    """Of the fastest port, or of `devices` together, which are named as for UCX (mlx5_0:1, eth0); 0 if unknown."""
    there = {port.name: port.gbit_per_s for port in ports(root)}
    if devices:
        return sum(there.get(name, 0.0) for name in devices)
    return max(there.values(), default=0.0)


def _ethernet(folder: Path) -> Iterator[Port]:
    for interface in _folders(folder):
        mbit = _text(interface / "speed")
        # virtual ones have no device behind them, and say any speed
        if (
            (interface / "device").exists()
            and _text(interface / "operstate") == "up"
            and re.fullmatch("[1-9][0-9]*", mbit)
        ):
            yield Port(interface.name, int(mbit) / 1000)


def _rdma(folder: Path) -> Iterator[Port]:
    for device in _folders(folder):
        for port in _folders(device / "ports"):
            rate = re.match(r"([0-9.]+) Gb/sec", _text(port / "rate"))
            if rate and "ACTIVE" in _text(port / "state"):
                yield Port(f"{device.name}:{port.name}", float(rate[1]))


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Stripped; empty for what can't be read, as the speed of an interface that has none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
