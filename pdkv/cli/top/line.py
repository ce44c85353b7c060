"""A line of the fleet's view: figures of one node, from its status and the one before.

Guarantees: a rate is between two answers of one life of a node, over the time between them; there is none across a
restart, and none from one look alone. Every figure is one that the node said, or a difference or sum of such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdkv.cli.top.look import Seen, role_of
from pdkv.node.messages import NodeStatus
from pdkv.node.routing import RouterStatus
from pdkv.router.registry import UP

READY, DRAINING, UNREADY, SILENT = "ready", "draining", "not ready", "no answer"
RATES = {
    "read_main_bytes": "in_main_bytes_per_s",
    "read_index_bytes": "in_index_bytes_per_s",
    "announced_main_bytes": "out_main_bytes_per_s",
    "announced_index_bytes": "out_index_bytes_per_s",
    "done_requests": "done_requests_per_s",
    "output_tokens": "output_tokens_per_s",
}
"""Totals of a status, and the rates that their differences make. What goes out is what was announced or lent."""


@dataclass(frozen=True, slots=True)
class Line:
    """Figures of one node; those of a node that didn't answer are empty."""

    address: str
    role: str
    name: str = ""
    """With its incarnation; of a router its address."""
    state: str = SILENT
    why: str = ""
    """Why it isn't ready, or didn't answer."""
    pages: dict[str, int] = field(default_factory=dict)
    """total, free, used (reserved and private), locked, evictable, quarantined: all but the first add up."""
    requests: int = 0
    """Those that wait among them."""
    queued: int = 0
    leases: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    """By state; of a router its nodes, up or down."""
    lanes: tuple[str, ...] = ()
    hit_share: float | None = None
    """Of the tokens of prompts since the look before, those in pages that were in its cache; at the first look, of all
    since its start. None without a prompt."""
    rates: dict[str, float] = field(default_factory=dict)
    """See `RATES`; empty at the first look."""
    totals: dict[str, int] = field(default_factory=dict)
    """As the node counts them, since its start."""


def line_of(seen: Seen, before: Seen | None) -> Line:
    """`before`: of the same address, at the look before."""
    status = seen.status
    if isinstance(status, RouterStatus):
        return _router(seen, status)
    if status is None:
        return Line(seen.address, role_of(seen), why=seen.error)
    old = before.status if before is not None and isinstance(before.status, NodeStatus) else None
    if old is not None and old.name != status.name:
        old = None
    since = {} if old is None else old.totals
    more = {name: count - since.get(name, 0) for name, count in status.totals.items()}
    elapsed_s = seen.at_s - before.at_s if old is not None and before is not None else 0.0
    return Line(
        seen.address,
        role_of(seen),
        str(status.name),
        *_state(status),
        _pages(status),
        status.requests,
        status.queued,
        status.leases,
        dict(Counter(peer.state for peer in status.peers.values())),
        tuple(sorted({peer.lane for peer in status.peers.values() if peer.lane})),
        _hit_share(status, more),
        {rate: max(more.get(total, 0), 0) / elapsed_s for total, rate in RATES.items()} if elapsed_s > 0 else {},
        dict(status.totals),
    )


def _router(seen: Seen, status: RouterStatus) -> Line:
    words = [*status.prefill.values(), *status.decode.values()]
    up = sum(word == UP for word in words)
    return Line(
        seen.address,
        "router",
        seen.address,
        READY if all(UP in nodes.values() for nodes in (status.prefill, status.decode)) else UNREADY,
        requests=status.requests,
        queued=status.waiting,
        peers={"UP": up, "DOWN": len(words) - up},
    )


def _state(status: NodeStatus) -> tuple[str, str]:
    if status.draining:
        return DRAINING, status.unready
    return (UNREADY, status.unready) if status.unready else (READY, "")


def _pages(status: NodeStatus) -> dict[str, int]:
    of = status.pages
    cached = of.get("cached", 0)
    locked = min(status.uses.get("locked", 0), cached)
    return {
        "total": of.get("total", 0),
        "used": of.get("reserved", 0) + of.get("private", 0),
        "locked": locked,
        "evictable": cached - locked,
        "quarantined": of.get("quarantined", 0),
        "free": of.get("free", 0),
    }


def _hit_share(status: NodeStatus, more: dict[str, int]) -> float | None:
    if (prompts := more.get("prompt_tokens", 0)) <= 0:
        return None
    return min(more.get("hit_pages", 0) * status.contract.page_tokens / prompts, 1.0)


def lines_of(looks: Iterable[Seen], before: Iterable[Seen]) -> list[Line]:
    old = {seen.address: seen for seen in before}
    return [line_of(seen, old.get(seen.address)) for seen in looks]
