"""What every benchmark hands in: checks with their targets, figures without one, and a stamp of where they come from.

Guarantees: a check that could not be measured is not ok; a target is met or missed by the value alone; JSON holds plain
numbers only (a value that is not finite becomes null, and its check is not ok).
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdkv import __version__

STAMPED = ("nixl", "numpy", "torch", "grpcio", "protobuf", "xxhash")
"""Packages whose versions a figure may depend on."""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with a target."""

    name: str
    value: float
    """NaN if it could not be measured."""
    op: Literal["<=", ">="]
    target: float
    command: str
    """What measures it again."""
    note: str = ""
    """What it was measured against, or why it could not be."""

    @property
    def ok(self) -> bool:
        return self.value <= self.target if self.op == "<=" else self.value >= self.target


@dataclass(slots=True)
class Report:
    """Of one script."""

    name: str
    command: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Anything JSON can hold: rows of a sweep, medians, spreads."""
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "command": self.command,
            "machine": stamp(),
            "checks": as_map(self.checks),
            "figures": _plain(self.figures),
            "elapsed_s": round(self.elapsed_s, 1),
            "ok": self.ok,
        }

    def write(self, path: Path) -> None:
        """As indented JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")


def as_map(checks: Iterable[Check]) -> dict[str, dict[str, Any]]:
    """Name to value, target, ok, command and note."""
    return {
        check.name: {
            "value": _plain(check.value),
            "target": f"{check.op} {check.target:g}",
            "ok": check.ok,
            "command": check.command,
            "note": check.note,
        }
        for check in checks
    }


def as_table(checks: Iterable[Check]) -> Table:
    table = Table("check", "value", "target", "", "against", box=SIMPLE_HEAD)
    for check in checks:
        verdict = "[green]ok[/]" if check.ok else "[red]missed[/]"
        table.add_row(check.name, f"{check.value:.4g}", f"{check.op} {check.target:g}", verdict, check.note)
    return table


def stamp() -> dict[str, Any]:
    """The machine, its load now and the versions that a figure depends on."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pdkv": __version__,
        **{name: _version(name) for name in STAMPED},
        "ucx_settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
