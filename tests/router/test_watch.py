"""What a router learns by asking, how often it asks, and that one silent node holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from pdkv.errors import DeadlineExceeded, NotAuthorised, PdkvError, PeerLost, RemoteError
from pdkv.ids import RequestId
from pdkv.node.flow import together
from pdkv.node.messages import GenerateEvent, GenerateRequest, NodeStatus
from pdkv.node.readiness import Readiness
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.pairing import Pairing
from pdkv.router.registry import Node, Registry, Role
from pdkv.router.watch import Watch
from tests.router.fleet import Clock, node, registry, said
from tests.rpc import samples
from tests.rpc.fakes import run, soon


@dataclass
class Statuses:
    """`NodeDirectory` of nodes that only say how they are: a status, an error, or nothing until they are let."""

    nodes: Registry
    errors: dict[str, PdkvError] = field(default_factory=dict)
    silent: dict[str, asyncio.Event] = field(default_factory=dict)
    facts: dict[str, dict[str, object]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def decode(self, address: str) -> Status:
        return Status(self, node(self.nodes, address), Role.DECODE)

    def peer(self, address: str) -> Status:
        return Status(self, node(self.nodes, address), Role.PREFILL)

    def drop(self, address: str) -> None:
        self.dropped.append(address)


@dataclass
class Status:
    directory: Statuses
    node: Node
    asked_as: Role

    async def status(self) -> NodeStatus:
        directory, address = self.directory, self.node.address
        directory.asked.append(address)
        assert self.node.role is self.asked_as
        if address in directory.silent:
            await directory.silent[address].wait()
        if address in directory.errors:
            raise directory.errors[address]
        return said(self.node, **directory.facts.get(address, {}))  # type: ignore[arg-type]

    async def estimate(self, call: EstimateCall) -> Estimate:
        raise AssertionError("a watch asks for nothing but a status")

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        raise AssertionError("a watch asks for nothing but a status")

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        raise AssertionError("a watch asks for nothing but a status")


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.nodes = registry(1, 1, self.clock)
        self.said = Statuses(self.nodes)
        self.watch = Watch(self.nodes, self.said, Pairing(self.nodes), every_s=2.0)

    async def look(self, later_s: float = 0.0) -> None:
        self.clock.now_s += later_s
        async with together() as group:
            self.watch.step(group)


def test_every_node_says_who_it_is() -> None:
    async def body() -> None:
        scene = Scene()
        await scene.look()
        assert sorted(scene.said.asked) == ["d0", "p0"]
        assert [one.name.node for one in scene.nodes if one.name] == ["p0", "d0"]
        assert len({one.kind for one in scene.nodes}) == 1
        await scene.look(1.9)
        assert len(scene.said.asked) == 2
        await scene.look(0.1)
        assert len(scene.said.asked) == 4

    run(body)


def test_a_node_of_another_role_is_told_as_one() -> None:
    async def body() -> None:
        scene = Scene()
        other = RemoteError("Method not found!", code="UNIMPLEMENTED")
        scene.said.errors.update(p0=other, d0=other)
        await scene.look()
        assert node(scene.nodes, "p0").down.startswith("NotAPrefillNode: p0 is no prefill node: Method")
        assert node(scene.nodes, "d0").down.startswith("NotADecodeNode: d0 is no decode node: Method")

    run(body)


@pytest.mark.parametrize("error", [PeerLost("gone"), DeadlineExceeded("late"), RemoteError("?", code="INTERNAL")])
def test_a_node_that_does_not_answer_is_down_and_asked_more_often(error: PdkvError) -> None:
    async def body() -> None:
        scene = Scene()
        p0 = node(scene.nodes, "p0")
        scene.said.errors["p0"] = error
        await scene.look()
        assert p0.down == f"{error.kind}: {error}"
        assert scene.said.dropped == []
        await scene.look(0.5)
        assert scene.said.asked.count("p0") == 2
        assert scene.said.asked.count("d0") == 1
        assert scene.said.dropped == ["p0"], "over a fresh connection"
        del scene.said.errors["p0"]
        await scene.look(0.5)
        assert scene.nodes.open(p0), "to be tried"

    run(body)


def test_a_node_that_does_not_let_us_ask_is_not_down_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> int:
        return sum("p0 gives no status: NotAuthorised" in record.getMessage() for record in caplog.records)

    async def body() -> None:
        scene = Scene()
        scene.said.errors["p0"] = NotAuthorised("not you")
        for _ in range(3):
            await scene.look(2.0)
        p0 = node(scene.nodes, "p0")
        assert (p0.down, p0.kind, p0.name) == ("", None, None)
        assert lines() == 1
        del scene.said.errors["p0"]
        await scene.look(2.0)
        scene.said.errors["p0"] = NotAuthorised("not you")
        await scene.look(2.0)
        assert lines() == 2, "it is news again"

    run(body)


def test_a_node_that_says_nothing_holds_up_only_itself() -> None:
    async def body() -> None:
        scene = Scene()
        silent = scene.said.silent["p0"] = asyncio.Event()
        async with together() as group:
            for _ in range(3):
                scene.watch.step(group)
                while scene.watch._under_way != {node(scene.nodes, "p0")}:
                    await asyncio.sleep(0)
                scene.clock.now_s += 2.0
            silent.set()
        assert scene.said.asked == ["p0", "d0", "d0", "d0"]

    run(body)


def test_a_failed_request_has_the_node_asked_at_once() -> None:
    async def body() -> None:
        scene = Scene()
        await scene.look()
        scene.watch.changed.clear()
        p0 = node(scene.nodes, "p0")
        scene.nodes.mark_down(p0, PeerLost("gone"))
        await soon(scene.watch.changed)
        scene.said.facts["p0"] = {"life": 2}
        await scene.look()
        assert scene.said.asked.count("p0") == 2
        assert scene.nodes.open(p0), "it is in a new life"

    run(body)


def test_draining_is_passed_over_and_joining_is_looked_at() -> None:
    async def body() -> None:
        scene = Scene()
        scene.said.facts["p0"] = {"draining": True}
        await scene.look()
        assert node(scene.nodes, "p0").down == "draining"
        scene.nodes.add(Role.PREFILL, "p1")
        await scene.look()
        assert node(scene.nodes, "p1").name is not None
        scene.nodes.remove(Role.PREFILL, "p0")
        await scene.look(2.0)
        assert scene.said.asked.count("p0") == 1

    run(body)


def test_a_router_is_ready_when_a_node_of_each_role_is_up() -> None:
    async def body() -> None:
        nodes = registry(1, 2)
        said, readiness = Statuses(nodes), Readiness()
        watch = Watch(nodes, said, Pairing(nodes), readiness)
        assert readiness.unready == "no prefill and no decode node is up"
        said.errors["p0"] = PeerLost("gone")
        for one in nodes:
            await watch.visit(one)
        assert readiness.unready == "no prefill node is up: p0: PeerLost: gone"
        said.errors["p0"] = NotAuthorised("a router may not ask")
        await watch.visit(node(nodes, "p0"))
        assert readiness.unready == "", "it is there, and requests will find out"
        del said.errors["p0"]
        for facts, due in (({"draining": True}, "no prefill node is up: p0: draining"), ({}, "")):
            said.facts["p0"] = facts
            await watch.visit(node(nodes, "p0"))
            assert readiness.unready == due
        for address in ("d0", "d1"):
            assert readiness.unready == ""
            said.errors[address] = PeerLost("gone")
            await watch.visit(node(nodes, address))
        assert readiness.unready == "no decode node is up: d0: PeerLost: gone; d1: PeerLost: gone"

    run(body)


def test_a_router_whose_only_pair_is_kept_apart_is_not_ready_and_says_over_what() -> None:
    async def body() -> None:
        nodes = registry(1, 1)
        said, readiness = Statuses(nodes), Readiness()
        watch = Watch(nodes, said, Pairing(nodes), readiness)
        for weights_id, due in (("b", "no two nodes that are up may be paired: d0 with p0: Contract"), ("a", "")):
            said.facts["p0"] = {"contract": samples.contract(weights_id)}
            for one in nodes:
                await watch.visit(one)
            assert readiness.unready.startswith(due)
            assert ("weights_id" in readiness.unready) == bool(due)
            assert bool(readiness.unready) == bool(due)

    run(body)
