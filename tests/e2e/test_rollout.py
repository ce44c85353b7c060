"""New weights are rolled out, node by node, under running requests: none is lost, nothing old is used again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.reference import Reference
from pdkv.config import PrefillConfig
from pdkv.ids import RequestId
from pdkv.node.messages import FailurePolicy, Sampling
from pdkv.node.routing import RouterStatus
from tests.e2e.world import CHUNK, Answer, World, free_address
from tests.waiting import DEADLINE_S, until

LENGTH = 700
SAMPLING = Sampling(max_tokens=6)
OLD, NEW = 0, 1
PLACES = [("prefill", "roll-p0"), ("decode", "roll-d0"), ("prefill", "roll-p1"), ("decode", "roll-d1")]


class Rollout:
    """Two prefill and two decode nodes at fixed addresses behind a router; each is drained, ended and begun anew."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.addresses = {name: free_address() for _, name in PLACES}
        self.nodes: dict[str, NodeProcess] = {}
        self.answers: list[Answer] = []
        prompt = world.request(4600, LENGTH, sampling=SAMPLING, on_failure=FailurePolicy.FAIL)
        self.prompt = replace(prompt, prefill_address="")
        self._asked = 0
        self.answered = asyncio.Event()

    def of(self, role: str) -> str:
        return ",".join(self.addresses[name] for r, name in PLACES if r == role)

    async def start(self, role: str, name: str, seed: int) -> None:
        known = {"prefill_addresses": self.of("prefill")} if role == "decode" else {}
        flags = {"seed": seed, "bind": self.addresses[name], **known}
        self.nodes[name] = await self.world.start(role, name, **flags)

    async def ask(self, router: NodeProcess) -> Answer:
        self._asked += 1
        return await self.world.ask(replace(self.prompt, request_id=RequestId(f"roll-{self._asked}")), router)

    async def replace_by_new(self, role: str, name: str) -> None:
        """Drained by an operator's call, which ends the process too; then the new weights come at the same address."""
        old = self.nodes[name]
        await self.world.nodes.admin(old.address).drain(end=True, wait_s=DEADLINE_S)
        assert await old.wait() == 0
        await self.start(role, name, NEW)


def knows_anew(address: str, old: str, status: RouterStatus) -> bool:
    return status.contents.get(address, old) != old


def test_new_weights_come_while_requests_run(world: World) -> None:
    async def body() -> None:
        roll = Rollout(world)
        await asyncio.gather(*(roll.start(role, name, OLD) for role, name in PLACES))
        router = await world.start_router("roll-r", roll.of("prefill"), roll.of("decode"))
        status = world.nodes.router(router.address).status
        reference = Reference(PrefillConfig(model="tiny", seed=NEW, chunk_tokens=CHUNK, threads=1))
        old = (await world.alone(roll.prompt.tokens, SAMPLING)).tokens
        new = (await reference.ask(roll.prompt.tokens, SAMPLING)).tokens
        assert old != new
        known = await until(status, lambda s: len(s.contents) == len(PLACES), "everybody has said what it is")
        (before,) = set(known.contents.values())
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                try:
                    roll.answers.append(await roll.ask(router))
                finally:
                    roll.answered.set()

        clients = [asyncio.create_task(client()) for _ in range(2)]
        try:
            for role, name in PLACES:
                await roll.replace_by_new(role, name)
                await until(status, partial(knows_anew, roll.addresses[name], before), f"{name} is known as new")
            contents = await until(status, lambda s: len(set(s.contents.values())) == 1, "one content is left")
            assert len(contents.contents) == len(PLACES)
            done = len(roll.answers)
            async with asyncio.timeout(DEADLINE_S):
                while len(roll.answers) < done + 4 and not any(c.done() for c in clients):
                    roll.answered.clear()
                    await roll.answered.wait()
        finally:
            stop.set()
            # nobody was refused, and nobody's answer broke off
            await asyncio.gather(*clients)
        said = [tuple(answer.tokens) for answer in roll.answers]
        assert set(said) == {old, new}, "each answer is of one of the two weights"
        assert said[0] == old
        assert set(said[-2:]) == {new}
        first_of_new = roll.answers[said.index(new)]
        assert first_of_new.whole.shipment.pages_hit == 0, "what was cached under the old weights is not found"
        reference.close()
        await asyncio.gather(*(node.stop() for node in (router, *roll.nodes.values())))

    world.run(body())
