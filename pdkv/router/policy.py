"""Which prefill and which decode node serve a request.

Guarantees: over time every pair gets its turn, and each node of a role equally many; no pair is chosen that the
caller excludes; nodes that are down are chosen only when nothing else is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.router.registry import Registry


@dataclass(frozen=True, slots=True)
class Pair:
    """Addresses of the two nodes of a request."""

    prefill: str
    decode: str


class RoundRobin:
    """Pairs in turn. Neighbours differ in both nodes where there are several of each."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        p, d = registry.prefill, registry.decode
        period = math.lcm(len(p), len(d))
        self._pairs = [Pair(p[k % len(p)], d[(k + k // period) % len(d)]) for k in range(len(p) * len(d))]
        self._turn = 0

    def pick(self, excluded: Callable[[Pair], bool]) -> Pair | None:
        """The next pair in turn whose nodes are both usable; failing that, any that is not excluded; else None."""
        usable = self._registry.usable
        waiting = [pair for pair in self._pairs[self._turn :] + self._pairs[: self._turn] if not excluded(pair)]
        healthy = (pair for pair in waiting if usable(pair.prefill) and usable(pair.decode))
        pair = next(healthy, waiting[0] if waiting else None)
        if pair is not None:
            self._turn = (self._pairs.index(pair) + 1) % len(self._pairs)
        return pair
