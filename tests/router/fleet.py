"""A registry on a clock of the test's own, and nodes that say what the test wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdkv.ids import Incarnation, NodeId, PeerName
from pdkv.node.messages import NodeStatus
from pdkv.router.registry import Node, Pair, Registry, Role
from tests.rpc import samples


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def registry(prefills: int, decodes: int, clock: Clock | None = None) -> Registry:
    """Nodes p0, p1 …, d0, d1 …"""
    names = [f"p{i}" for i in range(prefills)], [f"d{i}" for i in range(decodes)]
    return Registry(*names, retry_s=5.0, now=clock or Clock())


def node(registry: Registry, address: str) -> Node:
    return next(n for n in registry if n.address == address)


def pair(registry: Registry, prefill: str, decode: str) -> Pair:
    return Pair(node(registry, prefill), node(registry, decode))


def said(of: Node, weights_id: str = "a", *, life: int = 1, **facts: Any) -> NodeStatus:
    """What the node says in its `life`; the sixteenth hex digit is as good as any."""
    name = PeerName(NodeId(of.address), Incarnation(f"{life:032x}"))
    status = replace(samples.status(of.role, name), contract=samples.contract(weights_id), unready="", draining=False)
    return replace(status, **facts)


def learn(registry: Registry, address: str, weights_id: str = "a", **facts: Any) -> None:
    one = node(registry, address)
    registry.learn(one, said(one, weights_id, **facts))


__all__ = ["Clock", "Role", "learn", "node", "pair", "registry", "said"]
