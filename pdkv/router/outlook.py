"""Whether a router has any pair of nodes for a request, and why not.

Guarantees: where no node of a role is up, it is told what those that are known say or what calls to them came to; where
nodes of both roles are up and none may be paired, which refused which, and over what; at most `NAMED` of them, each in
at most `WORDS` characters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import PdkvError, PeerLost
from pdkv.router.pairing import Pairing
from pdkv.router.registry import Node, Pair, Registry, Role

NAMED = 2
WORDS = 160


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What stands in the way of every request."""

    why: str
    """Changes only when something else does."""
    detail: str
    """Of which nodes, in their own words of now."""
    error: PdkvError
    """What a request ends with."""


def hindrance(registry: Registry, pairing: Pairing, up: Callable[[Node], bool]) -> Hindrance | None:
    """None: there is a pair of nodes which are `up` that may be tried."""
    nodes = {role: registry.nodes(role) for role in Role}
    able = {role: [node for node in nodes[role] if up(node)] for role in Role}
    if missing := [role for role in Role if not able[role]]:
        why = f"no {' and no '.join(missing)} node is up"
        detail = _few([f"{node.address}: {node.down}" for role in missing for node in nodes[role] if node.down])
        return Hindrance(why, detail, PeerLost(f"{why}: {detail}" if detail else why))
    bars: dict[Pair, PdkvError] = {}
    for pair in (Pair(prefill, decode) for prefill in able[Role.PREFILL] for decode in able[Role.DECODE]):
        if (bar := pairing.bar(pair)) is None:
            return None
        bars[pair] = bar
    detail = _few([f"{pair}: {bar.kind}: {bar}" for pair, bar in bars.items()])
    return Hindrance("no two nodes that are up may be paired", detail, next(iter(bars.values())))


def _few(words: list[str]) -> str:
    more = [f"{len(words) - NAMED} more"] if len(words) > NAMED else []
    return "; ".join([each if len(each) <= WORDS else each[: WORDS - 1] + "…" for each in words[:NAMED]] + more)
