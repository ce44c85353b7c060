"""Faults on purpose in a node's process and in what it says to prefill nodes, by a seeded plan.

Guarantees: the same plan on the same sequence of stages, calls and reads does the same; each fault is told, as a line
of JSON on stderr, before it happens; a place that the plan doesn't name is left as it is.

A plan as text: rules with commas between, then the seed:

    kill@decode.reading:nth=3,delay@prefill.sealed:p=0.1:s=0.2,drop@renew_lease:p=0.3,corrupt:p=0.01;seed=7

Before the `@` is what happens, after it where: at a stage of a request's life (`stages`), or in a call to another
node. Each rule has a probability `p`, or hits the `nth` time that its place is come to, counted from 1. A rule without
an `@` is one of reads (`transfer.backends.faulty`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pdkv.errors import ConfigError, InjectedFault, PdkvError, PeerLost
from pdkv.ids import RequestId
from pdkv.node.messages import LeaseCall, LendCall, Loan, LocateCall, NodeIntro, PrefillEvent, PrefillRequest
from pdkv.node.ports import Directory, PrefillDirectory, PrefillPeer, SourceDirectory
from pdkv.node.stages import Hook, Stage, no_hook
from pdkv.transfer.backends import faulty
from pdkv.transfer.backends.base import BackendFactory

T = TypeVar("T")

DELAY_S = 0.5
"""Of a rule that doesn't say how long: a delay, or until a lost message is missed."""
LONGEST_STREAM = 4
"""A stream that is dropped ends after fewer events than that."""


class Deed(StrEnum):
    KILL = "kill"
    """The process ends at once, as by kill -9."""
    STOP = "stop"
    """The process stands still until somebody continues it."""
    FAIL = "fail"
    """`InjectedFault` is raised there."""
    DELAY = "delay"
    """Everything in the process waits for `s` seconds; of a call, only the call does."""
    DROP = "drop"
    """Of a call: its message or the reply is lost, which shows after `s` seconds; a stream ends within."""
    DUPLICATE = "duplicate"
    """Of a call: it is made twice."""


AT_STAGES = (Deed.KILL, Deed.STOP, Deed.FAIL, Deed.DELAY)
CALLS = ("connect", "prefill", "renew_lease", "release_lease", "locate", "lend")
IN_CALLS = (Deed.FAIL, Deed.DELAY, Deed.DROP, Deed.DUPLICATE)
_SIGNALS = {Deed.KILL: signal.SIGKILL, Deed.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Rule:
    """A deed at a stage or in a call, with probability `p` or the `nth` time."""

    deed: Deed
    place: str
    p: float = 0.0
    nth: int = 0
    seconds: float = DELAY_S

    def __str__(self) -> str:
        when = f"p={self.p:g}" if self.p else f"nth={self.nth}"
        return f"{self.deed}@{self.place}:{when}:s={self.seconds:g}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    rules: tuple[Rule, ...]
    reads: faulty.FaultPlan
    """Those of the transfer engine's backend."""
    seed: int

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Raises `ConfigError` naming the rule and the part of it that can't be used. Empty text is no fault."""
        rules, mark, seed = text.partition(";")
        parts = [rule.strip() for rule in rules.split(",") if rule.strip()]
        reads = faulty.FaultPlan.parse(",".join(rule for rule in parts if "@" not in rule) + mark + seed)
        return cls(tuple(_rule(rule) for rule in parts if "@" in rule), reads, reads.seed)

    def hook(self, told: faulty.Told | None = None) -> Hook:
        """For `NodeParts.at`. `told` hears of each fault; None: a line on stderr does."""
        rules = [rule for rule in self.rules if rule.place not in CALLS]
        return _Faults(rules, self.seed, told or tell).at if rules else no_hook

    def directory(self, inner: PrefillDirectory, told: faulty.Told | None = None) -> PrefillDirectory:
        """`inner`, with the plan's faults in every call to a prefill node."""
        rules = [rule for rule in self.rules if rule.place in CALLS]
        return _FaultyDirectory(inner, _Faults(rules, self.seed, told or tell)) if rules else inner

    def sources(self, inner: SourceDirectory, told: faulty.Told | None = None) -> SourceDirectory:
        """`inner`, with the plan's faults in every call to a node as a source of pages."""
        rules = [rule for rule in self.rules if rule.place in CALLS]
        return _FaultyDirectory(inner, _Faults(rules, self.seed, told or tell)) if rules else inner

    def backends(self, rails: Mapping[str, BackendFactory]) -> Mapping[str, BackendFactory]:
        """Of each rail, with the plan's faults in every read."""
        return faulty.faulty_rails(rails, self.reads, lambda kind, of, count: tell(kind, f"read.{of}", count))


class _Faults:
    """The dice of some rules, and how often each place was come to."""

    def __init__(self, rules: list[Rule], seed: int, told: faulty.Told) -> None:
        self._rules = [(rule, random.Random(f"{seed}/{i}/{rule}")) for i, rule in enumerate(rules)]
        self._told = told
        self._reached: Counter[str] = Counter()
        self._injected: Counter[tuple[Deed, str]] = Counter()

    def at(self, stage: Stage, request: RequestId) -> None:
        """Raises `InjectedFault`."""
        for rule, _ in self.hits(stage.value):
            if (number := _SIGNALS.get(rule.deed)) is not None:
                os.kill(os.getpid(), number)
            elif rule.deed is Deed.DELAY:
                time.sleep(rule.seconds)
            else:
                raise InjectedFault(f"a fault at {stage.value}, on purpose", place=stage.value, request=request)

    def hits(self, place: str) -> list[tuple[Rule, random.Random]]:
        """Those that hit now, each told of, with its dice for what else is to be drawn."""
        self._reached[place] += 1
        number, hits = self._reached[place], []
        for rule, dice in self._rules:
            if rule.place == place and (number == rule.nth or (rule.p and dice.random() < rule.p)):
                hits.append((rule, dice))
                self._injected[rule.deed, place] += 1
                self._told(rule.deed.value, place, self._injected[rule.deed, place])
        return hits


class _FaultyDirectory:
    """`PrefillDirectory` or `SourceDirectory` in front of another one."""

    def __init__(self, inner: Directory[Any], faults: _Faults) -> None:
        self._inner = inner
        self._faults = faults

    def peer(self, address: str) -> PrefillPeer:
        return _FaultyPeer(self._inner.peer(address), self._faults, address)

    def drop(self, address: str) -> None:
        self._inner.drop(address)


class _FaultyPeer:
    """`PrefillPeer` in front of another one, or of a source, which nobody asks to prefill."""

    def __init__(self, inner: Any, faults: _Faults, address: str) -> None:
        self._inner = inner
        self._faults = faults
        self._address = address

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        return await self._call("connect", lambda: self._inner.connect(intro))

    async def renew_lease(self, call: LeaseCall) -> float:
        return await self._call("renew_lease", lambda: self._inner.renew_lease(call))

    async def release_lease(self, call: LeaseCall) -> None:
        await self._call("release_lease", lambda: self._inner.release_lease(call))

    async def locate(self, call: LocateCall) -> int:
        return await self._call("locate", lambda: self._inner.locate(call))

    async def lend(self, call: LendCall) -> Loan:
        return await self._call("lend", lambda: self._inner.lend(call))

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        events_left: int | None = None
        for rule, dice in self._faults.hits("prefill"):
            match rule.deed:
                case Deed.FAIL:
                    raise self._on_purpose("prefill")
                case Deed.DELAY:
                    await asyncio.sleep(rule.seconds)
                case Deed.DROP:
                    events_left = dice.randrange(LONGEST_STREAM)
                case _:
                    await self._twin(self._inner.prefill(request))
        async with aclosing(self._inner.prefill(request)) as events:
            async for event in events:
                if events_left is not None and events_left <= 0:
                    raise PeerLost("prefill: the stream was cut on purpose", address=self._address)
                yield event
                if events_left is not None:
                    events_left -= 1

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        for rule, dice in self._faults.hits(name):
            match rule.deed:
                case Deed.FAIL:
                    raise self._on_purpose(name)
                case Deed.DELAY:
                    await asyncio.sleep(rule.seconds)
                case Deed.DROP:
                    if dice.random() < 0.5:  # the reply is lost, not the message
                        await call()
                    await asyncio.sleep(rule.seconds)
                    raise PeerLost(f"{name}: lost on purpose", address=self._address)
                case _:
                    await call()
        return await call()

    async def _twin(self, events: AsyncGenerator[PrefillEvent, None]) -> None:
        """Its first event is heard, and the call given up."""
        try:
            async with aclosing(events) as twin:
                await anext(twin, None)
        except PdkvError:
            return

    def _on_purpose(self, call: str) -> InjectedFault:
        return InjectedFault(f"a fault in {call}, on purpose", place=call, address=self._address)


def tell(fault: str, stage: str, count: int) -> None:
    """A line of JSON on stderr: what is about to happen where, and how often it has by then."""
    print(json.dumps({"fault": fault, "stage": stage, "count": count}), file=sys.stderr, flush=True)


def _rule(text: str) -> Rule:
    what, *settings = text.split(":")
    name, _, place = what.partition("@")
    stages = [stage.value for stage in Stage]
    if place not in (*stages, *CALLS):
        raise ConfigError(f"fault plan, place in {text!r}", place, ", ".join((*stages, *CALLS)))
    deeds = IN_CALLS if place in CALLS else AT_STAGES
    if name not in list(deeds):
        raise ConfigError(f"fault plan, deed in {text!r}", name, ", ".join(deeds))
    given = dict(setting.partition("=")[::2] for setting in settings)
    if len(given) < len(settings) or not set(given) <= {"p", "nth", "s"} or ("p" in given) == ("nth" in given):
        raise ConfigError(f"fault plan, settings in {text!r}", ":".join(settings), "p or nth, and s")
    p = faulty.positive(text, given, "p", float, most=1.0)
    nth = faulty.positive(text, given, "nth", int)
    return Rule(Deed(name), place, p, nth, faulty.positive(text, given, "s", float) or DELAY_S)
