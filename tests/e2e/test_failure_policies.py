"""A prefill process that is killed, or stopped, half way through a prompt: what becomes of the request, by policy."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.errors import PeerLost
from pdkv.node.messages import FailurePolicy, GenerateRequest, NodeStatus
from tests.e2e.world import CHUNK, Answer, World, at_rest, free_address
from tests.waiting import until

LENGTH = 2700
"""Six chunks: some seconds of prefill."""
SILENCE_S = 3.0


@dataclass
class Place:
    """A decode node of its own with two prefill nodes: the first one gets lost, and then another life."""

    world: World
    decode: NodeProcess
    first: NodeProcess
    second: NodeProcess

    async def status(self) -> NodeStatus:
        return await self.world.nodes.decode(self.decode.address).status()

    async def restored(self) -> None:
        """The first node serves again, whatever happened to it."""
        if self.first.running:
            os.kill(self.first.pid, signal.SIGCONT)
        else:
            self.first = await self.world.start("prefill", "lost", bind=self.first.address)

    def request(self, seed: int, policy: FailurePolicy) -> GenerateRequest:
        alternates = (self.second.address,)
        return self.world.request(seed, LENGTH, self.first, prefill_alternates=alternates, on_failure=policy)


@pytest.fixture(scope="module")
def place(world: World) -> Iterator[Place]:
    async def begin() -> Place:
        addresses = free_address(), free_address()
        first, second, decode = await asyncio.gather(
            world.start("prefill", "lost", bind=addresses[0]),
            world.start("prefill", "kept", bind=addresses[1]),
            world.start(
                "decode",
                "mending",
                prefill_addresses=",".join(addresses),
                peer_silence_s=str(SILENCE_S),
                recompute_chunk_tokens=CHUNK,
            ),
        )
        return Place(world, decode, first, second)

    made = world.run(begin())
    yield made
    for node in (made.first, made.second, made.decode):
        node.kill()
        world.run(node.wait())


SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
CASES = [(number, policy) for number in SIGNALS for policy in FailurePolicy]


@pytest.mark.parametrize(("number", "policy"), CASES, ids=[f"{n.name}-{p}" for n, p in CASES])
def test_a_prefill_process_is_lost_half_way(
    world: World, place: Place, number: signal.Signals, policy: FailurePolicy
) -> None:
    async def body() -> None:
        await place.restored()
        request = place.request(100 + CASES.index((number, policy)), policy)
        # before, not beside it: the first node has to be lost while it computes, and this process be in time for that
        expected = await world.alone(request.tokens)
        before = (await place.status()).pages["cached"]
        asked: asyncio.Task[Answer] = asyncio.create_task(world.ask(request, place.decode))
        await until(place.status, lambda s: s.pages["cached"] >= before + 8, "the first chunk's pages")
        assert not asked.done()
        os.kill(place.first.pid, number)
        if number is signal.SIGKILL:
            await place.first.wait()
        if policy is FailurePolicy.FAIL:
            with pytest.raises(PeerLost) as lost:
                await asyncio.wait_for(asked, 30)
            assert ("not heard of" in str(lost.value)) == (number is signal.SIGSTOP)
            assert lost.value.fields["accepted_by"] == place.first.address
        else:
            answer = await asyncio.wait_for(asked, 60)
            assert tuple(answer.tokens) == expected.tokens
            assert tuple(answer.logits_digests) == expected.logits_digests
            done = answer.whole
            mended = (1, 0) if policy is FailurePolicy.RETRY else (0, LENGTH - 64 * done.shipment.pages_shipped)
            assert (done.retries, done.recomputed_tokens) == mended
            assert done.shipment.pages_shipped == -(-(LENGTH - done.recomputed_tokens) // 64)
            assert done.recomputed_tokens <= LENGTH - CHUNK
        await place.restored()
        await until(place.status, at_rest, "decode has everything back")
        for node in (place.first, place.second):
            await until(lambda node=node: world.prefill_status(node), at_rest, "prefill has everything back")  # type: ignore[misc]

    world.run(body())
