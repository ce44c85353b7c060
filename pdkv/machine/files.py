"""Small files of /sys and /proc.

Guarantees: what isn't there, or can't be read, is the default, never an error: machines and containers show what they
like of themselves.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path("/")


def text(path: Path, default: str = "") -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return default


def number(path: Path, default: int | None = None) -> int | None:
    """The first whole number in it."""
    found = re.search(r"-?\d+", text(path))
    return int(found[0]) if found else default


def entries(path: Path) -> tuple[Path, ...]:
    """Of a folder, by name."""
    try:
        return tuple(path / name for name in sorted(os.listdir(path)))
    except OSError:
        return ()


def chosen(path: Path) -> str:
    """Of a file that lists choices with the one in force in brackets: "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text(path))
    return found[1] if found else ""


def id_list(words: str) -> frozenset[int]:
    """Numbers as the kernel lists them: "0-3,8"."""
    found: set[int] = set()
    for part in words.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
