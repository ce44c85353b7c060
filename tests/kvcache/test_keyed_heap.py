"""The least current key comes first, whatever keys there were before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdkv.kvcache.keyed_heap import KeyedHeap

STEPS = st.lists(st.tuples(st.sampled_from(["set", "discard", "pop"]), st.integers(0, 5), st.integers(0, 9)))


@given(STEPS)
def test_against_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    model: dict[int, tuple[int, int]] = {}
    for order, (what, item, key) in enumerate(steps):
        least = min(model, key=lambda i: model[i], default=None)
        assert heap.first() == least
        if what == "set":
            heap.set(item, key)
            model[item] = (key, order)
        elif what == "discard":
            heap.discard(item)
            model.pop(item, None)
        else:
            assert heap.pop() == least
            model.pop(-1 if least is None else least, None)
        assert len(heap) == len(model)
        assert {i: heap.key(i) for i in heap} == {i: key for i, (key, _) in model.items()}
        assert all(i in heap for i in model)


def test_outdated_entries_do_not_pile_up() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    for key in range(10_000):
        heap.set("renewed", key)
        heap.set("gone", key)
        heap.discard("gone")
    assert len(heap._entries) < 100
    assert heap.pop() == "renewed"
    assert heap.pop() is None
