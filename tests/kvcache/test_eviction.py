"""An order decides which pages go first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.kvcache.eviction import ORDERS, Key, NodeUse, eviction_order
from pdkv.kvcache.radix_node import Use
from pdkv.kvcache.radix_tree import RadixTree
from tests.kvcache.chains import chain_of


@dataclass(frozen=True)
class Told:
    """All that an order may look at."""

    created: int = 5
    last_used: int = 5
    uses: int = 5
    priority: int = 5
    output: bool = False


class MostRecentlyUsed:
    """One that is not in the registry."""

    def key(self, node: NodeUse) -> Key:
        return (-node.last_used,)


PLAIN = Told()


@pytest.mark.parametrize(
    ("policy", "goes_first"),
    [
        ("lru", {"last_used": 4}),
        ("lfu", {"uses": 4}),
        ("lfu", {"last_used": 4}),
        ("fifo", {"created": 4}),
        ("priority", {"priority": 4}),
        ("priority", {"last_used": 4}),
    ],
)
def test_what_a_policy_looks_at(policy: str, goes_first: dict[str, int]) -> None:
    order = eviction_order(policy)
    assert order.key(replace(PLAIN, **goes_first)) < order.key(PLAIN)


@pytest.mark.parametrize(
    ("policy", "indifferent"),
    [("lru", ("created", "uses", "priority")), ("fifo", ("last_used", "uses", "priority")), ("lfu", ("priority",))],
)
def test_what_it_does_not_look_at(policy: str, indifferent: tuple[str, ...]) -> None:
    order = eviction_order(policy)
    assert {order.key(replace(PLAIN, **{name: 1})) for name in indifferent} == {order.key(PLAIN)}


@pytest.mark.parametrize(
    ("policy", "stronger"), [("lfu", "uses"), ("priority", "priority")], ids=["uses before age", "priority before age"]
)
def test_what_counts_first(policy: str, stronger: str) -> None:
    order = eviction_order(policy)
    assert order.key(replace(PLAIN, **{stronger: 4, "last_used": 9})) < order.key(PLAIN)


@pytest.mark.parametrize("policy", ORDERS)
def test_an_answer_goes_before_any_prompt_of_its_priority(policy: str) -> None:
    order, answer = eviction_order(policy), Told(created=9, last_used=9, uses=9, output=True)
    assert order.key(answer) < order.key(PLAIN)
    assert (order.key(answer) < order.key(replace(PLAIN, priority=1))) == (policy != "priority")


def request(tree: RadixTree, letters: str, page: int, use: Use) -> None:
    tree.lock(tree.root, use=use)
    tree.unlock(tree.extend(tree.root, chain_of(letters), np.array([page], np.int32), use=use).node)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", [4, 3, 1, 2]), ("lfu", [4, 3, 2, 1]), ("fifo", [4, 1, 2, 3]), ("priority", [2, 4, 1, 3])],
)
def test_a_tree_follows_its_policy(policy: str, order: list[int]) -> None:
    tree = RadixTree(10, eviction_order(policy))
    priority = {"a": 1, "b": 0, "c": 2, "d": 1}
    for page, letters in enumerate("abc", 1):
        request(tree, letters, page, Use(priority[letters]))
    for letters in "aab":
        request(tree, letters, 9, Use(priority[letters]))
    request(tree, "d", 4, Use(priority["d"], output=True))
    tree.check([])
    assert [int(tree.evict(1)[0]) for _ in range(4)] == order


def test_an_order_of_ones_own() -> None:
    tree = RadixTree(10, MostRecentlyUsed())
    for page, letters in enumerate("abc", 1):
        tree.insert(chain_of(letters), np.array([page], np.int32))
    assert tree.evict(1).tolist() == [3]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'mru' can't be used; allowed: lru, lfu, fifo, priority"):
        eviction_order("mru")
