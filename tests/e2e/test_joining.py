"""Two prefill and two decode processes behind a router: one joins, one is killed and comes back, while requests run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import PdkvError, PeerLost, TransferError
from pdkv.ids import RequestId
from pdkv.node.flow import together
from pdkv.node.messages import FailurePolicy, Sampling
from pdkv.node.routing import RouterStatus
from tests.e2e.world import World, free_address
from tests.waiting import DEADLINE_S, until

LENGTH = 300
SAMPLING = Sampling(max_tokens=4)
BREATH_S = 0.5
SERVING = health_pb2.HealthCheckResponse.SERVING
SOON_S = 3.0
"""From a kill to the next good answer, and from the start of a node to its first."""


async def serving_status(node: NodeProcess) -> int:
    async with grpc.aio.insecure_channel(node.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(reply.status)


@dataclass
class Town:
    """The fleet, and clients that ask on and on, each prompt another."""

    world: World
    addresses: list[str]
    prefills: dict[int, NodeProcess]
    decodes: list[NodeProcess]
    router: NodeProcess
    next_seed: int = 5000
    good_s: list[float] = field(default_factory=list)
    """When an answer came to its end."""
    good: asyncio.Event = field(default_factory=asyncio.Event)
    failed: list[tuple[FailurePolicy, PdkvError]] = field(default_factory=list)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    async def start_prefill(self, number: int) -> None:
        self.prefills[number] = await self.world.start("prefill", f"t-p{number}", bind=self.addresses[number])

    async def status(self) -> RouterStatus:
        return await self.world.nodes.router(self.router.address).status()

    async def cached(self, number: int) -> int:
        """Pages of prompts that the prefill node has computed in this life."""
        return (await self.world.prefill_status(self.prefills[number])).pages["cached"]

    async def health(self) -> set[int]:
        """What the decode nodes' health services say."""
        return {await serving_status(node) for node in self.decodes}

    async def client(self, stop: asyncio.Event, policy: FailurePolicy) -> None:
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            self.next_seed += 1
            seed = self.next_seed
            request = self.world.request(seed, LENGTH, sampling=SAMPLING, on_failure=policy)
            try:
                answer = await self.world.ask(replace(request, prefill_address=""), self.router)
            except PdkvError as error:
                self.failed.append((policy, error))
            else:
                self.answers[seed] = tuple(answer.tokens)
                self.good_s.append(loop.time())
                self.good.set()
            with suppress(TimeoutError):
                # a breath: processes start beside it
                await asyncio.wait_for(stop.wait(), BREATH_S)

    async def good_answer_after(self, since_s: float) -> float:
        """Seconds until the first answer that was good after that moment."""

        async with asyncio.timeout(DEADLINE_S):
            while not self.good_s or self.good_s[-1] <= since_s:
                self.good.clear()
                await self.good.wait()
        return min(s for s in self.good_s if s > since_s) - since_s

    async def reckon(self, at_most: int) -> None:
        """Every answer is right; at most so many requests failed, each by name, and none that was to be saved."""
        for seed, tokens in self.answers.items():
            alone = await self.world.alone(self.world.request(seed, LENGTH).tokens, SAMPLING)
            assert tokens == alone.tokens, f"request {seed}"
        assert len(self.failed) <= at_most, self.failed
        for policy, error in self.failed:
            assert policy is FailurePolicy.FAIL, error
            assert isinstance(error, PeerLost | TransferError), error


@asynccontextmanager
async def town(world: World) -> AsyncIterator[Town]:
    """The first prefill node serves; the second, whose address everybody has, is yet to join."""
    addresses = [free_address(), free_address()]
    known = ",".join(addresses)
    *decodes, first = await asyncio.gather(
        *(world.start("decode", f"t-d{i}", prefill_addresses=known) for i in range(2)),
        world.start("prefill", "t-p0", bind=addresses[0]),
    )
    router = await world.start_router("t-r0", known, ",".join(node.address for node in decodes))
    made = Town(world, addresses, {0: first}, decodes, router)
    try:
        yield made
    finally:
        await asyncio.gather(*(node.stop() for node in (router, *decodes, *made.prefills.values())))


def test_a_node_joins_and_one_is_killed_and_comes_back_while_requests_run(world: World) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        async with town(world) as fleet, together() as group:
            stop = asyncio.Event()
            policies = (FailurePolicy.FAIL, FailurePolicy.FAIL, FailurePolicy.RETRY)
            clients = [group.create_task(fleet.client(stop, policy)) for policy in policies]
            await fleet.good_answer_after(0.0)

            await fleet.start_prefill(1)
            joined_s = loop.time()
            await until(lambda: fleet.cached(1), bool, "the second prefill node serves")
            joining_s = loop.time() - joined_s
            assert joining_s < SOON_S

            victim = fleet.prefills[0]
            killed_s = loop.time()
            victim.kill()
            await victim.wait()
            recovery_s = await fleet.good_answer_after(killed_s)
            assert recovery_s < SOON_S
            status = await until(
                fleet.status, lambda s: s.prefill[fleet.addresses[0]] != "up", "it is known to be gone"
            )
            assert "PeerLost" in status.prefill[fleet.addresses[0]]
            assert await fleet.health() == {SERVING}, "one dead peer makes nobody unready"

            await fleet.start_prefill(0)
            back_s = loop.time()
            await until(lambda: fleet.cached(0), bool, "the restarted node serves")
            again_s = loop.time() - back_s
            assert again_s < SOON_S
            await fleet.good_answer_after(loop.time())

            stop.set()
            await asyncio.gather(*clients)
            print(
                f"{len(fleet.answers)} answers, {len(fleet.failed)} failed; joined after {joining_s:.2f} s, first good"
                f" answer {recovery_s:.2f} s after the kill, restarted node served after {again_s:.2f} s"
            )
            await fleet.reckon(at_most=policies.count(FailurePolicy.FAIL))

    world.run(body())


def test_a_node_that_reaches_no_peer_is_not_ready_until_one_is_back(world: World) -> None:
    """And nobody asks it for anything meanwhile: an unready node gets no requests."""

    async def body() -> None:
        address = free_address()
        decode, prefill = await asyncio.gather(
            world.start("decode", "lonely-d", prefill_addresses=address, peer_probe_s="0.5"),
            world.start("prefill", "lonely-p", bind=address, peer_probe_s="0.5"),
        )
        status = world.nodes.decode(decode.address).status
        await until(lambda: serving_status(decode), lambda s: s == SERVING, "it has met its prefill node")
        await world.ask(world.request(4990, 100, prefill), decode)
        prefill.kill()
        await prefill.wait()
        told = await until(status, lambda s: bool(s.unready), "it is noticed")
        assert "no peer of 1 can be reached: lonely-p#" in told.unready
        assert await serving_status(decode) == health_pb2.HealthCheckResponse.NOT_SERVING
        (seen,) = told.peers.values()
        assert (seen.state, bool(seen.error)) == ("SUSPECT", True)
        prefill = await world.start("prefill", "lonely-p", bind=address, peer_probe_s="0.5")
        await until(status, lambda s: not s.unready, "it finds the new life by itself")
        assert await serving_status(decode) == SERVING
        prefill_status = await world.prefill_status(prefill)
        assert [name.split("#")[0] for name in prefill_status.peers] == ["lonely-d"]
        decode.kill()
        await decode.wait()
        await until(lambda: world.prefill_status(prefill), lambda s: bool(s.unready), "so is a prefill node")
        assert await serving_status(prefill) == health_pb2.HealthCheckResponse.NOT_SERVING
        await prefill.stop()

    world.run(body())


def test_two_contents_live_side_by_side_behind_one_router(world: World) -> None:
    """As while new weights are rolled out: nobody is asked to serve what it can't, and no request is lost."""

    async def body() -> None:
        nodes = await asyncio.gather(
            *(world.start(role, f"v{seed}-{role}", seed=seed) for seed in (0, 1) for role in ("prefill", "decode"))
        )
        old_p, old_d, new_p, new_d = (node.address for node in nodes)
        both = f"{old_p},{new_p}", f"{old_d},{new_d}"
        router = await world.start_router("v-r", *both, policy="round-robin")
        status = world.nodes.router(router.address).status
        contents = (await until(status, lambda s: len(s.contents) == 4, "everybody has said what it is")).contents
        assert contents[old_p] == contents[old_d] != contents[new_p] == contents[new_d]
        request = replace(world.request(4980, LENGTH, sampling=SAMPLING), prefill_address="")
        alone = (await world.alone(request.tokens, SAMPLING)).tokens
        asks = [replace(request, request_id=RequestId(f"v{i}")) for i in range(8)]
        answers = [tuple((await world.ask(ask, router)).tokens) for ask in asks]
        assert sorted(Counter(answers).values()) == [4, 4]
        assert answers.count(alone) == 4
        assert (await status()).apart == {}
        for node in nodes:
            assert "ContractMismatch" not in node.log.read_text(), "they never met"
        await asyncio.gather(*(node.stop() for node in (router, *nodes)))

    world.run(body())
