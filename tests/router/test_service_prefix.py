"""The router where nodes say what they have, and where more comes than may run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from pdkv.errors import CapacityError, DeadlineExceeded, NeverFits, RouterFull
from pdkv.ids import Incarnation, NodeId, PeerName, RequestId
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest, NodeStatus, Shipment
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.policy import Policy
from pdkv.router.registry import Registry
from pdkv.router.service import Router, RouterSettings
from pdkv.router.weights import REQUEST_TOKENS
from tests.router.fleet import learn, node, registry
from tests.rpc import samples
from tests.rpc.fakes import Stream, collect, failure, run, soon

PAGES = {"free": 1000, "reserved": 0, "cached": 0, "private": 0, "quarantined": 0, "total": 1000}
REQUEST = replace(samples.generate_request(1000), tokens=samples.generate_request(1000).tokens % 256)


class Knowing:
    """`NodeDirectory` of nodes that have so many pages of every prompt, and serve by script, one a decode node."""

    def __init__(self, pages: dict[str, int], **scripts: Stream) -> None:
        self.pages = pages
        self.scripts = scripts
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.asked = 0

    def decode(self, address: str) -> One:
        return One(self, address)

    peer = decode

    def drop(self, address: str) -> None:
        pass


class One:
    def __init__(self, nodes: Knowing, address: str) -> None:
        self._nodes = nodes
        self._address = address

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self._nodes.requests.append((self._address, request))
        script = self._nodes.scripts.get(self._address)
        return (script or Stream(samples.TOKEN, samples.GENERATE_DONE))(request)

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        raise AssertionError("nobody has enough")

    async def status(self) -> NodeStatus:
        raise AssertionError("requests ask for no status")

    async def estimate(self, call: EstimateCall) -> Estimate:
        self._nodes.asked += 1
        name = PeerName(NodeId(self._address), Incarnation(f"{1:032x}"))
        return Estimate(name, self._nodes.pages.get(self._address, 0), 0, 1000)


def scene(nodes: Knowing, settings: RouterSettings | None = None) -> tuple[Router, Registry]:
    """Three prefill nodes and one decode node that have said what they are."""
    made = registry(3, 1)
    for one in made:
        learn(made, one.address, pages=PAGES, available_pages=1000)
    return Router(made, nodes, settings), made


def test_a_request_goes_where_most_is_cached_and_the_next_best_are_its_alternates() -> None:
    async def body() -> None:
        nodes = Knowing({"p1": 4, "p2": 9})
        router, _ = scene(nodes)
        for _ in range(3):
            await collect(router.generate(REQUEST))
        assert {(r.prefill_address, r.prefill_alternates) for _, r in nodes.requests} == {("p2", ("p1", "p0"))}
        assert router.status().choices == {"prefix": 3, "load": 0, "turn": 0}
        assert router.status().estimates["answered"] == 9, "the decode node is the only one"
        assert router.status().policy == "prefix"

    run(body)


def test_in_turn_nobody_is_asked() -> None:
    async def body() -> None:
        nodes = Knowing({"p2": 9})
        router, _ = scene(nodes, RouterSettings(policy=Policy.ROUND_ROBIN))
        for _ in range(3):
            await collect(router.generate(REQUEST))
        assert {r.prefill_address for _, r in nodes.requests} == {"p0", "p1", "p2"}
        assert (nodes.asked, router.status().choices) == (0, {"prefix": 0, "load": 0, "turn": 3})
        assert router.status().policy == "round-robin"

    run(body)


def test_what_was_given_counts_until_its_first_token_and_its_end() -> None:
    async def body() -> None:
        before, after = Stream(hangs=True), Stream(samples.TOKEN, hangs=True)
        nodes = Knowing({"p2": 9}, d0=before)
        router, registry = scene(nodes)
        p2, d0 = (node(registry, address).load for address in ("p2", "d0"))
        first = asyncio.create_task(collect(router.generate(REQUEST)))
        await soon(before.waiting)
        assert (p2.waiting_tokens, d0.available_pages) == (1000 - 576 + REQUEST_TOKENS, 1000 - 16)
        routed = router.status().nodes["p2"]
        assert (routed.waiting_tokens, routed.requests) == (p2.waiting_tokens, 1)
        nodes.scripts["d0"] = after
        second = asyncio.create_task(collect(router.generate(REQUEST)))
        await soon(after.waiting)
        assert (p2.waiting_tokens, d0.available_pages) == (1000 - 576 + REQUEST_TOKENS, 1000 - 32)
        for task in (first, second):
            task.cancel()
        await asyncio.wait([first, second])
        assert (p2.waiting_tokens, d0.available_pages, p2.requests, d0.requests) == (0, 1000, 0, 0)

    run(body)


def test_a_node_that_lies_is_found_out_by_what_requests_find() -> None:
    async def body() -> None:
        nothing = GenerateDone("stop", 1, Shipment(prefill_address="p1"), (0,))
        nodes = Knowing({"p0": 3, "p1": 15}, d0=Stream(samples.TOKEN, nothing))
        router, _ = scene(nodes)
        chosen = []
        for _ in range(8):
            await collect(router.generate(REQUEST))
            chosen.append(nodes.requests[-1][1].prefill_address)
        assert chosen == ["p1"] * 6 + ["p0"] * 2, "0.75 ** 6 of 960 tokens is less than 192"
        assert router.status().nodes["p1"].trust == pytest.approx(0.75**6)

    run(body)


def test_more_than_may_run_wait_and_more_than_may_wait_are_refused() -> None:
    async def body() -> None:
        busy = Stream(samples.TOKEN, hangs=True)
        nodes = Knowing({}, d0=busy)
        router, _ = scene(nodes, RouterSettings(running_limit=1, waiting_limit=1))
        running = asyncio.create_task(collect(router.generate(REQUEST)))
        await soon(busy.waiting)
        waits = asyncio.create_task(collect(router.generate(REQUEST)))
        while not router.status().waiting:
            await asyncio.sleep(0)
        assert (router.status().requests, len(nodes.requests)) == (2, 1)
        _, refused = await failure(router.generate(REQUEST))
        assert isinstance(refused, RouterFull)
        assert float(refused.fields["retry_after_s"]) > 0
        nodes.scripts.clear()
        running.cancel()
        assert await waits == [samples.TOKEN, samples.GENERATE_DONE]
        assert (router.status().requests, router.status().waiting) == (0, 0)

    run(body)


def test_a_drain_waits_for_those_who_wait() -> None:
    async def body() -> None:
        busy = Stream(samples.TOKEN, hangs=True)
        nodes = Knowing({}, d0=busy)
        router, _ = scene(nodes, RouterSettings(running_limit=1))
        running = asyncio.create_task(collect(router.generate(REQUEST)))
        await soon(busy.waiting)
        waits = asyncio.create_task(collect(router.generate(REQUEST)))
        while not router.status().waiting:
            await asyncio.sleep(0)
        drained = asyncio.create_task(router.drain())
        nodes.scripts.clear()
        running.cancel()
        assert await waits == [samples.TOKEN, samples.GENERATE_DONE]
        await drained

    run(body)


def test_the_time_of_a_request_runs_while_it_waits() -> None:
    async def body() -> None:
        busy = Stream(samples.TOKEN, hangs=True)
        nodes = Knowing({}, d0=busy)
        router, _ = scene(nodes, RouterSettings(running_limit=1))
        running = asyncio.create_task(collect(router.generate(REQUEST)))
        await soon(busy.waiting)
        _, late = await failure(router.generate(replace(REQUEST, remaining_s=0.01)))
        assert isinstance(late, DeadlineExceeded)
        assert len(nodes.requests) == 1
        running.cancel()
        await asyncio.wait([running])

    run(body)


@pytest.mark.parametrize(("error", "hinted"), [(CapacityError("full"), True), (NeverFits("too large"), False)])
def test_a_fleet_without_room_says_when_to_come_again_unless_it_never_will_have_some(
    error: CapacityError, hinted: bool
) -> None:
    async def body() -> None:
        router, _ = scene(Knowing({}, d0=Stream(error=error)))
        _, raised = await failure(router.generate(REQUEST))
        assert raised is error
        assert ("retry_after_s" in raised.fields) == hinted

    run(body)


def test_a_burst_is_spread_before_any_node_has_said_a_word_of_it() -> None:
    async def body() -> None:
        nodes = Knowing({}, d0=Stream(hangs=True))
        router, _ = scene(nodes)
        burst = [asyncio.create_task(collect(router.generate(REQUEST))) for _ in range(12)]
        while len(nodes.requests) < 12:
            await asyncio.sleep(0)
        chosen = [request.prefill_address for _, request in nodes.requests]
        assert {address: chosen.count(address) for address in set(chosen)} == {"p0": 4, "p1": 4, "p2": 4}
        for task in burst:
            task.cancel()
        await asyncio.wait(burst)

    run(body)
