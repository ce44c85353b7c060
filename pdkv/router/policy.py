"""Which prefill and which decode node serve a request.

Guarantees: over time every pair that may be gets its turn, and each node of a role equally many; no pair is chosen that
the caller excludes or that is barred; nodes that are down, and pairs that failed, are chosen only when nothing else is
left, and those that somebody else is just trying last.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdkv.router.pairing import Pairing
from pdkv.router.registry import Node, Pair, Registry, Role


class RoundRobin:
    """Pairs in turn. Neighbours differ in both nodes where there are several of each."""

    def __init__(self, registry: Registry, pairing: Pairing) -> None:
        self._registry = registry
        self._pairing = pairing
        self._pairs: list[Pair] = []
        self._version = -1
        self._turn = 0

    def pick(self, excluded: Callable[[Pair], bool]) -> Pair | None:
        """The next pair in turn that is as good as any; None if there is none."""
        self._renew()
        best: tuple[int, int] | None = None
        for step in range(len(self._pairs)):
            place = (self._turn + step) % len(self._pairs)
            pair = self._pairs[place]
            rank = self._rank(pair)
            if (best is None or rank < best[0]) and not excluded(pair) and self._pairing.bar(pair) is None:
                best = rank, place
                if not rank:
                    break
        if best is None:
            return None
        self._turn = (best[1] + 1) % len(self._pairs)
        return self._pairs[best[1]]

    def alternates(self, pair: Pair, most: int) -> list[Node]:
        """Other prefill nodes that are known to suit the same decode node now, those first whose turn comes first."""
        others = (self._pairs[(self._turn + k) % len(self._pairs)].prefill for k in range(len(self._pairs)))
        found: list[Node] = []
        for node in dict.fromkeys(others):
            other = Pair(node, pair.decode)
            good = node.kind is not None and not node.down and self._pairing.clear(other)
            if node is not pair.prefill and good and self._pairing.bar(other) is None and len(found) < most:
                found.append(node)
        return found

    def _rank(self, pair: Pair) -> int:
        """0: nothing speaks against it."""
        if all(map(self._registry.open, pair.nodes)):
            return 0 if self._pairing.clear(pair) else 1
        return 2 if all(node.trial is None for node in pair.nodes) else 3

    def _renew(self) -> None:
        if self._version == self._registry.version:
            return
        self._version = self._registry.version
        p, d = self._registry.nodes(Role.PREFILL), self._registry.nodes(Role.DECODE)
        period = math.lcm(len(p), len(d)) or 1
        self._pairs = [Pair(p[k % len(p)], d[(k + k // period) % len(d)]) for k in range(len(p) * len(d))]
        self._turn %= max(len(self._pairs), 1)
