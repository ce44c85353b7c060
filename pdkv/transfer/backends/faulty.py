"""Faults on purpose, in front of any backend: reads that fail, hang, come late or bring wrong bytes, by a seeded plan.

Guarantees: the same plan on the same sequence of reads does the same; every fault is counted and logged with its kind
and the number of its read; an end never says more than is true: FAILED comes only after the read underneath has ended.
A plan without rules leaves the factory as it is.

A plan as text: rules with commas between, then the seed:

    corrupt:p=0.01,lose:nth=3,delay:p=0.1:s=0.05;seed=7

Each rule has a probability `p`, or hits the `nth` read, counted from 1 over all agents that the factory made. It counts
and hits reads of pages; `of=probes` or `of=rows` makes it those of probes (a new peer's first read is one), or of
page-table rows. `stale` always hits rows, and `garble` the metadata of the nth peer that is added.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar, cast

import numpy as np

from pdkv.errors import ConfigError
from pdkv.ids import SINK_PAGE, Int32Array, UInt64Array
from pdkv.transfer.backends.base import (
    AgentName,
    Backend,
    BackendFactory,
    End,
    EndState,
    Lane,
    Memory,
    Posted,
    Prepared,
    Side,
)
from pdkv.transfer.landing import ROW_BYTES

logger = logging.getLogger(__name__)
N = TypeVar("N", int, float)


class Trouble(StrEnum):
    DELAY = "delay"
    """Its end is told `s` seconds late."""
    FAIL = "fail"
    """Ends FAILED, after some or all of its bytes have landed."""
    LOSE = "lose"
    """Ends LOST."""
    HANG = "hang"
    """Has no end."""
    DISCONNECT = "disconnect"
    """Ends FAILED, and so does every later read from that peer until it is added again."""
    CORRUPT = "corrupt"
    """Ends DONE with one wrong bit."""
    STALE = "stale"
    """The generation in one page-table row is another one."""
    GARBLE = "garble"
    """A peer's metadata is noise."""
    DOWN = "down"
    """For `s` seconds no read of this rail ends, whosever it is."""


Of = Literal["pages", "rows", "probes", "peers"]
Told = Callable[[str, str, int], None]
_CHOICES = ("pages", "rows", "probes")
_ALWAYS: dict[Trouble, Of] = {Trouble.STALE: "rows", Trouble.GARBLE: "peers"}
_ENDS = (Trouble.FAIL, Trouble.LOSE, Trouble.HANG, Trouble.DISCONNECT)
_WRITES = (Trouble.CORRUPT, Trouble.STALE)
_LAST = (Trouble.DELAY, Trouble.DOWN)
"""They have a time."""


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One kind of trouble, and what it hits: each with probability `p`, or the `nth`."""

    kind: Trouble
    p: float = 0.0
    nth: int = 0
    delay_s: float = 0.0
    of: Of = "pages"

    def __str__(self) -> str:
        text = f"{self.kind}:p={self.p:g}" if self.p else f"{self.kind}:nth={self.nth}"
        text += f":s={self.delay_s:g}" if self.delay_s else ""
        return text if self.of in ("pages", _ALWAYS.get(self.kind)) else f"{text}:of={self.of}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    rules: tuple[FaultRule, ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Raises `ConfigError` naming the rule and the part of it that can't be used. Empty text is no fault."""
        rules, separated, rest = text.partition(";")
        seed = 0
        if separated:
            name, _, value = rest.partition("=")
            if name.strip() != "seed":
                raise ConfigError("fault plan, after the ;", rest.strip(), "seed=NUMBER")
            seed = _number("fault plan, seed", value, int, "a whole number, at least 0")
        return cls(tuple(_rule(rule.strip()) for rule in rules.split(",") if rule.strip()), seed)

    def __str__(self) -> str:
        return ",".join(map(str, self.rules)) + f";seed={self.seed}"


def faulty(factory: BackendFactory, plan: FaultPlan, told: Told | None = None) -> BackendFactory:
    """That factory, with the plan's faults in every backend that it makes: a `FaultyFactory` unless there are none."""
    return FaultyFactory(factory, plan, told) if plan.rules else factory


def faulty_rails(
    rails: Mapping[str, BackendFactory], plan: FaultPlan, told: Told | None = None
) -> Mapping[str, BackendFactory]:
    """The same for a factory a rail; reads of all rails are counted together."""
    if not plan.rules or not rails:
        return rails
    one = FaultyFactory(next(iter(rails.values())), plan, told)
    return {device: one.beside(factory) for device, factory in rails.items()}


class FaultyFactory:
    """A `BackendFactory`. Backends of one factory belong to one thread and count reads together."""

    def __init__(self, factory: BackendFactory, plan: FaultPlan, told: Told | None = None) -> None:
        """`told` hears of each fault before it happens: kind, what it hits, how many of the kind so far."""
        self._factory = factory
        self._plan = plan
        self._told = told
        self._seen: Counter[Of] = Counter()
        self._dice = [random.Random(f"{plan.seed}/{i}/{rule}") for i, rule in enumerate(plan.rules)]
        self.injected: Counter[Trouble] = Counter()
        """Faults so far, by kind."""
        self.down_until = -math.inf

    def beside(self, factory: BackendFactory) -> FaultyFactory:
        """Another rail's: it counts and throws dice together with this one, and is down by itself."""
        other = copy.copy(self)
        other._factory, other.down_until = factory, -math.inf
        return other

    def __call__(self, name: AgentName) -> FaultyBackend:
        return FaultyBackend(self._factory(name), self)

    @property
    def writes(self) -> bool:
        """Some rule changes bytes in local memory."""
        return any(rule.kind in _WRITES for rule in self._plan.rules)

    def draw(self, of: Of, peer: AgentName) -> list[tuple[FaultRule, random.Random]]:
        """The rules that hit the next one of these, each with its dice for what else is to be drawn."""
        self._seen[of] += 1
        number, hits = self._seen[of], []
        for rule, dice in zip(self._plan.rules, self._dice, strict=True):
            if rule.of == of and (number == rule.nth or (rule.p and dice.random() < rule.p)):
                hits.append((rule, dice))
        ends = [rule for rule, _ in hits if rule.kind in _ENDS]
        hits = [(rule, dice) for rule, dice in hits if rule not in ends[1:]]
        for rule, _ in hits:
            self.injected[rule.kind] += 1
            if self._told is not None:
                self._told(rule.kind, of, self.injected[rule.kind])
            logger.warning("fault on purpose: %s, %s read %d, from %s", rule.kind, of, number, peer)
        return hits


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A prepared list, with the table that it was made of."""

    inner: Prepared
    peer: AgentName | None
    table: UInt64Array

    def place(self, index: int) -> tuple[int, int]:
        """Address and length of a descriptor."""
        ends = np.cumsum(self.table[:, 4])
        row = int(np.searchsorted(ends, index, side="right"))
        address, length, _, stride, count = (int(x) for x in self.table[row])
        return address + (index - (int(ends[row]) - count)) * stride, length


@dataclass(slots=True, eq=False)
class _Read:
    peer: AgentName
    local: _List
    indices: Int32Array
    """In `local`: where it lands."""
    hits: list[tuple[FaultRule, random.Random]]
    inner: Posted | None = None
    end: End | None = None
    told_at: float = 0.0


class FaultyBackend:
    """`Backend` in front of another one."""

    def __init__(self, inner: Backend, faults: FaultyFactory) -> None:
        self._inner = inner
        self._faults = faults
        self._gone: set[AgentName] = set()

    @property
    def name(self) -> str:
        return f"faulty {self._inner.name}"

    def register(self, address: int, length: int, memory: Memory, device: int) -> None:
        if memory == "VRAM" and self._faults.writes:
            raise ConfigError("fault plan, corrupt or stale with memory", memory, "DRAM")
        self._inner.register(address, length, memory, device)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, peer: AgentName, metadata: bytes) -> None:
        for _, dice in self._faults.draw("peers", peer):
            metadata = dice.randbytes(len(metadata))
        self._inner.add_peer(peer, metadata)
        self._gone.discard(peer)

    def remove_peer(self, peer: AgentName) -> None:
        self._inner.remove_peer(peer)

    def prepare(self, peer: AgentName | None, table: UInt64Array, memory: Memory) -> _List:
        return _List(self._inner.prepare(peer, table, memory), peer, table)

    def release(self, prepared: Prepared) -> None:
        self._inner.release(_list(prepared).inner)

    def post(self, local: Side, remote: Side) -> _Read:
        mine, theirs = _list(local.prepared), _list(remote.prepared)
        assert theirs.peer is not None
        if remote.indices.size == 1 and remote.indices[0] == SINK_PAGE:
            of: Of = "probes"
        else:
            of = "rows" if int(mine.table[0, 1]) == ROW_BYTES else "pages"
        read = _Read(theirs.peer, mine, local.indices, self._faults.draw(of, theirs.peer))
        for rule, _ in read.hits:
            if rule.kind is Trouble.DOWN:
                self._faults.down_until = time.monotonic() + rule.delay_s
        if theirs.peer not in self._gone:
            read.inner = self._inner.post(Side(mine.inner, local.indices), Side(theirs.inner, remote.indices))
        return read

    def poll(self, read: Posted) -> End | None:
        assert isinstance(read, _Read)
        if time.monotonic() < self._faults.down_until:
            return None
        if read.end is None:
            end = self._ended(read)
            if end is None:
                return None
            read.end = end
            late_s = sum(rule.delay_s for rule, _ in read.hits if rule.kind is Trouble.DELAY)
            read.told_at = time.monotonic() + late_s
        if time.monotonic() < read.told_at or any(rule.kind is Trouble.HANG for rule, _ in read.hits):
            return None
        return read.end

    def progress(self) -> None:
        self._inner.progress()

    def lane(self, peer: AgentName) -> Lane:
        return self._inner.lane(peer)

    def close(self) -> None:
        self._inner.close()

    def _ended(self, read: _Read) -> End | None:
        """The end that is told, once the read underneath has ended."""
        disconnected = End(EndState.FAILED, f"disconnected from {read.peer} on purpose", disconnected=True)
        if read.inner is None:
            return disconnected
        end = self._inner.poll(read.inner)
        if end is None or end.state is not EndState.DONE:
            return end
        for rule, dice in read.hits:
            match rule.kind:
                case Trouble.FAIL:
                    end = End(EndState.FAILED, "failed on purpose")
                case Trouble.LOSE:
                    end = End(EndState.LOST, "lost on purpose")
                case Trouble.DISCONNECT:
                    self._gone.add(read.peer)
                    end = disconnected
                case Trouble.CORRUPT:
                    address, length = read.local.place(int(dice.choice(read.indices)))
                    _flip(address + dice.randrange(length), dice)
                case Trouble.STALE:
                    # a row begins with its generation
                    address, _ = read.local.place(int(dice.choice(read.indices)))
                    _flip(address + dice.randrange(8), dice)
        return disconnected if read.peer in self._gone else end


def _flip(address: int, dice: random.Random) -> None:
    ctypes.c_uint8.from_address(address).value ^= 1 << dice.randrange(8)


def _list(prepared: Prepared) -> _List:
    assert isinstance(prepared, _List)
    return prepared


def _rule(text: str) -> FaultRule:
    name, *settings = text.split(":")
    if name not in list(Trouble):
        raise ConfigError(f"fault plan, kind in {text!r}", name, ", ".join(Trouble))
    kind = Trouble(name)
    given = dict(setting.partition("=")[::2] for setting in settings)
    allowed = ["p", "nth", *(["s"] * (kind in _LAST)), *(["of"] * (kind not in _ALWAYS))]
    if len(given) < len(settings) or not set(given) <= set(allowed):
        raise ConfigError(f"fault plan, settings in {text!r}", ":".join(settings), ", ".join(allowed) + "; each once")
    if ("p" in given) == ("nth" in given) or ("s" in given) != (kind in _LAST):
        needed = "p or nth" + ", and s" * (kind in _LAST)
        raise ConfigError(f"fault plan, settings in {text!r}", ":".join(settings), needed)
    if given.get("of", "pages") not in _CHOICES:
        raise ConfigError(f"fault plan, of in {text!r}", given["of"], ", ".join(_CHOICES))
    return FaultRule(
        kind,
        p=positive(text, given, "p", float, most=1.0),
        nth=positive(text, given, "nth", int),
        delay_s=positive(text, given, "s", float),
        of=_ALWAYS.get(kind, cast(Of, given.get("of", "pages"))),
    )


def positive(rule: str, given: dict[str, str], key: str, make: Callable[[str], N], most: float = math.inf) -> N:
    """What a rule sets, 0 if it isn't there. Raises `ConfigError` for what is no number above 0, or above `most`."""
    if key not in given:
        return make("0")
    allowed = f"above 0 and at most {most:g}"
    number = _number(f"fault plan, {key} in {rule!r}", given[key], make, allowed)
    if not 0 < number <= most:
        raise ConfigError(f"fault plan, {key} in {rule!r}", given[key], allowed)
    return number


def _number(what: str, text: str, make: Callable[[str], N], allowed: str) -> N:
    try:
        number = make(text)
    except ValueError:
        raise ConfigError(what, text, allowed) from None
    if not number >= 0:
        raise ConfigError(what, text, allowed)
    return number
