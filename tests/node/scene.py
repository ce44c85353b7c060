"""What a test of two nodes does again and again: ask, listen, hold a thread still, and look at what is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from pdkv.adapters.reference.monolith import Monolith
from pdkv.contract import Contract
from pdkv.geometry.page_layout import PageFormat
from pdkv.ids import PageHashes, PeerName, RequestId
from pdkv.kvcache.pool import SlotPool
from pdkv.node.flow import deadline
from pdkv.node.messages import (
    GenerateDone,
    GenerateEvent,
    GenerateRequest,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Token,
)
from tests.node.toy import CHUNK, Pair, ToyEngine

gc.freeze()  # what is imported by now is no garbage; without it, looking for some takes a fifth of a second
LIMIT_S = 20.0
"""Of every wait in a test: nothing here takes a tenth of it."""


def request(length: int, *, seed: int = 0, name: str = "r0", **more: Any) -> GenerateRequest:
    tokens = np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)
    return GenerateRequest(RequestId(name), tokens, Sampling(max_tokens=8), **{"remaining_s": 30.0, **more})


def prefill_request(pair: Pair, asked: GenerateRequest, **more: Any) -> PrefillRequest:
    """What the decode node would send for it if it had no page."""
    return PrefillRequest(
        **{
            "envelope": pair.decode.parts.envelope(pair.prefill.parts.name),
            "request_id": asked.request_id,
            "tokens": asked.tokens,
            "namespace": asked.namespace,
            "first_page_wanted": 0,
            "sampling": asked.sampling,
            "remaining_s": asked.remaining_s,
            **more,
        }
    )


async def answers(events: AsyncGenerator[GenerateEvent, None]) -> tuple[list[int], GenerateDone]:
    tokens: list[int] = []
    async with aclosing(events) as stream:
        async for event in stream:
            if isinstance(event, GenerateDone):
                return tokens, event
            assert isinstance(event, Token)
            assert event.index == len(tokens)
            tokens.append(event.token)
    raise AssertionError("the stream ended without GenerateDone")


async def said(events: AsyncGenerator[PrefillEvent, None]) -> list[PrefillEvent]:
    """A prefill stream to its end."""
    async with aclosing(events) as stream:
        return [event async for event in stream]


def alone(pair: Pair, asked: GenerateRequest) -> tuple[int, ...]:
    """What one process answers, with a pool of its own."""
    return _alone(pair.decode.parts.pool.fmt, pair.prefill.parts.contract, asked.tokens.tobytes(), asked.sampling)


@lru_cache(256)
def _alone(fmt: PageFormat, contract: Contract, tokens: bytes, sampling: Sampling) -> tuple[int, ...]:
    pool = SlotPool.create(fmt, 64)
    process = Monolith(ToyEngine(pool), pool, contract, CHUNK)
    return process.generate(np.frombuffer(tokens, np.uint32), sampling).tokens


# --- waiting ----------------------------------------------------------------------------------------------------------


async def until(condition: Callable[[], Any]) -> None:
    async with deadline(LIMIT_S, "what the test waits for"):
        while not condition():
            await asyncio.sleep(0)


async def turns(count: int = 200) -> None:
    """Let everything that can go on without the test go on."""
    for _ in range(count):
        await asyncio.sleep(0)


class Gate:
    """Holds the thread that comes by for the `at`-th time until it is opened."""

    def __init__(self, at: int = 1) -> None:
        self._at = at
        self._seen = 0
        self._reached = threading.Event()
        self._open = threading.Event()

    def pass_by(self) -> None:
        self._seen += 1
        if self._seen == self._at:
            self._reached.set()
            if not self._open.wait(LIMIT_S):
                raise AssertionError("nobody opened the gate")

    async def reached(self) -> None:
        await until(self._reached.is_set)

    def open(self) -> None:
        self._open.set()


def gated(thing: Any, method: str, *, at: int = 1) -> Gate:
    """From now on the `at`-th call of `thing.method` waits at its beginning."""
    gate, original = Gate(at), getattr(thing, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        gate.pass_by()
        return original(*args, **kwargs)

    setattr(thing, method, call)
    return gate


# --- what is left behind ----------------------------------------------------------------------------------------------


def held(node: Any) -> int:
    """Pages that a request, a lease or an unsettled read has."""
    census = node.parts.manager.census()
    return int(census["reserved"] + census["private"] + census["quarantined"])


async def rested(pair: Pair) -> None:
    """Both nodes have given everything back: nothing but cache is left."""
    await asyncio.gather(*pair.decode.farewells)
    await until(lambda: all(node.parts.manager.census()["quarantined"] == 0 for node in pair.nodes))
    for node in pair.nodes:
        manager = node.parts.manager
        manager.check()
        assert held(node) == 0, manager.census()
        assert (len(manager.reservations), len(manager.leased), len(manager.held_back)) == (0, 0, 0)
        assert node.status().requests == 0
    assert [len(node.source.leases) for node in pair.nodes] == [0, 0]
    assert (len(pair.prefill.source.computing), len(pair.decode.farewells)) == (0, 0)


async def recovered(pair: Pair) -> None:
    """As `rested`, and both still do what they are for, with all of their pages."""
    await rested(pair)
    asked = replace(request(150, seed=4242, name="afterwards"), sampling=Sampling(max_tokens=3))
    tokens, _ = await answers(pair.decode.generate(asked))
    assert tuple(tokens) == alone(pair, asked)
    await rested(pair)
    for node in pair.nodes:
        manager = node.parts.manager
        every = manager.reserve(PageHashes(), manager.census()["total"], max_hit_pages=0)
        manager.end(every)
        assert manager.census()["free"] == manager.census()["total"]


def run(scenario: Callable[[Pair], Awaitable[None]], pair: Pair, *, tidy: bool = True) -> None:
    """A scenario in a loop of its own. Unless not `tidy`, fails if a task outlives it or nobody hears of an error."""
    unheard: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        async with asyncio.timeout(3 * LIMIT_S):
            await scenario(pair)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not (tidy and left)
        gc.collect()

    try:
        asyncio.run(main())
    finally:
        pair.close()
    assert not tidy or not [(context["message"], context.get("exception")) for context in unheard]


# --- peers that misbehave ---------------------------------------------------------------------------------------------


class Meddler:
    """A prefill node between: changes what it says, as a faulty or hostile peer would."""

    def __init__(self, pair: Pair, change: Callable[[PrefillEvent], list[PrefillEvent]]) -> None:
        self._node = pair.prefill
        self._change = change
        self.connect = pair.prefill.connect
        self.renew_lease = pair.prefill.renew_lease
        self.release_lease = pair.prefill.release_lease

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        async with aclosing(self._node.prefill(request)) as events:
            async for event in events:
                for changed in self._change(event):
                    yield changed


def changed(kind: type, **changes: Any) -> Callable[[PrefillEvent], list[PrefillEvent]]:
    """Events of `kind` with other fields; a callable gets the event."""

    def change(event: PrefillEvent) -> list[PrefillEvent]:
        if not isinstance(event, kind):
            return [event]
        values = {k: v(event) if callable(v) else v for k, v in changes.items()}
        return [replace(event, **values)]

    return change


def stranger(pair: Pair) -> PeerName:
    """A life of the decode node that never was."""
    return replace(pair.decode.parts.name, incarnation="f" * 32)  # type: ignore[arg-type]
