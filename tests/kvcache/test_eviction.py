"""An order decides which pages go first."""

from __future__ import annotations

import numpy as np

from pdkv.kvcache.eviction import LeastRecentlyUsed, NodeUse
from pdkv.kvcache.radix_tree import Node, RadixTree
from tests.kvcache.chains import chain_of


class MostRecentlyUsed:
    def key(self, node: NodeUse) -> float:
        return -node.last_used


def test_the_node_unused_for_longest_goes_first() -> None:
    old, new = (Node(parent=None, pages=np.empty(0, np.int32), key=b"", last_used=n) for n in (3, 4))
    assert LeastRecentlyUsed().key(old) < LeastRecentlyUsed().key(new)


def test_a_tree_follows_the_order_it_was_given() -> None:
    for order, first in ((None, 1), (LeastRecentlyUsed(), 1), (MostRecentlyUsed(), 3)):
        tree = RadixTree(10, order)
        for page, letters in enumerate("abc", 1):
            tree.insert(chain_of(letters), np.array([page], np.int32))
        assert tree.evict(1).tolist() == [first]
