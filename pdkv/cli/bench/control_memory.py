"""What a node's process holds in memory: its resident peak, and how many objects Python has alive.

Guarantees: a peak is that since the last look taken, of the whole process, whoever allocated it; objects are counted
whenever `look` is called, and counted at all only below 512 bytes each, so a column is none and an object a page is
one a page; what another thread makes for a moment, such as the digests of a portion as numbers, doesn't count, unless
half of the looks fall on it. Linux.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

_SELF = Path("/proc/self")
_RESET_PEAK = "5"
"""As `clear_refs` takes it; proc(5)."""


class Held(NamedTuple):
    """By one process."""

    resident_bytes: int
    """Now."""
    peak_bytes: int
    """The most that were resident since the last look taken."""
    objects: int
    """Now, without garbage."""
    objects_meanwhile: float
    """Median of the looks since the last one taken."""


class MemoryWatch:
    def __init__(self) -> None:
        self._looks: list[int] = []

    def look(self) -> None:
        """Count what is alive."""
        self._looks.append(sys.getallocatedblocks())

    def taken(self) -> Held:
        """Since the last call, and from here on anew."""
        meanwhile = statistics.median(self._looks) if self._looks else math.nan
        self._looks.clear()
        gc.collect()
        status = dict(re.findall(r"^(Vm\w+):\s*(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE))
        objects = sys.getallocatedblocks()
        (_SELF / "clear_refs").write_text(_RESET_PEAK)
        return Held(1024 * int(status["VmRSS"]), 1024 * int(status["VmHWM"]), objects, meanwhile)


class Growth(NamedTuple):
    """Of one process, by one request."""

    resident_bytes: int
    """The peak above what was resident before."""
    objects: float
    """Alive at half of the looks, or more."""

    @classmethod
    def between(cls, before: Held, after: Held) -> Growth:
        return cls(after.peak_bytes - before.resident_bytes, after.objects_meanwhile - before.objects)

    def a_page(self, shorter: Growth, pages: int) -> tuple[float, float]:
        """Bytes and objects for each of the `pages` that this request has more than the shorter one."""
        return (self.resident_bytes - shorter.resident_bytes) / pages, (self.objects - shorter.objects) / pages
