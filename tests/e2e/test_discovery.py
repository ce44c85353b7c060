"""Nodes that a router finds, as processes: they join and leave under running requests, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from dns.rcode import SERVFAIL

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import PdkvError
from pdkv.ids import RequestId
from pdkv.node.messages import FailurePolicy, GenerateDone, NodeStatus, Sampling
from pdkv.node.routing import RouterStatus
from pdkv.rpc.convert import generate
from pdkv.v1 import common_pb2, router_pb2_grpc
from tests.discovery.api_server import api_server, endpoint, kubeconfig
from tests.discovery.dns_server import DnsServer, dns_server
from tests.e2e.world import Answer, World, free_address
from tests.waiting import DEADLINE_S, until

SERVICES = {"prefill": "_grpc._tcp.prefill.test", "decode": "_grpc._tcp.decode.test"}
SAMPLING = Sampling(max_tokens=6)
USED_WITHIN_S = 5.0
"""From ready to its first request."""


class Load:
    """Clients that ask without end, each time something else; `answers` must only grow."""

    def __init__(self, world: World, router: NodeProcess) -> None:
        self.world, self.router = world, router
        self.answers: list[Answer] = []
        self.asked = 0
        self.answered = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises what any of them was answered with but tokens."""
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._ask()) for _ in range(3)]
            yield
            for client in clients:
                client.cancel()

    async def _ask(self) -> None:
        while True:
            self.asked += 1
            request = self.world.request(
                7000 + self.asked, 300, sampling=SAMPLING, on_failure=FailurePolicy.RETRY, want_logits=False
            )
            request = replace(request, prefill_address="", request_id=RequestId(f"scale-{self.asked}"))
            answer = await self.world.ask(request, self.router)
            assert len(answer.tokens) == SAMPLING.max_tokens
            assert answer.whole
            self.answers.append(answer)
            self.answered.set()

    async def more(self, count: int) -> None:
        wanted = len(self.answers) + count
        async with asyncio.timeout(DEADLINE_S):
            while len(self.answers) < wanted:
                self.answered.clear()
                await self.answered.wait()


def local(node: NodeProcess) -> str:
    """By a name, as services bring names."""
    return node.address.replace("127.0.0.1", "localhost")


async def start(world: World, dns: DnsServer, role: str, name: str) -> NodeProcess:
    own = {"prefill_addresses": f"dns:{SERVICES['prefill']}", "prefill_allow": "localhost:*"}
    decode = {**own, "dns_server": dns.address} if role == "decode" else {}
    return await world.start(role, name, bind=free_address(), engine="synthetic", **decode)


def states(status: RouterStatus) -> Mapping[str, str]:
    return {**status.prefill, **status.decode}


def all_up(nodes: tuple[NodeProcess, ...], status: RouterStatus) -> bool:
    return states(status) == {local(node): "up" for node in nodes}


def was_used(status: NodeStatus) -> bool:
    return status.pages["cached"] > 0


def test_a_fleet_grows_and_shrinks_under_running_requests(world: World) -> None:
    async def body() -> None:
        async with dns_server() as dns:
            p0, d0 = await asyncio.gather(
                start(world, dns, "prefill", "scale-p0"), start(world, dns, "decode", "scale-d0")
            )
            dns.serve(SERVICES["prefill"], [local(p0)])
            dns.serve(SERVICES["decode"], [local(d0)])
            router = await world.start_router(
                "scale-r", *(f"dns:{name}" for name in SERVICES.values()), dns_server=dns.address
            )
            status = world.nodes.router(router.address).status
            await until(status, partial(all_up, (p0, d0)), "both are found and up")
            load = Load(world, router)
            async with load.running():
                await load.more(2)
                p1, d1 = await _grows(world, dns, (p0, d0))
                await until(status, partial(all_up, (p0, p1, d0, d1)), "all four are up")
                await _stumbles(world, dns, router, load)
                await _shrinks(world, dns, (p0, d0), (p1, d1))
                await until(status, partial(all_up, (p1, d1)), "the new ones alone are left")
                await load.more(4)
            words = router.log.read_text()
            assert words.count("the 2 that are known stay") == 2, "once for each list"
            assert f"finds 2: +{local(p1)}" in words
            assert f"finds 1: -{local(p0)}" in words
            await asyncio.gather(*(node.stop() for node in (router, p1, d1)))

    world.run(body())


async def _grows(world: World, dns: DnsServer, old: tuple[NodeProcess, NodeProcess]) -> tuple[NodeProcess, NodeProcess]:
    """New ones are used soon after they serve, and can be found."""
    p1, d1 = await asyncio.gather(start(world, dns, "prefill", "scale-p1"), start(world, dns, "decode", "scale-d1"))
    for role, node, new in zip(SERVICES, old, (p1, d1), strict=True):
        dns.serve(SERVICES[role], [local(node), local(new)])
    async with asyncio.timeout(USED_WITHIN_S):
        await until(partial(world.prefill_status, p1), was_used, "the new prefill node is used")
        await until(world.nodes.decode(d1.address).status, was_used, "the new decode node is used")
    return p1, d1


async def _stumbles(world: World, dns: DnsServer, router: NodeProcess, load: Load) -> None:
    """DNS is broken for a while: nothing changes but what the status says."""
    status = world.nodes.router(router.address).status
    dns.broken = SERVFAIL
    failed = await until(status, lambda s: all("now" in words for words in s.discovery.values()), "it is said")
    assert all("2 found; now dns:_grpc._tcp." in words and "SERVFAIL" in words for words in failed.discovery.values())
    assert set(failed.discovery) == {f"{role} dns:{name}" for role, name in SERVICES.items()}
    assert set(states(failed).values()) == {"up"}
    await load.more(4)
    dns.broken = None
    await until(status, lambda s: set(s.discovery.values()) == {"2 found"}, "DNS is back")


async def _shrinks(
    world: World, dns: DnsServer, gone: tuple[NodeProcess, NodeProcess], left: tuple[NodeProcess, NodeProcess]
) -> None:
    """As when a replica is taken away: told to end, and out of DNS, at about the same time."""
    ends = [world.nodes.admin(node.address).drain(end=True, wait_s=DEADLINE_S) for node in gone]
    ending = [asyncio.ensure_future(end) for end in ends]
    for role, node in zip(SERVICES, left, strict=True):
        dns.serve(SERVICES[role], [local(node)])
    await asyncio.gather(*ending)
    assert [await node.wait() for node in gone] == [0, 0]


def test_by_the_api_a_pod_that_ends_gets_no_new_request(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it still could, as here, or not; others that are there are asked instead."""

    async def body() -> None:
        async with api_server() as api:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", api)))
            for role, node in (("prefill", world.prefill), ("decode", world.decode)):
                host, _, port = node.address.rpartition(":")
                api.put(f"{role}-a", [endpoint("", host)], int(port), role)
            router = await world.start_router("api-r", "k8s:prefill", "k8s:decode")
            status = world.nodes.router(router.address).status
            await until(status, lambda s: set(states(s).values()) == {"up"} and len(states(s)) == 2, "both are up")
            request = replace(world.request(7900, 200), prefill_address="")
            answer = await world.ask(request, router)
            assert tuple(answer.tokens) == (await world.alone(request.tokens)).tokens
            api.put("prefill-b", [endpoint("", "127.0.0.1")], 1)
            host, _, port = world.prefill.address.rpartition(":")
            api.put("prefill-a", [endpoint("", host, terminating=True)], int(port))
            await until(status, lambda s: set(s.prefill) == {"127.0.0.1:1"}, "it is known no more")
            with pytest.raises(PdkvError):
                await world.ask(replace(request, request_id=RequestId("api-1"), remaining_s=5.0), router)
            api.forget()
            api.put("prefill-a", [endpoint("", host)], int(port))
            await until(status, lambda s: s.prefill.get(world.prefill.address) == "up", "it is back")
            await world.ask(replace(request, request_id=RequestId("api-2")), router)
            await router.stop()

    world.run(body())


def test_a_router_that_is_told_to_end_hands_its_clients_on(world: World) -> None:
    """Who keeps a connection to it is served by another one at once, and what runs there comes to its end."""

    async def body() -> None:
        routers = await asyncio.gather(*(world.start_router(f"end-r{i}", world.prefill, world.decode) for i in (0, 1)))
        for router in routers:
            await until(
                world.nodes.router(router.address).status, lambda s: "up" in s.decode.values(), "its nodes are up"
            )
        targets = ",".join(router.address for router in routers)
        async with grpc.aio.insecure_channel(f"ipv4:{targets}") as channel:
            stub = router_pb2_grpc.RouterStub(channel)

            def asked(seed: int, tokens: int) -> Any:
                sampling = Sampling(max_tokens=tokens)
                request = replace(world.request(seed, 100, sampling=sampling, want_logits=False), prefill_address="")
                return stub.Generate(generate.generate_request_to_pb(request), timeout=DEADLINE_S)

            long = aiter(asked(7950, 512))
            await anext(long)
            (gone,) = [r for r in routers if (await world.nodes.router(r.address).status()).requests]
            os.kill(gone.pid, signal.SIGTERM)
            await _is_heard(stub)
            short = [generate.generate_event_from_pb(reply) async for reply in asked(7951, 4)]
            assert isinstance(short[-1], GenerateDone)
            assert gone.running, "it is still busy with the long one"
            left = [generate.generate_event_from_pb(reply) async for reply in long]
            assert len(left) == 512, "all other tokens, and the last word"
            assert isinstance(left[-1], GenerateDone)
        assert await gone.wait() == 0
        await asyncio.gather(*(router.stop() for router in routers))

    world.run(body())


async def _is_heard(stub: router_pb2_grpc.RouterStub) -> None:
    """The other router, which runs nothing, answers. A call in between may have no answer."""

    async def requests() -> int:
        try:
            return int((await stub.Status(common_pb2.StatusRequest(), timeout=DEADLINE_S)).requests)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                raise
            return 1

    await until(requests, lambda count: count == 0, "another router answers")


def test_a_decode_node_that_finds_no_prefill_node_says_so_until_it_does(world: World) -> None:
    """It is not ready, its clients are not blamed, and its status has the reason."""

    async def body() -> None:
        async with dns_server() as dns:
            place = f"dns:{SERVICES['prefill']}"
            node = await world.start(
                "decode",
                "lone-d",
                prefill_addresses=place,
                dns_server=dns.address,
                http_bind="127.0.0.1:0",
                http_tokenizer="bytes",
            )
            status = world.nodes.decode(node.address).status
            said = await until(status, lambda s: "now" in s.discovery.get(f"prefill {place}", ""), "it was looked")
            assert said.discovery[f"prefill {place}"].startswith(f"0 found; now {place}: NXDOMAIN")
            assert said.unready == "no prefill node is found"
            asked = {"model": "pdkv", "prompt": "a", "max_tokens": 2}
            async with ClientSession() as session:
                async with session.post(f"http://{node.http}/v1/completions", json=asked) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "PeerLost")
                dns.serve(SERVICES["prefill"], [local(world.prefill)])
                await until(status, lambda s: not s.unready and len(s.peers) == 1, "it has found it, and met it")
                async with session.post(f"http://{node.http}/v1/completions", json=asked) as answer:
                    assert answer.status == 200
            assert (await status()).discovery == {f"prefill {place}": "1 found"}
            await node.stop()

    world.run(body())
