"""Which prefill and which decode node serve a request.

Guarantees: no pair is chosen that the caller excludes or that is barred; nodes that are down, and pairs that failed,
are chosen only when nothing else is left, and those that somebody else is just trying last; of those that are left, the
pair of least cost is chosen. Where costs are equal, or none are known, every pair that may be gets its turn over time,
and each node of a role equally many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

from pdkv.router.pairing import Pairing
from pdkv.router.registry import Node, Pair, Registry, Role
from pdkv.router.weights import Cost, Weights


class Policy(StrEnum):
    """What a router goes by."""

    PREFIX = "prefix"
    """Where most of the prompt is cached, and by load."""
    ROUND_ROBIN = "round-robin"


class Turns:
    """Pairs in turn. Neighbours differ in both nodes where there are several of each."""

    def __init__(self, registry: Registry, pairing: Pairing) -> None:
        self._registry = registry
        self._pairing = pairing
        self._pairs: list[Pair] = []
        self._version = -1
        self._turn = 0

    def pick(self, excluded: Callable[[Pair], bool], weights: Weights | None = None) -> Pair | None:
        """The next pair in turn that is as good as any; None if there is none. Without `weights` all cost the same."""
        self._renew()
        best: tuple[int, Cost | None] | None = None
        at = 0
        for step in range(len(self._pairs)):
            place = (self._turn + step) % len(self._pairs)
            pair = self._pairs[place]
            rank = self._rank(pair)
            if (best is not None and rank > best[0]) or excluded(pair) or self._pairing.bar(pair) is not None:
                continue
            cost = weights.of(pair) if weights else None
            if best is None or rank < best[0] or (cost is not None and best[1] is not None and cost < best[1]):
                best, at = (rank, cost), place
            if not rank and weights is None:
                break
        if best is None:
            return None
        self._turn = (at + 1) % len(self._pairs)
        return self._pairs[at]

    def alternates(self, pair: Pair, most: int, weights: Weights | None = None) -> list[Node]:
        """Other prefill nodes that are known to suit the same decode node now, those of least cost first, and then
        those whose turn comes first."""
        others = dict.fromkeys(each.prefill for each in (*self._pairs[self._turn :], *self._pairs[: self._turn]))
        found = [node for node in others if node is not pair.prefill and self._suits(Pair(node, pair.decode))]
        return sorted(found, key=weights.of_prefill)[:most] if weights else found[:most]

    def _suits(self, pair: Pair) -> bool:
        known = pair.prefill.kind is not None and not pair.prefill.down
        return known and self._pairing.clear(pair) and self._pairing.bar(pair) is None

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
