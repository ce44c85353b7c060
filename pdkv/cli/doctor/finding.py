"""What a check found, how bad that is, and what to do.

Guarantees: whatever isn't well says what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, and slower or with less room than it could."""
    FAIL = "fail"
    """A node must not serve like this, or won't."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check."""

    check: str
    level: Level
    found: str
    todo: str = ""

    def __post_init__(self) -> None:
        assert self.todo or self.level is Level.OK


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, todo: str) -> Finding:
    return Finding(check, Level.WARN, found, todo)


def fail(check: str, found: str, todo: str) -> Finding:
    return Finding(check, Level.FAIL, found, todo)


def size(count: int) -> str:
    """Bytes for a reader."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((f"{count / unit:.4g} {name}" for unit, name in units if count >= unit), f"{count} B")
