"""One seed: a fleet, a dozen requests, some faults, and the laws.

Guarantees: a run ends, in virtual time, whatever the nodes do; it is good only if every request came to its end with
the right tokens or a named error, if every pair of nodes serves again once the faults are over, and if nothing is held.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from pdkv.errors import PdkvError
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import (
    FailurePolicy,
    GenerateDone,
    GenerateRequest,
    PagesSealed,
    PrefillDone,
    PrefillRequest,
    Sampling,
    Token,
)
from pdkv.node.stages import Stage
from tests.simulation import faults
from tests.simulation.laws import Laws
from tests.simulation.model import VOCAB
from tests.simulation.network import Link, Remote
from tests.simulation.nodes import Fleet, Life, Shape
from tests.simulation.world import Process, Violation, World

REQUESTS = 8
FAULTS = 5
PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
GRACE_S = 30.0
"""Past its own deadline a client waits so long at most."""
PROBE_ATTEMPTS = 4
RECOUNTS = 0.005
"""Of all stages that are reached, those at which a node's pages are counted again."""
GOES_ON = 0.3
"""Of all requests, those that are the next turn of an earlier one."""
PREFIXES = [np.random.default_rng([i]).integers(0, VOCAB, 48).astype(np.uint32) for i in range(3)]
PROBES = {
    (prefill, decode): np.random.default_rng([3, i, j]).integers(0, VOCAB, 20).astype(np.uint32)
    for i, prefill in enumerate(PREFILL)
    for j, decode in enumerate(DECODE)
}
"""A prompt of several pages a pair of nodes, which nobody else asks for."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and what became of it."""

    request: GenerateRequest
    decode: str
    at_s: float
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """`done`, or the kind of the error; empty while it runs."""
    task: Any = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    seed: int
    broken: str
    digest: str
    ends: Counter[str]
    hits: dict[tuple[str, str], int]
    virtual_s: float
    log: list[str]


class Run:
    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        plan = random.Random(f"plan of {seed}")
        self.seed = seed
        self.world = World(seed, keep_log=keep_log)
        self.laws = Laws(self.world)
        self.fleet = Fleet(self.world, Shape.drawn(plan), self._at)
        self.fleet.checked = self.laws.read
        self.fleet.started = self._started
        self.faults = faults.Faults(self.fleet, faults.draw(plan, FAULTS))
        self.faults.peer_of, self.faults.abort = self._peer_of, self._abort
        self.fleet.network.heard, self.fleet.network.change = self._heard, self._sent
        self.client = Process(self.world, "c0")
        self.asked: dict[RequestId, Asked] = {}
        self._open: set[RequestId] = set()
        """Those that have no end yet."""
        within_s = plan.choice((0.02, 0.2, 3.0))
        for number in range(REQUESTS):
            self._draw(plan, number, within_s)

    def _draw(self, rng: random.Random, number: int, within_s: float) -> None:
        before = rng.choice([*self.asked.values()]) if self.asked and rng.random() < GOES_ON else None
        tail = np.array([rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 3, 9)))], np.uint32)
        tokens: UInt32Array = np.concatenate((self._said(before) if before else _prefix(rng), tail))
        request = GenerateRequest(
            RequestId(f"r{number}"),
            tokens,
            Sampling(max_tokens=rng.choice((1, 1, 2, 3, 8))),
            prefill_address=rng.choice(PREFILL),
            prefill_alternates=rng.choice(((), PREFILL)),
            remaining_s=rng.choice((4.0, 20.0, 60.0)),
            on_failure=rng.choice(tuple(FailurePolicy)),
        )
        decode, at_s = rng.choice(DECODE), rng.random() * within_s
        if before is not None:
            decode, at_s = before.decode, before.at_s + at_s
        self._know(Asked(request, decode, at_s))

    def _said(self, asked: Asked) -> UInt32Array:
        """A conversation so far, as it will be whenever its next turn comes."""
        return np.concatenate((asked.request.tokens, np.array(self.laws.answers[asked.request.request_id], np.uint32)))

    def _know(self, asked: Asked) -> None:
        self.asked[asked.request.request_id] = asked
        self._open.add(asked.request.request_id)
        self.laws.know(asked.request)

    # --- what the fleet tells -------------------------------------------------------------------------------------

    def _at(self, life: Life, stage: Stage, request: RequestId) -> None:
        self.world.note(life.process.name, stage, request)
        if stage is Stage.ADMITTED:
            self.laws.admitted(life, request)
        if self.world.chance(RECOUNTS):
            self.laws.conserved(life)
        if stage is Stage.RECOMPUTING:
            self.laws.heard(wrong=False)
        self.faults.at(life, stage, request)

    def _started(self, life: Life) -> None:
        life.parts.engine.writes = lambda pages: self.laws.writes(life, pages)  # type: ignore[attr-defined]
        if life.role == "decode":
            self.laws.watch(life)

    def _sent(self, sender: str, receiver: str, message: Any) -> Any:
        kind = type(message)
        for sealed in (message,) if kind is PagesSealed else [getattr(message, name) for name in _sealed_in(kind)]:
            if isinstance(sealed, PagesSealed):
                self.laws.announced(sender, self.fleet.lives[sender].name, sealed)
        if kind is PrefillRequest and message.offered is not None:
            # it may arrive when another life has begun where it came from
            self.laws.announced(sender, message.envelope.sender, message.offered)
        return self.faults.garbage.changed(sender, message)

    def _heard(self, receiver: str, message: Any) -> None:
        if type(message) is PrefillDone:
            self.laws.heard(wrong=any(message is wrong for wrong in self.faults.garbage.wrong_accounts))

    def _peer_of(self, life: Life, request: RequestId) -> str:
        if life.role == "prefill":
            return request.partition("-")[0]
        asked = self.asked.get(request)
        return asked.request.prefill_address if asked else PREFILL[0]

    def _abort(self, life: Life, request: RequestId) -> None:
        asked = self.asked.get(request)
        if asked is None:  # it is the decode node's id: any of its requests
            decode = self._peer_of(life, request)
            running = [one for one in self.asked.values() if one.task and not one.end and one.decode == decode]
            asked = self.world.random.choice(running) if running else None
        if asked is not None and asked.task is not None and not asked.end:
            self.client.call_soon(asked.task.cancel)

    # --- clients --------------------------------------------------------------------------------------------------

    def _begin(self, asked: Asked) -> None:
        asked.task = self.client.create_task(self._ask(asked))
        asked.task.add_done_callback(lambda task: self._asked(asked, task))

    async def _ask(self, asked: Asked) -> None:
        remote = Remote(self.fleet.network, self.client, asked.decode)
        ended = False
        async with aclosing(remote.generate(asked.request)) as events:
            async for event in events:
                if isinstance(event, Token):
                    self.world.require(not ended and event.index == len(asked.tokens), "a token out of order")
                    asked.tokens.append(event.token)
                ended |= isinstance(event, GenerateDone)
        due = self.laws.answers[asked.request.request_id]
        name = asked.request.request_id
        self.world.require(ended, f"{name}: the stream ended without GenerateDone")
        self.world.require(asked.tokens == due, f"{name}: the answer is {asked.tokens}, right is {due}")

    def _asked(self, asked: Asked, task: Any) -> None:
        name = asked.request.request_id
        due = self.laws.answers[name]
        self.world.require(asked.tokens == due[: len(asked.tokens)], f"{name}: {asked.tokens} of {due}")
        error = None if task.cancelled() else task.exception()
        asked.end = "aborted" if task.cancelled() else "done" if error is None else type(error).__name__
        self._open.discard(name)
        self.world.note("client", name, asked.end, aside=error or "")
        self.world.require(error is None or isinstance(error, PdkvError), f"{name} ended with {error!r}")

    # --- a run ----------------------------------------------------------------------------------------------------

    def go(self) -> Result:
        try:
            self._go()
        except Violation:
            pass  # it stands in the world
        except Exception:
            # a callback that asyncio would only log
            self.world.broken("failed: " + traceback.format_exc(limit=-4))
        finally:
            self.world.end()
        return Result(
            self.seed,
            self.world.broken_law,
            self.world.digest,
            Counter(asked.end or "unfinished" for asked in self.asked.values()),
            dict(self.faults.hits),
            self.world.now,
            self.world.log,
        )

    def _go(self) -> None:
        for name in (*PREFILL, *DECODE):
            self.fleet.start(name)
        asked = list(self.asked.values())
        for one in asked:
            self.world.after(one.at_s, self.client.call_soon, self._begin, one)
        latest = max(a.at_s + a.request.remaining_s for a in asked) + GRACE_S
        self._until("requests that never end", latest)
        self._calm()
        self._probe()
        self._rest()

    def _until(self, what: str, limit_s: float) -> None:
        """All requests have ended."""
        if not self.world.run(lambda: not self._open, limit_s):
            self.world.require(False, f"{what}: {', '.join(sorted(self._open))}")

    def _calm(self) -> None:
        """The faults are over: links are whole, whoever is dead begins a new life, whoever stands still goes on."""
        self.faults.calm = True
        self.faults.garbage.clear()
        network, fabric = self.fleet.network, self.fleet.fabric
        for key in list(network._links):
            network._links[key] = Link()
        fabric.mend()
        for life in list(self.fleet.lives.values()):
            if life.alive and (life.parts.contract.weights_id != "simulated" or life.node.source.draining):
                self.fleet.kill(life)
                self.fleet.start(life.process.name)
        stopped = [life.process.stopped_until for life in self.fleet.lives.values() if life.alive]
        self.world.run(lambda: self._all_up() and self.world.now >= max(stopped, default=0.0), self.world.now + 60.0)

    def _all_up(self) -> bool:
        return all(life.alive and life.node is not None for life in self.fleet.lives.values())

    def _probe(self) -> None:
        """Every pair serves: a node that failed is nobody's for ever."""
        for prefill in PREFILL:
            for decode in DECODE:
                for attempt in range(PROBE_ATTEMPTS):
                    if self._served(prefill, decode, attempt):
                        break
                    self.world.run(lambda: False, self.world.now + 2.0 + self.fleet.shape.lease_ttl_s / 2)
                else:
                    self.world.require(False, f"{decode} gets nothing from {prefill} after the faults are over")

    def _served(self, prefill: str, decode: str, attempt: int) -> bool:
        name = RequestId(f"probe-{prefill}-{decode}-{attempt}")
        request = GenerateRequest(
            name, PROBES[prefill, decode], Sampling(max_tokens=2), prefill_address=prefill, remaining_s=20.0
        )
        asked = Asked(request, decode, 0.0)
        self._know(asked)
        self.client.call_soon(self._begin, asked)
        self._until("a probe hangs", self.world.now + 20.0 + GRACE_S)
        return asked.end == "done"

    def _rest(self) -> None:
        """Leases end by themselves, and reads without an end are fenced off; then nothing is held, nor held back."""
        lives = list(self.fleet.lives.values())
        shape = self.fleet.shape
        latest = self.world.now + 3 * shape.lease_ttl_s + 2 * shape.fence_after_s + 30.0
        while busy := [life.process.name for life in lives if _busy(life)]:
            self.world.require(self.world.now < latest, f"{busy} never come to rest: {_what(lives)}")
            self.world.run(lambda: False, self.world.now + 0.25)
            self.world.require(not self.world.broken_law, "")
        for life in lives:
            self.laws.conserved(life)
            self.laws.idle(life)
            self.laws.cached(life)


@cache
def _sealed_in(kind: type) -> tuple[str, ...]:
    """Fields of such a message that may hold pages which its sender has sealed."""
    return tuple(name for name in ("cached", "tail", "pages") if name in getattr(kind, "__dataclass_fields__", ()))


def _prefix(rng: random.Random) -> UInt32Array:
    return rng.choice(PREFIXES)[: rng.randint(1, 48)]


def _busy(life: Life) -> bool:
    node, manager = life.node, life.manager
    held = len(node.source.leases) + len(getattr(node, "farewells", ())) + len(node._running)
    return bool(held or manager.census()["quarantined"] or manager.reservations or manager.leased)


def _what(lives: list[Life]) -> str:
    return "; ".join(
        f"{life.process.name}: leases {len(life.manager.leased)}, reservations {len(life.manager.reservations)},"
        f" {life.manager.quarantine_reasons()}"
        for life in lives
        if _busy(life)
    )
