"""Which cached pages go first.

Guarantees: an order looks only at what a tree node tells about its use and returns a key; the node with the least key
goes first. It decides the order, never whether: locked nodes and nodes with children are not offered to it.

An answer is seldom asked for again unless the conversation goes on, and then a prompt begins with it and it counts as
prompt. So every order puts pages of an answer that no prompt has begun with before all pages of prompts; only an
operator's priority stands above that.

Another order is one class with a `key`, and one line in `ORDERS`.
"""

from __future__ import annotations

from typing import Protocol

from pdkv.errors import ConfigError

Key = tuple[int, ...]
"""Compared from left to right; all keys of one order have one length."""


class NodeUse(Protocol):
    """What an eviction order may look at. Times are the tree's logical clock."""

    @property
    def created(self) -> int:
        """When its first page came in."""
        ...

    @property
    def last_used(self) -> int:
        """When it was made, or last locked or unlocked."""
        ...

    @property
    def uses(self) -> int:
        """Requests that had its pages in their sequence."""
        ...

    @property
    def priority(self) -> int:
        """The highest of those requests."""
        ...

    @property
    def output(self) -> bool:
        """Made of an answer, and no prompt has begun with it since."""
        ...


class EvictionOrder(Protocol):
    def key(self, node: NodeUse) -> Key: ...


class LeastRecentlyUsed:
    """The pages unused for longest go first."""

    def key(self, node: NodeUse) -> Key:
        return not node.output, node.last_used


class LeastFrequentlyUsed:
    """The pages of the fewest requests go first; of equal ones those unused for longest."""

    def key(self, node: NodeUse) -> Key:
        return not node.output, node.uses, node.last_used


class FirstInFirstOut:
    """The oldest pages go first, used or not."""

    def key(self, node: NodeUse) -> Key:
        return not node.output, node.created


class LowestPriority:
    """The pages of the least important requests go first; of equal ones answers, then those unused for longest."""

    def key(self, node: NodeUse) -> Key:
        return node.priority, not node.output, node.last_used


ORDERS: dict[str, type[EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "priority": LowestPriority,
}


def eviction_order(name: str) -> EvictionOrder:
    """Raises `ConfigError` unless it is a name in `ORDERS`."""
    order = ORDERS.get(name)
    if order is None:
        raise ConfigError("eviction", name, ", ".join(ORDERS))
    return order()
