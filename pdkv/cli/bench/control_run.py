"""Requests between two node processes with tiny pages, and what each side spent on them.

Guarantees: a request's CPU is that of its whole process from the request's start until prefill knows that its lease is
over, all threads included; taken off are only the engine's own steps and what an idle node needs in that time, and
both are told. Each request has tokens of its own, so that nothing is a hit; its account is checked (pages, digests).
*Exposed* is from the end of the last chunk's step, or from the sealing of its pages, to the admission at decode: both
processes read one clock.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import numpy as np

from pdkv.cli.bench.control_memory import Growth, Held
from pdkv.cli.bench.control_node import (
    END,
    MEASURE,
    MEMORY,
    PAGE_TOKENS,
    VOCABULARY,
    NodeSpec,
    Role,
    Spent,
    received,
    run_node,
)
from pdkv.cli.bench.control_probe import Part, Span
from pdkv.errors import IntegrityError, PeerLost
from pdkv.ids import RequestId
from pdkv.node.flow import deadline
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Shipment
from pdkv.node.stages import Stage
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText

T = TypeVar("T")
ROLES: tuple[Role, Role] = ("prefill", "decode")
START_S = 120.0
REQUEST_S = 120.0
IDLE_S = 0.3
"""For so long both nodes are watched while nothing is asked of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked for at once."""

    tokens: int
    in_flight: int = 1

    @property
    def pages(self) -> int:
        """Of one request, all full."""
        return -(-self.tokens // PAGE_TOKENS)


@dataclass(slots=True)
class PartCost:
    """Of one request on one side."""

    cpu_ms: float = 0.0
    exposed_ms: float = 0.0
    """Time on the clock between the last chunk's sealing and admission; only with one request in flight."""
    calls: float = 0.0


@dataclass(slots=True)
class SideCost:
    """Of one request, above an idle node and without the engine's steps."""

    cpu_ms: float
    engine_ms: float
    """Taken off: CPU of the synthetic engine's steps."""
    idle_ms: float
    """Taken off: CPU of an idle node in the same time."""
    parts: dict[str, PartCost]
    threads_ms: dict[str, float]
    """CPU by thread, engine's and idle polling included; "others" are gRPC's and UCX's own threads."""

    @property
    def rest_ms(self) -> float:
        """Not in any part: event loop, gRPC, polling, the interpreter."""
        return self.cpu_ms - sum(part.cpu_ms for part in self.parts.values())


@dataclass(slots=True)
class Cost:
    """Of one request of a case: a median, or one measurement."""

    case: Case
    wall_ms: float
    """From first to last of those in flight."""
    exposed_ms: float
    """From the end of the last chunk's engine step to admission; NaN with several in flight."""
    after_sealing_ms: float
    """The same from the sealing of its pages."""
    sides: dict[str, SideCost] = field(default_factory=dict)

    @property
    def cpu_ms(self) -> float:
        """Of the side that spent more."""
        return max(side.cpu_ms for side in self.sides.values())

    @property
    def us_per_page(self) -> float:
        return 1e3 * self.cpu_ms / self.case.pages


class Pair:
    """A prefill and a decode node, each in a process of its own."""

    def __init__(self, pipes: dict[Role, Connection], addresses: dict[Role, str], directory: GrpcDirectory) -> None:
        self._pipes = pipes
        self._addresses = addresses
        self._decode = directory.decode(addresses["decode"])
        self._asked = 0
        self._idle_cores: dict[Role, float] = dict.fromkeys(ROLES, 0.0)

    async def settle(self) -> None:
        """Measure an idle pair, for the requests that come after it."""
        before = await self._spent()
        await asyncio.sleep(IDLE_S)
        after = await self._spent()
        for role in ROLES:
            elapsed_s = after[role].at_s - before[role].at_s
            self._idle_cores[role] = (after[role].cpu_s - before[role].cpu_s) / elapsed_s

    async def measure(self, case: Case) -> Cost:
        """Raises `IntegrityError` if a request did not ship all its pages, each with its digests verified."""
        requests = [self._request(case) for _ in range(case.in_flight)]
        before = await self._spent()
        began_s = time.monotonic()
        shipments = await asyncio.gather(*map(self._generate, requests))
        wall_s = time.monotonic() - began_s
        after = await self._spent()
        _require_whole(shipments, case)
        return self._cost(case, wall_s, before, after)

    async def grown(self, case: Case) -> dict[Role, Growth]:
        """What each side's memory grows by while it serves the case. Raises `IntegrityError` as `measure` does."""
        requests = [self._request(case) for _ in range(case.in_flight)]
        before = await self._held()
        shipments = await asyncio.gather(*map(self._generate, requests))
        after = await self._held()
        _require_whole(shipments, case)
        return {role: Growth.between(before[role], after[role]) for role in ROLES}

    def _request(self, case: Case) -> GenerateRequest:
        self._asked += 1
        tokens = np.random.default_rng(self._asked).integers(0, VOCABULARY, case.tokens, dtype=np.uint32)
        return GenerateRequest(
            RequestId(f"r{self._asked}"),
            tokens,
            Sampling(max_tokens=1),
            prefill_address=self._addresses["prefill"],
            remaining_s=REQUEST_S,
        )

    async def _generate(self, request: GenerateRequest) -> Shipment:
        async with aclosing(self._decode.generate(request)) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    return event.shipment
        raise PeerLost("the stream of a request ended without its end", request=request.request_id)

    async def _spent(self) -> dict[Role, Spent]:
        """Decode first: it answers when prefill has been told that the leases may go."""
        return {role: await self._asked_of(role, MEASURE) for role in reversed(ROLES)}

    async def _held(self) -> dict[Role, Held]:
        return {role: await self._asked_of(role, MEMORY) for role in reversed(ROLES)}

    async def _asked_of(self, role: Role, what: str) -> Any:
        pipe = self._pipes[role]
        pipe.send(what)
        async with deadline(REQUEST_S, f"{role} answering {what!r}"):
            return await received(pipe)

    def _cost(self, case: Case, wall_s: float, before: dict[Role, Spent], after: dict[Role, Spent]) -> Cost:
        window = _window(after) if case.in_flight == 1 else None
        exposed_ms = sealed_ms = float("nan")
        if window:
            computed_s, sealed_s, admitted_s = window
            exposed_ms, sealed_ms = 1e3 * (admitted_s - computed_s), 1e3 * (admitted_s - sealed_s)
        cost = Cost(case, 1e3 * wall_s, exposed_ms, sealed_ms)
        for role in ROLES:
            elapsed_s = after[role].at_s - before[role].at_s
            spans = after[role].spans
            engine_s = sum(span.cpu_s for span in spans if span.part is Part.ENGINE)
            idle_s = self._idle_cores[role] * elapsed_s
            cpu_s = after[role].cpu_s - before[role].cpu_s - engine_s - idle_s
            per_request = 1e3 / case.in_flight
            cost.sides[role] = SideCost(
                cpu_ms=cpu_s * per_request,
                engine_ms=engine_s * per_request,
                idle_ms=idle_s * per_request,
                parts=_parts(spans, case.in_flight, (window[1], window[2]) if window else (0.0, 0.0)),
                threads_ms=_threads(before[role], after[role], per_request),
            )
        return cost


@asynccontextmanager
async def pair(
    pages: int, chunk_tokens: int, token_us: float, *, scattered: bool = False, memory: bool = False
) -> AsyncIterator[Pair]:
    """Both nodes with so many pages, ended when the body has; with `memory` for `Pair.grown`, else for `measure`."""
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[Role, Connection] = {}
    processes = []
    directory = GrpcDirectory(PlainText())
    try:
        for role in ROLES:
            spec = NodeSpec(role, pages, chunk_tokens, token_us, scattered, memory)
            pipes[role], theirs = spawn.Pipe()
            process = spawn.Process(target=run_node, args=(spec, theirs, os.getpid()), name=role)
            process.start()
            processes.append(process)
            theirs.close()
        addresses = {}
        for role in ROLES:
            async with deadline(START_S, f"the {role} node starting"):
                addresses[role] = await received(pipes[role])
        yield Pair(pipes, addresses, directory)
        for pipe in pipes.values():
            pipe.send(END)
        for process in processes:
            await asyncio.to_thread(process.join, START_S)
    finally:
        await directory.close()
        for process in processes:
            process.kill()
            process.join()


def middle(values: Sequence[T]) -> T:
    """Medians of all figures, each by itself, of records of one shape."""
    first: Any = values[0]
    found: Any = first
    if is_dataclass(first) and not isinstance(first, type):
        found = replace(first, **{f.name: middle([getattr(v, f.name) for v in values]) for f in fields(first)})
    elif isinstance(first, dict):
        records = cast(Sequence[dict[Any, Any]], values)
        found = {name: middle([r[name] for r in records if name in r]) for name in first}
    elif isinstance(first, float):
        found = statistics.median(cast(Sequence[float], values))
    return cast(T, found)


def _require_whole(shipments: Iterable[Shipment], case: Case) -> None:
    for shipment in shipments:
        shipped = (shipment.pages_shipped, shipment.digests_verified, shipment.pages_hit)
        if shipped != (case.pages, case.pages, 0):
            raise IntegrityError("pages shipped, verified and hit", counted=shipped, kept=(case.pages,))


def _window(after: dict[Role, Spent]) -> tuple[float, float, float]:
    """When the last chunk's step ended, when its pages were sealed, when decode admitted."""
    computed_s = max(span.ended_s for span in after["prefill"].spans if span.part is Part.ENGINE)
    sealed_s = max(moment.at_s for moment in after["prefill"].moments if moment.stage is Stage.SEALED)
    admitted_s = max(moment.at_s for moment in after["decode"].moments if moment.stage is Stage.ADMITTED)
    return computed_s, sealed_s, admitted_s


def _parts(spans: Iterable[Span], requests: int, exposed: tuple[float, float]) -> dict[str, PartCost]:
    """Of one request of so many; `exposed` is a stretch of time."""
    parts = {part.value: PartCost() for part in Part if part is not Part.ENGINE}
    for span in spans:
        if span.part is not Part.ENGINE:
            cost = parts[span.part]
            cost.cpu_ms += 1e3 * span.cpu_s / requests
            cost.exposed_ms += 1e3 * max(min(span.ended_s, exposed[1]) - max(span.began_s, exposed[0]), 0.0)
            cost.calls += span.first / requests
    return parts


def _threads(before: Spent, after: Spent, factor: float) -> dict[str, float]:
    known = {name: after.threads_s[name] - before.threads_s.get(name, 0.0) for name in after.threads_s}
    known["others"] = after.cpu_s - before.cpu_s - sum(known.values())
    return {name: factor * cpu_s for name, cpu_s in known.items()}
