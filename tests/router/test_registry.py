"""Which nodes are passed over, for how long, and who tries them again."""

import pytest

from pdkv.errors import ConfigError, PeerLost
from pdkv.router.registry import Node, Registry, Role
from tests.router.fleet import Clock, learn, node, pair, registry

GONE = PeerLost("gone")


def addresses(nodes: Registry, role: Role) -> list[str]:
    return [one.address for one in nodes.nodes(role)]


def test_a_failed_node_is_passed_over_for_a_while() -> None:
    clock = Clock()
    nodes = registry(1, 2, clock)
    d0, d1 = nodes.nodes(Role.DECODE)
    nodes.mark_down(d0, GONE)
    assert (d0.down, nodes.open(d0), nodes.open(d1)) == ("PeerLost: gone", False, True)
    clock.now_s += 4.9
    assert not nodes.open(d0)
    clock.now_s += 0.1
    assert nodes.open(d0), "tried again"
    assert d0.down, "until somebody has come through, it is not up"
    nodes.mark_up(d0)
    assert (d0.down, nodes.open(d0)) == ("", True)


def test_a_node_that_was_down_is_tried_by_one_at_a_time() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    both = pair(nodes, "p0", "d0")
    nodes.mark_down(both.decode, GONE)
    clock.now_s += 5.0
    with nodes.trying(both):
        trial = both.decode.trial
        assert trial is not None
        assert (nodes.open(both.decode), both.prefill.trial) == (False, None)
        with nodes.trying(both):
            assert both.decode.trial is trial, "whoever comes along begins no trial of its own"
        assert not trial.over.is_set()
    assert trial.over.is_set()
    assert (both.decode.trial, trial.failed) == (None, {})
    assert nodes.open(both.decode), "nothing came of it: the next one tries"


def test_a_trial_is_over_as_soon_as_its_end_is_known() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    both = pair(nodes, "p0", "d0")
    for comes_through in (True, False):
        nodes.mark_down(both.decode, GONE)
        clock.now_s += 5.0
        with nodes.trying(both):
            trial = both.decode.trial
            assert trial is not None
            if comes_through:
                nodes.mark_up(both.decode)
            else:
                nodes.mark_down(both.decode, GONE)
            assert trial.over.is_set()
            assert trial.failed == ({} if comes_through else {both.decode: GONE})
            assert nodes.open(both.decode) is comes_through


def test_a_node_that_says_it_can_serve_is_tried_sooner_and_a_new_life_is_up() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    p0 = node(nodes, "p0")
    learn(nodes, "p0", life=1)
    nodes.mark_down(p0, GONE)
    learn(nodes, "p0", life=1)
    assert not nodes.open(p0), "a request has just failed on it"
    clock.now_s += 1.0
    assert nodes.open(p0)
    nodes.mark_down(p0, GONE)
    assert p0.down, "its word isn't enough: it said so when the request failed, too"
    learn(nodes, "p0", life=2)
    assert (p0.down, nodes.open(p0)) == ("", True)


def test_what_failed_before_it_came_through_counts_no_more() -> None:
    nodes = registry(1, 1)
    p0 = node(nodes, "p0")
    learn(nodes, "p0", life=1)
    nodes.mark_down(p0, GONE)
    nodes.mark_up(p0)
    nodes.unheard(p0, GONE)
    learn(nodes, "p0", life=1)
    assert p0.down == ""


def test_a_node_that_was_not_heard_of_is_up_when_it_is_heard_of_again() -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    p0 = node(nodes, "p0")
    for _ in range(10):
        nodes.unheard(p0, GONE)
        clock.now_s += 0.5
    assert not nodes.open(p0)
    learn(nodes, "p0")
    assert (p0.down, nodes.open(p0)) == ("", True)


@pytest.mark.parametrize(
    ("facts", "why"), [({"draining": True}, "draining"), ({"unready": "no rank"}, "unready: no rank")]
)
def test_a_node_that_says_it_can_not_serve_is_passed_over_while_it_says_so(facts: dict[str, object], why: str) -> None:
    clock = Clock()
    nodes = registry(1, 1, clock)
    p0 = node(nodes, "p0")
    for _ in range(10):
        learn(nodes, "p0", **facts)
        clock.now_s += 2.0
        assert (p0.down, nodes.open(p0)) == (why, False)
    learn(nodes, "p0")
    assert (p0.down, nodes.open(p0)) == ("", True)


def test_nodes_join_and_leave_and_those_that_stay_are_known_as_before() -> None:
    nodes = registry(2, 1)
    left: list[Node] = []
    nodes.left = left.append
    p0, p1, version = node(nodes, "p0"), node(nodes, "p1"), nodes.version
    nodes.mark_down(p1, GONE)
    nodes.replace(Role.PREFILL, ["p1", "p2"])
    assert addresses(nodes, Role.PREFILL) == ["p1", "p2"]
    assert (node(nodes, "p1"), left) == (p1, [p0])
    assert (p1.down, nodes.version > version) == ("PeerLost: gone", True)
    nodes.remove(Role.PREFILL, "p1")
    nodes.add(Role.PREFILL, "p1")
    assert node(nodes, "p1") is not p1, "whoever joins again is a new one"
    assert node(nodes, "p1").down == ""
    version = nodes.version
    nodes.replace(Role.DECODE, ["d0"])
    assert nodes.version == version
    nodes.replace(Role.DECODE, [])
    assert addresses(nodes, Role.DECODE) == []


def test_an_address_stands_once_in_a_role() -> None:
    nodes = registry(1, 1)
    nodes.add(Role.PREFILL, "d0")
    for wrong in (
        lambda: nodes.add(Role.PREFILL, "p0"),
        lambda: nodes.remove(Role.PREFILL, "p9"),
        lambda: nodes.replace(Role.PREFILL, ["p1", "p1"]),
        lambda: Registry(["p:1", "p:1"], []),
    ):
        with pytest.raises(ConfigError, match="prefill addresses"):
            wrong()
    assert addresses(nodes, Role.PREFILL) == ["p0", "d0"]
