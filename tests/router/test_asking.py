"""What a router learns from nodes for one request, and that none of them holds it up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pdkv.errors import PdkvError, PeerLost, RemoteError
from pdkv.ids import Incarnation, NodeId, PeerName
from pdkv.node.messages import GenerateDone, GenerateRequest, Namespace, Shipment
from pdkv.node.prompt import plan_prompt
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.asking import Asking
from pdkv.router.registry import Node, Registry, Role
from pdkv.router.weights import Weights
from tests.router.fleet import learn, node, pair, registry
from tests.rpc import samples
from tests.rpc.fakes import run


def request(tokens: int) -> GenerateRequest:
    """Of the preset's vocabulary, which is bytes."""
    made = samples.generate_request(tokens)
    return replace(made, tokens=made.tokens % 256)


REQUEST = request(1000)


@dataclass
class Asked:
    """Nodes that have as many pages as `pages` says, in whatever life; `silent` ones answer when they are let."""

    nodes: Registry
    pages: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    errors: dict[str, PdkvError] = field(default_factory=dict)
    silent: dict[str, asyncio.Event] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, EstimateCall]] = field(default_factory=list)

    def decode(self, address: str) -> One:
        assert node(self.nodes, address).role is Role.DECODE
        return One(self, address)

    def peer(self, address: str) -> One:
        assert node(self.nodes, address).role is Role.PREFILL
        return One(self, address)


@dataclass
class One:
    asked: Asked
    address: str

    async def estimate(self, call: EstimateCall) -> Estimate:
        asked, address = self.asked, self.address
        asked.calls.append((address, call))
        if address in asked.silent:
            await asked.silent[address].wait()
        if address in asked.errors:
            raise asked.errors[address]
        name = PeerName(NodeId(address), Incarnation(f"{asked.lives.get(address, 1):032x}"))
        pages = min(asked.pages.get(address, 0), len(call.hashes))
        return Estimate(name, pages, asked.waiting.get(address, 0), 9)


class Scene:
    def __init__(self, prefills: int = 2, decodes: int = 2, limit_s: float = 20.0) -> None:
        self.nodes = registry(prefills, decodes)
        for one in self.nodes:
            learn(self.nodes, one.address)
        self.asked = Asked(self.nodes)
        self.asking = Asking(self.nodes, self.asked, limit_s)

    async def found(self, request: GenerateRequest = REQUEST) -> dict[str, int]:
        return tokens(await self.asking.weights(request))

    def node(self, address: str) -> Node:
        return node(self.nodes, address)


def tokens(weights: Weights) -> dict[str, int]:
    return {one.address: count for one, count in weights.cached.items()}


def test_all_are_asked_for_the_pages_that_they_themselves_would_look_for() -> None:
    async def body() -> None:
        scene = Scene()
        scene.asked.pages = {"p1": 5, "d0": 99}
        scene.asked.waiting = {"p0": 700}
        assert await scene.found() == {"p0": 0, "p1": 320, "d0": 960, "d1": 0}
        due = plan_prompt(REQUEST.tokens, REQUEST.namespace, samples.contract("a")).hashes
        assert {call.hashes for _, call in scene.asked.calls} == {due}
        assert sorted(address for address, _ in scene.asked.calls) == ["d0", "d1", "p0", "p1"]
        assert scene.node("p0").load.waiting_tokens == 700
        assert +scene.asking.counts == {"answered": 4}
        tenant = replace(REQUEST, namespace=Namespace(cache_salt="another"))
        await scene.found(tenant)
        assert scene.asked.calls[-1][1].hashes not in (due, samples.pages(1).hashes)

    run(body)


def test_a_token_is_left_to_compute_for_prefill_and_none_needs_to_be_shipped_to_decode() -> None:
    async def body() -> None:
        scene = Scene()
        scene.asked.pages = dict.fromkeys(("p0", "p1", "d0", "d1"), 10)
        found = await scene.found(request(640))
        assert (found["p0"], found["d0"]) == (576, 640)

    run(body)


def test_nodes_of_another_content_are_asked_for_other_pages() -> None:
    async def body() -> None:
        scene = Scene()
        learn(scene.nodes, "p1", "b")
        await scene.found()
        of = {address: call.hashes for address, call in scene.asked.calls}
        assert of["p0"] == of["d0"] == of["d1"] != of["p1"]

    run(body)


def test_where_there_is_nothing_to_choose_nobody_is_asked() -> None:
    async def body() -> None:
        scene = Scene(2, 1)
        await scene.found()
        assert {address for address, _ in scene.asked.calls} == {"p0", "p1"}
        scene.nodes.mark_down(scene.node("p0"), PeerLost("gone"))
        scene.asked.calls.clear()
        assert await scene.found() == {}
        assert scene.asked.calls == []

    run(body)


def test_who_does_not_say_what_it_is_or_is_down_is_not_asked() -> None:
    async def body() -> None:
        scene = Scene(4, 1)
        scene.nodes.mark_down(scene.node("p1"), PeerLost("gone"))
        scene.nodes.add(Role.PREFILL, "p9")
        await scene.found()
        assert {address for address, _ in scene.asked.calls} == {"p0", "p2", "p3"}

    run(body)


def test_a_node_that_hangs_holds_up_one_request_and_the_others_are_told_without_it() -> None:
    async def body() -> None:
        scene = Scene(3, 1, limit_s=0.01)
        hangs = scene.asked.silent["p1"] = asyncio.Event()
        scene.asked.pages = dict.fromkeys(("p0", "p1", "p2"), 3)
        scene.asked.waiting["p1"] = 77
        assert await scene.found() == {"p0": 192, "p2": 192}
        waited_s = scene.asking.waited_s
        scene.asking._limit_s = 20.0  # nobody waits for it any more: the test would stand still otherwise
        assert await scene.found() == {"p0": 192, "p2": 192}
        assert [address for address, _ in scene.asked.calls].count("p1") == 1
        assert (scene.asking.counts["late"], scene.asking.counts["spared"]) == (1, 1)
        assert waited_s == scene.asking.waited_s == 0.0, "by the test's clock"
        hangs.set()
        while "p1" not in (found := await scene.found()):
            await asyncio.sleep(0)
        assert found["p1"] == 192
        assert scene.node("p1").load.waiting_tokens == 77

    run(body)


def test_a_node_that_fails_counts_as_one_that_has_nothing() -> None:
    async def body() -> None:
        scene = Scene(2, 1)
        looks: list[str] = []
        scene.nodes.look = lambda: looks.append("now")
        for error, looked in ((RemoteError("an old one", code="UNIMPLEMENTED"), []), (PeerLost("gone"), ["now"])):
            scene.asked.errors["p0"] = error
            assert await scene.found() == {"p1": 0}
            assert looks == looked
        assert +scene.asking.counts == {"answered": 2, "failed": 2}
        assert scene.node("p0").down == "", "requests and the watch find out"

    run(body)


def test_a_prompt_that_nodes_would_refuse_is_left_to_them() -> None:
    async def body() -> None:
        scene = Scene(2, 1)
        bad = replace(REQUEST, tokens=np.array([1 << 30] * 200, np.uint32))
        assert await scene.found(bad) == {"p0": 0, "p1": 0}

    run(body)


def test_a_node_in_a_new_life_is_looked_at_at_once_and_believed_again() -> None:
    async def body() -> None:
        scene = Scene(2, 1)
        looks: list[str] = []
        scene.nodes.look = lambda: looks.append("now")
        p0 = scene.node("p0")
        p0.load.trust, p0.looked_s = 0.1, 99.0
        await scene.found()
        assert (looks, p0.looked_s) == ([], 99.0)
        scene.asked.lives["p0"] = 2
        await scene.found()
        assert (looks, p0.looked_s) == (["now"], float("-inf"))
        learn(scene.nodes, "p0", life=2)
        assert p0.load.trust == 1.0

    run(body)


def test_a_request_that_goes_away_leaves_the_question_to_its_end() -> None:
    async def body() -> None:
        scene = Scene(2, 1)
        hangs = scene.asked.silent["p1"] = asyncio.Event()
        asking = asyncio.create_task(scene.found())
        while len(scene.asked.calls) < 2:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        hangs.set()
        while scene.asking._out:
            await asyncio.sleep(0)
        assert +scene.asking.counts == {"answered": 2}

    run(body)


@pytest.mark.parametrize(
    ("done", "trust"),
    [
        (GenerateDone("stop", 1, Shipment(prefill_address="p0"), (640,)), 1.0),
        (GenerateDone("stop", 1, Shipment(prefill_address="p0"), (320, 800)), 0.875),
        (GenerateDone("stop", 1, Shipment(prefill_address="p0"), (0,)), 0.75),
        (GenerateDone("stop", 1, Shipment(prefill_address="p1"), (0,)), 1.0),
        (GenerateDone("stop", 1, Shipment(), (0,), recomputed_tokens=900), 1.0),
    ],
)
def test_a_promise_is_compared_with_what_was_found(done: GenerateDone, trust: float) -> None:
    async def body() -> None:
        scene = Scene()
        scene.asked.pages["p0"] = 10
        weights = await scene.asking.weights(REQUEST)
        scene.asking.ended(pair(scene.nodes, "p0", "d0"), weights, done)
        assert scene.node("p0").load.trust == trust

    run(body)
