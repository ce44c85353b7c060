"""What a request costs where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.router.load import Given, given
from pdkv.router.pairing import Pairing
from pdkv.router.policy import Turns
from pdkv.router.registry import Registry
from pdkv.router.weights import CLASSES, REQUEST_TOKENS, UNKNOWN, Weights
from tests.router.fleet import learn, node, pair, registry
from tests.rpc import samples

PAGES = {"free": 100, "reserved": 0, "cached": 0, "private": 0, "quarantined": 0, "total": 100}


def fleet(prefills: int, decodes: int, **waiting: int) -> Registry:
    """All have said what they are: pools of 100 pages, of which so many are available; so many tokens wait."""
    nodes = registry(prefills, decodes)
    for one in nodes:
        facts = {"waiting_tokens": waiting.get(one.address, 0), "available_pages": waiting.get(one.address, 100)}
        learn(nodes, one.address, pages=PAGES, **facts)
    return nodes


def request(tokens: int, max_tokens: int = 16) -> GenerateRequest:
    return replace(samples.generate_request(tokens), sampling=Sampling(max_tokens=max_tokens))


def weights(nodes: Registry, tokens: int, **cached: int) -> Weights:
    return Weights(request(tokens), {node(nodes, address): count for address, count in cached.items()})


def picked(nodes: Registry, weights: Weights, times: int = 1) -> list[str]:
    turns = Turns(nodes, Pairing(nodes))
    return [str(turns.pick(lambda pair: False, weights)) for _ in range(times)]


def test_the_longest_prefix_is_gone_to() -> None:
    nodes = fleet(3, 1)
    assert picked(nodes, weights(nodes, 1000, p1=640, p2=320), 3) == ["d0 with p1"] * 3


@pytest.mark.parametrize(("waiting", "chosen"), [(639, "p1"), (641, "p0")])
def test_until_its_queue_is_as_long_as_computing_it_elsewhere(waiting: int, chosen: str) -> None:
    nodes = fleet(2, 1, p1=waiting)
    assert picked(nodes, weights(nodes, 1000, p1=640)) == [f"d0 with {chosen}"]


def test_a_hot_prefix_does_not_put_everything_on_one_node() -> None:
    """Nothing ends meanwhile: 40 requests of a prefix that is cached on one of four nodes spread as their cost says."""
    nodes = fleet(4, 1)
    turns = Turns(nodes, Pairing(nodes))
    prefix, own = 6400, 100
    shares, where = [], {"p0": 0, "p1": 0, "p2": 0, "p3": 0}
    cached = {"p0": prefix}
    for _ in range(40):
        found = weights(nodes, prefix + own, **cached)
        chosen = turns.pick(lambda pair: False, found)
        assert chosen is not None
        shares.append(given(found.given(chosen), chosen.prefill.load, chosen.decode.load))
        shares[-1].__enter__()
        where[chosen.prefill.address] += 1
        cached[chosen.prefill.address] = prefix
    for share in shares:
        share.__exit__(None, None, None)
    first = prefix // (own + REQUEST_TOKENS) + 1
    assert where["p0"] >= first, "as long as its queue is shorter than the prefix"
    assert all(count > 0 for count in list(where.values())[: 1 + (40 - first) // first]), where
    assert max(where.values()) < 40
    assert all(one.load.waiting_tokens == 0 for one in nodes)


def test_who_is_not_believed_has_less_cached() -> None:
    nodes = fleet(2, 1)
    node(nodes, "p1").load.trust = 0.25
    assert picked(nodes, weights(nodes, 1000, p0=320, p1=640)) == ["d0 with p0"]
    assert weights(nodes, 1000, p1=640).expected(node(nodes, "p1")) == 840


def test_room_comes_before_everything_else() -> None:
    nodes = fleet(1, 2, d0=8, d1=9)
    # 9 pages are needed: 512 tokens and 16 more
    assert picked(nodes, weights(nodes, 512), 2) == ["d1 with p0"] * 2
    assert picked(nodes, weights(nodes, 512, d0=448), 2) == ["d0 with p0"] * 2, "of which it has 7"


def test_the_emptier_decode_node_by_eighths_then_the_prefix_then_the_fewest_requests() -> None:
    nodes = fleet(1, 2, d0=50, d1=70)
    assert picked(nodes, weights(nodes, 640, d0=640)) == ["d1 with p0"], "another eighth"
    nodes = fleet(1, 2, d0=89, d1=99)
    assert picked(nodes, weights(nodes, 640, d0=64), 2) == ["d0 with p0"] * 2
    with given(Given(0, 0), node(nodes, "p0").load, node(nodes, "d0").load):
        assert picked(nodes, weights(nodes, 640), 2) == ["d1 with p0"] * 2
    assert set(picked(nodes, weights(nodes, 640), 2)) == {"d0 with p0", "d1 with p0"}, "else in turn"


def test_who_has_not_said_how_much_room_there_is_comes_last() -> None:
    nodes = registry(1, 2)
    for address in ("p0", "d0"):
        learn(nodes, address, pages=PAGES, available_pages=20)
    found = weights(nodes, 640)
    assert picked(nodes, found, 2) == ["d0 with p0"] * 2
    assert found.of_decode(node(nodes, "d1"))[:2] == (False, UNKNOWN)
    assert UNKNOWN > CLASSES
    assert found.pages(node(nodes, "d1")) == 0


def test_what_a_request_takes() -> None:
    nodes = fleet(1, 1)
    share = weights(nodes, 1000, p0=640, d0=320).given(pair(nodes, "p0", "d0"))
    assert (share.tokens, share.pages) == (360 + REQUEST_TOKENS, 11)
