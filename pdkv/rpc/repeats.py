"""Lines of the log that would say the same again and again.

Guarantees: of equal words at most one line every `EVERY_S`, which tells how often they were left out before; no more
than `KEPT` of them are remembered, the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
KEPT = 256


@dataclass(slots=True)
class _Told:
    at_s: float
    left_out: int = 0


class Repeats:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: dict[str, _Told] = {}

    def line(self, words: str) -> str:
        """What is to be logged; empty: nothing."""
        told, now_s = self._told.get(words), self._now()
        if told is not None and now_s < told.at_s + EVERY_S:
            told.left_out += 1
            return ""
        self._told.pop(words, None)
        if len(self._told) == KEPT:
            del self._told[next(iter(self._told))]
        self._told[words] = _Told(now_s)
        return f"{words} ({told.left_out} times more before)" if told is not None and told.left_out else words
