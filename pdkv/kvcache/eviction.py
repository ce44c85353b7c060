"""Which cached pages go first.

Guarantees: an order looks only at what a tree node tells about its use and returns a number; the node with the least
number goes first. It decides the order, never whether: locked nodes and nodes with children are not offered to it.
"""

from __future__ import annotations

from typing import Protocol


class NodeUse(Protocol):
    """What an eviction order may look at."""

    @property
    def last_used(self) -> int:
        """The tree's logical clock when the node was made, or last locked or unlocked."""
        ...


class EvictionOrder(Protocol):
    def key(self, node: NodeUse) -> float: ...


class LeastRecentlyUsed:
    """The pages unused for longest go first."""

    def key(self, node: NodeUse) -> float:
        return node.last_used
