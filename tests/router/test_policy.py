"""Round robin over pairs."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ContractMismatch, PeerLost
from pdkv.router.pairing import Pairing
from pdkv.router.policy import Turns
from pdkv.router.registry import Pair, Registry, Role
from tests.router.fleet import Clock, learn, node, pair, registry

GONE = PeerLost("gone")


def nothing(pair: Pair) -> bool:
    return False


def policy(nodes: Registry) -> Turns:
    return Turns(nodes, Pairing(nodes))


def picked(policy: Turns, times: int) -> list[str]:
    return [str(policy.pick(nothing)) for _ in range(times)]


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_pair_gets_its_turn(prefills: int, decodes: int) -> None:
    chosen = picked(policy(registry(prefills, decodes)), 2 * prefills * decodes)
    assert set(Counter(chosen).values()) == {2}
    assert len(set(chosen)) == prefills * decodes


@given(st.integers(2, 6), st.integers(2, 6))
def test_neighbours_differ_in_both_nodes(prefills: int, decodes: int) -> None:
    turns = policy(registry(prefills, decodes))
    first, second = turns.pick(nothing), turns.pick(nothing)
    assert first is not None
    assert second is not None
    assert first.prefill != second.prefill
    assert first.decode != second.decode


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.lists(st.sampled_from("ab"), min_size=1, max_size=6))
def test_of_two_contents_every_pair_of_one_gets_its_turn_and_no_other(prefills: str, decodes: str) -> None:
    nodes = registry(len(prefills), len(decodes))
    for role, weights in (("p", prefills), ("d", decodes)):
        for i, one in enumerate(weights):
            learn(nodes, f"{role}{i}", one)
    turns = policy(nodes)
    due = {f"d{d} with p{p}" for p, a in enumerate(prefills) for d, b in enumerate(decodes) if a == b}
    assert set(picked(turns, 2 * len(prefills) * len(decodes))) == (due or {"None"})
    assert set(Counter(picked(turns, 2 * len(due))).values()) in ({2}, set())


def test_nodes_that_are_down_come_last_and_those_on_trial_after_them() -> None:
    clock = Clock()
    nodes = registry(3, 1, clock)
    p0, p1 = node(nodes, "p0"), node(nodes, "p1")
    nodes.mark_down(p0, GONE)
    turns = policy(nodes)
    assert set(picked(turns, 6)) == {"d0 with p1", "d0 with p2"}
    nodes.mark_down(p1, GONE)
    with nodes.trying(pair(nodes, "p0", "d0")):
        only_down = turns.pick(lambda pair: pair.prefill.address == "p2")
        assert only_down is not None
        assert only_down.prefill is p1, "p0 is just being tried"
        only_trial = turns.pick(lambda pair: pair.prefill.address != "p0")
        assert only_trial is not None
        assert only_trial.prefill is p0
    clock.now_s += 5.0
    assert set(picked(turns, 3)) == {"d0 with p0", "d0 with p1", "d0 with p2"}


def test_a_pair_that_failed_comes_after_others_and_one_that_is_barred_never() -> None:
    nodes = registry(3, 1)
    pairing = Pairing(nodes)
    turns = Turns(nodes, pairing)
    pairing.failed(pair(nodes, "p0", "d0"), GONE)
    pairing.refused(pair(nodes, "p1", "d0"), ContractMismatch([]))
    assert set(picked(turns, 3)) == {"d0 with p2"}
    last = turns.pick(lambda pair: pair.prefill.address == "p2")
    assert last is not None
    assert last.prefill.address == "p0"
    assert turns.pick(lambda pair: pair.prefill.address != "p1") is None


def test_what_is_excluded_is_never_picked() -> None:
    turns = policy(registry(2, 2))
    seen: set[Pair] = set()
    while one := turns.pick(lambda p: p in seen):
        seen.add(one)
    assert len(seen) == 4


def test_nodes_that_join_are_picked_and_those_that_left_are_not() -> None:
    nodes = registry(1, 1)
    turns = policy(nodes)
    assert picked(turns, 2) == ["d0 with p0"] * 2
    nodes.add(Role.DECODE, "d1")
    assert set(picked(turns, 2)) == {"d0 with p0", "d1 with p0"}
    nodes.remove(Role.DECODE, "d0")
    assert set(picked(turns, 2)) == {"d1 with p0"}
    nodes.remove(Role.PREFILL, "p0")
    assert turns.pick(nothing) is None


def test_alternates_could_serve_the_same_decode_node_now() -> None:
    nodes = registry(6, 1)
    pairing = Pairing(nodes)
    turns = Turns(nodes, pairing)
    for i in range(6):
        learn(nodes, f"p{i}", "b" if i == 1 else "a")
    learn(nodes, "d0")
    nodes.mark_down(node(nodes, "p2"), GONE)
    pairing.failed(pair(nodes, "p3", "d0"), GONE)
    first = turns.pick(nothing)
    assert first is not None
    assert first.prefill.address == "p0"
    assert [one.address for one in turns.alternates(first, 9)] == ["p4", "p5"]
    assert [one.address for one in turns.alternates(first, 1)] == ["p4"]
