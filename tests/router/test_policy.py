"""Round robin over pairs."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdkv.router.policy import Pair, RoundRobin
from pdkv.router.registry import Registry


def registry(prefills: int, decodes: int) -> Registry:
    return Registry([f"p:{i}" for i in range(prefills)], [f"d:{i}" for i in range(decodes)], now=lambda: 0.0)


def nothing(pair: Pair) -> bool:
    return False


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_pair_gets_its_turn(prefills: int, decodes: int) -> None:
    policy = RoundRobin(registry(prefills, decodes))
    picked = [policy.pick(nothing) for _ in range(2 * prefills * decodes)]
    assert set(Counter(picked).values()) == {2}
    assert len(set(picked)) == prefills * decodes


@given(st.integers(2, 6), st.integers(2, 6))
def test_neighbours_differ_in_both_nodes(prefills: int, decodes: int) -> None:
    policy = RoundRobin(registry(prefills, decodes))
    first, second = policy.pick(nothing), policy.pick(nothing)
    assert first is not None
    assert second is not None
    assert first.prefill != second.prefill
    assert first.decode != second.decode


def test_nodes_that_are_down_come_last() -> None:
    nodes = registry(2, 2)
    nodes.mark_down("p:0", "gone")
    policy = RoundRobin(nodes)
    assert {p.prefill for p in (policy.pick(nothing) for _ in range(4)) if p} == {"p:1"}
    only_down = policy.pick(lambda pair: pair.prefill == "p:1")
    assert only_down is not None
    assert only_down.prefill == "p:0"


def test_what_is_excluded_is_never_picked() -> None:
    policy = RoundRobin(registry(2, 2))
    seen: set[Pair] = set()
    while pair := policy.pick(lambda p: p in seen):
        seen.add(pair)
    assert len(seen) == 4
