"""Which pairs are never tried, which not for a while, and what takes that back."""

import pytest

from pdkv.errors import ContractMismatch, Difference, PeerLost
from pdkv.router.pairing import FAILURE_S, MISMATCH_S, Pairing
from pdkv.router.registry import Role
from tests.router.fleet import Clock, learn, node, pair, registry

MISMATCH = ContractMismatch([Difference("index_topk", "64", "32", "content: equal")])
GONE = PeerLost("gone")


def test_nodes_of_two_contents_are_never_paired() -> None:
    nodes = registry(2, 2)
    pairing = Pairing(nodes)
    assert pairing.bar(pair(nodes, "p0", "d1")) is None, "not known yet"
    for address, weights in (("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b")):
        learn(nodes, address, weights)
    for prefill, decode in (("p0", "d0"), ("p1", "d1")):
        assert pairing.bar(pair(nodes, prefill, decode)) is None
    barred = pairing.bar(pair(nodes, "p0", "d1"))
    assert isinstance(barred, ContractMismatch)
    assert [(d.field, d.mine, d.theirs) for d in barred.differences] == [("weights_id", "b", "a")]
    assert isinstance(pairing.bar(pair(nodes, "p1", "d0")), ContractMismatch)
    learn(nodes, "d1", "a", life=2)
    assert pairing.bar(pair(nodes, "p0", "d1")) is None, "it was rolled over"


def test_what_only_informs_parts_nobody() -> None:
    nodes = registry(1, 2)
    pairing = Pairing(nodes)
    for address in ("p0", "d0", "d1"):
        learn(nodes, address)
    d0 = node(nodes, "d0")
    assert d0.kind is node(nodes, "d1").kind, "one kind, however many nodes"
    assert d0.kind is not None
    assert d0.kind.contract.host == ""
    assert pairing.bar(pair(nodes, "p0", "d0")) is None


@pytest.mark.parametrize("again", ["p0", "d0"])
def test_a_pair_that_refused_is_barred_until_one_of_the_two_is_in_a_new_life(again: str) -> None:
    clock = Clock()
    nodes = registry(1, 2, clock)
    pairing = Pairing(nodes)
    for address in ("p0", "d0", "d1"):
        learn(nodes, address)
    both = pair(nodes, "p0", "d0")
    pairing.refused(both, MISMATCH)
    assert pairing.bar(both) is MISMATCH
    assert pairing.bar(pair(nodes, "p0", "d1")) is None
    assert pairing.status() == {"d0 with p0": f"ContractMismatch: {MISMATCH}"}
    learn(nodes, again)
    assert pairing.bar(both) is MISMATCH, "the same life says it again"
    learn(nodes, again, life=2)
    assert pairing.bar(both) is None
    assert pairing.status() == {}


def test_a_refusal_is_not_believed_for_ever() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    pairing, both = Pairing(nodes), pair(nodes, "p0", "d0")
    pairing.refused(both, MISMATCH)
    learn(nodes, "p0")
    assert pairing.bar(both) is MISMATCH, "it was this life that refused: it just hadn't said its name yet"
    clock.now_s += MISMATCH_S
    assert pairing.bar(both) is None


def test_a_pair_that_failed_is_no_match_for_others_but_not_barred() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    pairing, both = Pairing(nodes), pair(nodes, "p0", "d0")
    pairing.failed(both, GONE)
    assert (pairing.bar(both), pairing.clear(both)) == (None, False)
    clock.now_s += FAILURE_S
    assert pairing.clear(both)


def test_nothing_is_kept_of_nodes_that_left() -> None:
    nodes = registry(2, 1)
    pairing = Pairing(nodes)
    nodes.left = pairing.left
    for prefill in ("p0", "p1"):
        pairing.refused(pair(nodes, prefill, "d0"), MISMATCH)
    nodes.remove(Role.PREFILL, "p0")
    assert list(pairing.status()) == ["d0 with p1"]
    nodes.remove(Role.DECODE, "d0")
    assert pairing.status() == {}
