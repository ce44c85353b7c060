"""Many requests at once over small pools, given up and failing at random, some going on from the answer of another,
while pages move together: pages add up, answers are right."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pdkv.errors import CapacityError, DeadlineExceeded, LeaseExpired, PeerLost, TransferError
from pdkv.ids import UInt32Array
from pdkv.node.decode import DecodeSettings
from pdkv.node.messages import GenerateRequest, Sampling, Token
from pdkv.node.preemption import PreemptPolicy
from pdkv.transfer.backends.loopback import Fault, FaultKind
from tests.node.scene import alone, recovered, request, run, turns
from tests.node.toy import Pair, make_pair

REQUESTS = 60
AT_ONCE = 8
PAGES = 24
"""Usable pages of each pool: three or four of the requests fill it."""
EXPECTED = (DeadlineExceeded, LeaseExpired, PeerLost, TransferError)
"""What a request may end with here; anything else is a bug."""


@dataclass
class Schedule:
    pair: Pair
    seed: int
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    talks: list[UInt32Array] = field(default_factory=list)
    """Prompts with their answers, which came to their end."""
    moved: int = 0
    """Pages that were moved together, so far."""


def some_request(random: np.random.Generator, number: int, talks: list[UInt32Array]) -> GenerateRequest:
    """A beginning of one of four long texts, so that many share pages; or one of the `talks` goes on."""
    text = request(400, seed=int(random.integers(4))).tokens
    if talks and random.random() < 0.4:
        text = np.concatenate((talks[random.integers(len(talks))], text))
    asked = request(1, name=f"r{number}", remaining_s=float(random.choice([0.02, 30.0], p=[0.1, 0.9])))
    sampling = Sampling(max_tokens=int(random.integers(1, 24)))
    return replace(asked, tokens=text[: random.integers(1, 400)].copy(), sampling=sampling)


async def ask(pair: Pair, asked: GenerateRequest, wanted: int) -> list[int]:
    """Tokens of the request, given up after so many; asked for again while there is no room."""
    tokens: list[int] = []
    while True:
        try:
            async with aclosing(pair.decode.generate(asked)) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        tokens.append(event.token)
                    if len(tokens) == wanted:
                        break
            return tokens
        except CapacityError:
            assert not tokens
            await turns(20)


async def one(schedule: Schedule, number: int) -> str:
    """A request's whole life; how it ended. What came out of it is a beginning of what one process answers."""
    pair, random = schedule.pair, np.random.default_rng([schedule.seed, number])
    way = random.choice(["to the end", "some tokens", "some turns"], p=[0.5, 0.2, 0.3])
    async with schedule.gate:
        asked = some_request(random, number, schedule.talks)
        asking = asyncio.create_task(ask(pair, asked, int(random.integers(1, 6)) if way == "some tokens" else 10**6))
        if way == "some turns":
            await turns(int(random.integers(0, 300)))
            asking.cancel()
        await asyncio.wait([asking])
    if asking.cancelled():
        return "given up"
    if error := asking.exception():
        assert isinstance(error, EXPECTED), repr(error)
        return type(error).__name__
    answer = alone(pair, asked)
    assert tuple(asking.result()) == answer[: len(asking.result())]
    if len(asking.result()) < len(answer):
        return "left"
    schedule.talks.append(np.append(asked.tokens, np.array(answer, np.uint32)))
    return "answered"


async def checked(schedule: Schedule, running: asyncio.Future[list[str]]) -> None:
    """The laws, again and again while requests run and pages move; hanging reads come to an end now and then."""
    pair = schedule.pair
    while not running.done():
        for node in pair.nodes:
            node.parts.manager.check()
            schedule.moved += await node.compact()
            node.parts.manager.check()
        await turns(50)
        pair.net.settle(pair.prefill.parts.name)


@pytest.mark.parametrize(("seed", "policy"), list(enumerate(PreemptPolicy)))
def test_pages_add_up_and_answers_are_right_whatever_happens(seed: int, policy: PreemptPolicy) -> None:
    async def scenario(pair: Pair) -> None:
        random = np.random.default_rng(seed)
        await pair.decode.connect("p0")
        kinds = random.choice([FaultKind.LATE, FaultKind.FAIL, FaultKind.HANG], REQUESTS * 4, p=[0.9, 0.05, 0.05])
        faults = [Fault(FaultKind(kind), polls=int(random.integers(4))) for kind in kinds]
        pair.net.script(pair.prefill.parts.name, *faults)
        watch = asyncio.create_task(pair.prefill.watch_leases())
        schedule = Schedule(pair, seed)
        running = asyncio.gather(*(one(schedule, number) for number in range(REQUESTS)))
        await checked(schedule, running)
        assert schedule.moved > 0
        ends = running.result()
        assert ends.count("answered") >= REQUESTS // 4
        assert len(set(ends)) >= 3
        pair.net._scripts.clear()
        pair.net.settle(pair.prefill.parts.name)
        watch.cancel()
        assert bool(pair.decode.status().preemptions) == (policy is not PreemptPolicy.NONE)
        assert pair.decode.preemption.store.used_bytes == 0
        await recovered(pair)

    settings = DecodeSettings(prefill_addresses=("p0",), preempt=policy)
    decode_pages = PAGES if policy is PreemptPolicy.NONE else PAGES * 2 // 3
    run(scenario, make_pair(pages=decode_pages + 1, prefill_pages=PAGES + 1, settings=settings))
