"""Whether any pair of nodes may serve, and what is said where none may."""

from __future__ import annotations

from pdkv.errors import AddressRefused, ContractMismatch, PeerLost
from pdkv.router.outlook import WORDS, Hindrance, hindrance
from pdkv.router.pairing import MISMATCH_S, Pairing
from pdkv.router.registry import Node, Registry
from tests.router.fleet import Clock, learn, node, pair, registry


def not_down(one: Node) -> bool:
    return not one.down


def found(nodes: Registry, pairing: Pairing | None = None) -> Hindrance:
    hindered = hindrance(nodes, pairing or Pairing(nodes), not_down)
    assert hindered is not None
    return hindered


def test_one_pair_is_enough() -> None:
    nodes = registry(2, 1)
    learn(nodes, "p0", "b")
    learn(nodes, "p1")
    learn(nodes, "d0")
    assert hindrance(nodes, Pairing(nodes), not_down) is None
    nodes.mark_down(node(nodes, "p1"), PeerLost("gone"))
    assert found(nodes).detail.startswith("d0 with p0: ContractMismatch")


def test_nodes_that_are_up_and_differ_are_told_with_the_field() -> None:
    nodes = registry(1, 1)
    learn(nodes, "p0", "b")
    learn(nodes, "d0")
    hindered = found(nodes)
    assert hindered.why == "no two nodes that are up may be paired"
    assert hindered.detail.startswith("d0 with p0: ContractMismatch: contracts differ: weights_id: mine a, theirs b")
    assert isinstance(hindered.error, ContractMismatch)


def test_a_node_that_is_down_counts_before_what_it_refused() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    pairing = Pairing(nodes)
    pairing.refused(pair(nodes, "p0", "d0"), AddressRefused("p0", ["q*"]))
    assert isinstance(found(nodes, pairing).error, AddressRefused)
    nodes.mark_down(node(nodes, "d0"), PeerLost("gone"))
    hindered = found(nodes, pairing)
    assert (hindered.why, hindered.detail) == ("no decode node is up", "d0: PeerLost: gone")
    assert isinstance(hindered.error, PeerLost)
    assert str(hindered.error) == "no decode node is up: d0: PeerLost: gone"
    clock.now_s += MISMATCH_S
    nodes.mark_up(node(nodes, "d0"))
    assert hindrance(nodes, pairing, not_down) is None


def test_without_nodes_there_is_nothing_more_to_say() -> None:
    hindered = found(registry(0, 0))
    assert (hindered.why, hindered.detail) == ("no prefill and no decode node is up", "")
    assert str(hindered.error) == hindered.why


def test_words_are_bounded_however_many_nodes_there_are() -> None:
    nodes = registry(9, 1)
    for one in list(nodes)[:9]:
        learn(nodes, one.address, unready="x" * 1000)
    hindered = found(nodes)
    assert hindered.detail.endswith("…; 7 more")
    assert hindered.detail.startswith("p0: unready: xxx")
    assert len(hindered.detail) < 2 * WORDS + 20
