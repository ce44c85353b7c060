"""The router while its fleet changes: two contents, nodes that come back from being down, nodes that join and leave."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdkv.errors import CapacityError, ContractMismatch, PeerLost
from pdkv.node.messages import GenerateEvent, GenerateRequest
from pdkv.router.registry import Registry, Role
from pdkv.router.service import Router
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.node.scene import turns
from tests.router.fleet import Clock, learn, node
from tests.router.test_service import DONE, MISMATCH, Nodes, at, down, router
from tests.rpc import samples
from tests.rpc.fakes import FakeDecode, Stream, collect, failure, run, serving, soon

# --- two contents -----------------------------------------------------------------------------------------------------


def test_nodes_of_two_contents_live_side_by_side() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, registry = router(nodes)
        for address, weights in (("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b")):
            learn(registry, address, weights)
        for _ in range(8):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert set(nodes.asked) == {("d0", "p0"), ("d1", "p1")}
        assert {r.prefill_alternates for r in nodes.requests} == {()}
        contents = service.status().contents
        assert contents["p0"] == contents["d0"] != contents["p1"] == contents["d1"]

    run(body)


def test_a_pair_that_does_not_match_is_tried_once_and_not_again() -> None:
    """Before anybody has said what it is, a request finds out; no later one does."""

    async def body() -> None:
        apart = {"d0_p0": Stream(error=ContractMismatch(MISMATCH)), "d1_p1": Stream(error=ContractMismatch(MISMATCH))}
        nodes = Nodes(**apart)
        service, _ = router(nodes)
        for _ in range(20):
            assert await collect(service.generate(samples.generate_request())) == DONE
        counted = Counter(nodes.asked)
        assert (counted["d0", "p0"], counted["d1", "p1"]) == (1, 1)
        assert set(service.status().apart) == {"d0 with p0", "d1 with p1"}

    run(body)


def test_where_no_two_match_the_fields_are_named_and_nobody_is_asked() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, registry = router(nodes, 1, 1)
        learn(registry, "p0", "a")
        learn(registry, "d0", "b")
        _, raised = await failure(service.generate(samples.generate_request()))
        assert isinstance(raised, ContractMismatch)
        assert [(d.field, d.mine, d.theirs) for d in raised.differences] == [("weights_id", "b", "a")]
        assert nodes.asked == []
        registry.remove(Role.PREFILL, "p0")
        _, raised = await failure(service.generate(samples.generate_request()))
        assert isinstance(raised, PeerLost)

    run(body)


# --- one trial at a time ----------------------------------------------------------------------------------------------


def test_one_request_tries_a_node_that_was_down_and_the_others_go_elsewhere() -> None:
    async def body() -> None:
        clock, slow = Clock(), Stream(hangs=True)
        nodes = Nodes(d0_p0=slow)
        service, registry = router(nodes, 1, 2, clock)
        registry.mark_down(node(registry, "d0"), PeerLost("gone"))
        clock.now_s += 5.0
        trying = asyncio.create_task(collect(service.generate(samples.generate_request())))
        await soon(slow.waiting)
        for _ in range(10):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert Counter(nodes.asked) == {("d0", "p0"): 1, ("d1", "p0"): 10}
        trying.cancel()
        await asyncio.wait([trying])
        assert node(registry, "d0").trial is None
        assert registry.open(node(registry, "d0")), "nothing came of it"

    run(body)


def test_those_who_have_nowhere_else_to_go_wait_for_the_trial_and_share_its_end() -> None:
    async def body() -> None:
        clock = Clock()
        go = asyncio.Event()
        gone = at(PeerLost("gone"), "d0")

        class Late(Stream):
            async def _run(self) -> AsyncGenerator[GenerateEvent, None]:
                await go.wait()
                async with aclosing(super()._run()) as events:
                    async for event in events:
                        yield event

        for script, asked in ((Late(error=gone), 1), (Late(*DONE), 10)):
            go.clear()
            nodes = Nodes(d0_p0=script)
            service, registry = router(nodes, 1, 1, clock)
            registry.mark_down(node(registry, "d0"), PeerLost("gone"))
            herd = [asyncio.create_task(collect(service.generate(samples.generate_request()))) for _ in range(10)]
            while not script.opened:
                await asyncio.sleep(0)
            await turns()
            assert len(nodes.asked) == 1, "not a herd"
            go.set()
            ends = await asyncio.gather(*herd, return_exceptions=True)
            assert ends == [gone if script.error else DONE] * 10
            assert len(nodes.asked) == asked

    run(body)


def test_whoever_waits_for_a_trial_waits_no_longer_than_a_refusal_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.router.service.TRIAL_S", 0.01)

    async def body() -> None:
        slow = Stream(hangs=True)
        nodes = Nodes(d0_p0=slow)
        service, registry = router(nodes, 1, 1)
        registry.mark_down(node(registry, "d0"), PeerLost("gone"))
        first = asyncio.create_task(collect(service.generate(samples.generate_request())))
        await soon(slow.waiting)
        nodes.scripts.clear()
        assert await collect(service.generate(samples.generate_request())) == DONE
        assert down(registry) == set()
        assert nodes.dropped == ["d0"], "a new connection for the trial, not one for each request"
        first.cancel()
        await asyncio.wait([first])

    run(body)


# --- join and leave ---------------------------------------------------------------------------------------------------


def test_nodes_join_and_leave_while_requests_run() -> None:
    async def body() -> None:
        stays = Stream(samples.TOKEN, hangs=True)
        nodes = Nodes(d0_p0=stays)
        service, registry = router(nodes, 1, 1)
        running = asyncio.create_task(collect(service.generate(samples.generate_request())))
        await soon(stays.waiting)
        registry.add(Role.PREFILL, "p1")
        registry.replace(Role.DECODE, ["d1"])
        assert nodes.dropped == ["d0"]
        for _ in range(4):
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert set(nodes.asked[1:]) == {("d1", "p0"), ("d1", "p1")}
        assert not running.done(), "what runs on a node that left goes on"
        assert service.status().requests == 1
        running.cancel()
        await asyncio.wait([running])

    run(body)


def test_a_node_that_joins_takes_a_request_that_nobody_else_would() -> None:
    async def body() -> None:
        full = Stream(error=CapacityError("full"))
        nodes = Nodes(d0_p0=full)
        service, registry = router(nodes, 1, 1)

        class Joining(Stream):
            def __call__(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
                registry.add(Role.DECODE, "d1")
                return super().__call__(request)

        nodes.scripts["d0_p0"] = Joining(error=CapacityError("full"))
        assert await collect(service.generate(samples.generate_request())) == DONE
        assert nodes.asked == [("d0", "p0"), ("d1", "p0")]

    run(body)


def test_a_prefill_node_that_lost_one_decode_node_serves_the_others() -> None:
    async def body() -> None:
        nodes = Nodes()
        service, registry = router(nodes)
        learn(registry, "d0")
        lost = at(PeerLost("has reads that have not settled", peer=node(registry, "d0").name), "p0")
        nodes.scripts = {"d0_p0": Stream(error=lost), "d0_p1": Stream(error=at(PeerLost("gone"), "p1"))}
        assert await collect(service.generate(samples.generate_request())) == DONE
        assert nodes.asked == [("d0", "p0"), ("d0", "p1"), ("d1", "p0")]
        assert down(registry) == {"p1"}
        assert "d0 with p0" in service.status().apart

    run(body)


def test_over_sockets_a_node_is_used_from_the_moment_that_it_is_back() -> None:
    """Though nobody has looked since a request found it gone: a rollout ends the next one once this one serves."""

    async def body() -> None:
        async with serving(None, FakeDecode(Stream(*DONE))) as (server, directory):
            service = Router(Registry(["p:1"], [server.address]), directory)
            await server.stop(0)
            _, gone = await failure(service.generate(samples.generate_request()))
            assert isinstance(gone, PeerLost)
            services = Services(decode=FakeDecode(Stream(*DONE)))
            again = GrpcServer(Endpoint(server.address), services, PlainText())
            await again.start()
            try:
                assert await collect(service.generate(samples.generate_request())) == DONE
            finally:
                await again.stop(0)

    run(body)
