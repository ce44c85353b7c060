"""A node's run of pages grows and shrinks at its end, at the cost of what comes and goes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdkv.kvcache.radix_node import Node


def node_of(*pages: int) -> Node:
    return Node(parent=None, pages=np.array(pages, np.int32), key=b"")


def test_a_path_ends_at_the_root() -> None:
    root = node_of()
    inner = Node(parent=root, pages=root.pages, key=b"a")
    assert list(Node(parent=inner, pages=root.pages, key=b"b").path())[1:] == [inner, root]


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(-9, -1)), max_size=30))
def test_growing_and_cutting_is_a_list(steps: list[int]) -> None:
    node, model, seen = node_of(), [], []
    for number, step in enumerate(steps):
        if step < 0:
            kept = max(len(model) + step, 0)
            assert node.cut(kept).tolist() == model[kept:]
            model = model[:kept]
        else:
            added = [number] * step
            node.grow(np.array(added, np.int32))
            model = model + added
        seen.append((node.pages, model))
        # what was handed out before is never written over
        assert all(pages.tolist() == was for pages, was in seen)


def test_growing_page_by_page_copies_seldom() -> None:
    node, rooms = node_of(1), 0
    for page in range(2, 10_001):
        before = node.room
        node.grow(np.array([page], np.int32))
        rooms += node.room is not before
    assert node.pages.tolist() == list(range(1, 10_001))
    assert rooms < 20


def test_a_short_rest_does_not_keep_a_long_run_in_memory() -> None:
    node = node_of(*range(1, 201))
    node.cut(1)
    assert node.pages.base is None
