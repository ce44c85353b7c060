"""What goes wrong, and when: faults aimed at the stages of a request's life.

Guarantees: a plan is drawn from its seed before the run begins, so that a changed product meets the same plan; a fault
is counted where it was injected, by kind and stage; every kind can be injected at every stage.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdkv.errors import CapacityError
from pdkv.ids import PageHashes, RequestId
from pdkv.node.stages import Stage
from tests.simulation.fabric import ReadFault
from tests.simulation.garbage import Garbage
from tests.simulation.network import KEEPALIVE_S
from tests.simulation.nodes import Fleet, Life
from tests.simulation.world import Killed

GRACE_S = 4.0
"""Of a drain."""
RARE = (Stage.RENEWED, Stage.PULLING, Stage.PULLED, *2 * (Stage.LENT,), *4 * (Stage.RECOMPUTING,))
"""Stages that few requests reach: aimed at more often, and most often at those that the fewest reach."""
PULLS = (Stage.PULLING, Stage.PULLED)


@dataclass(frozen=True, slots=True)
class Planned:
    """The fault `kind` when `stage` is reached for the `nth` time, anywhere."""

    kind: str
    stage: Stage
    nth: int


def draw(rng: random.Random, count: int) -> list[Planned]:
    kinds, stages = sorted(KINDS), [*Stage, *RARE]
    plan = []
    for _ in range(count):
        stage = rng.choice(stages)
        plan.append(Planned(rng.choice(kinds), stage, 1 if stage in RARE else 1 + int(rng.expovariate(0.5))))
    return plan


class Faults:
    """Carries a plan out."""

    def __init__(self, fleet: Fleet, plan: list[Planned]) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self.hits: Counter[tuple[str, str]] = Counter()
        self.abort: Callable[[Life, RequestId], None] = lambda life, request: None
        """Lets the client of a request go."""
        self.peer_of: Callable[[Life, RequestId], str] = lambda life, request: ""
        """The other node of a request."""
        self.garbage = Garbage(self.world)
        self.calm = False
        """No more faults."""
        self._plan = {(p.stage, p.nth): p.kind for p in plan}
        self._reached: Counter[Stage] = Counter()
        self._pulls = False
        """The stage is one at which prefill reads from decode."""

    def at(self, life: Life, stage: Stage, request: RequestId) -> None:
        """A stage is reached."""
        if self.calm:
            return
        self._reached[stage] += 1
        kind = self._plan.get((stage, self._reached[stage]))
        if kind is None:
            return
        self.hits[kind, stage.value] += 1
        self.world.note("fault", kind, life.process.name, stage.value, request)
        lends = {"d0": "d1", "d1": "d0"}.get(life.process.name, "") if stage is Stage.LENT else ""
        peer = self.fleet.lives[lends or self.peer_of(life, request)]
        self._pulls = stage in PULLS
        KINDS[kind](self, life, peer, request)

    # --- processes ------------------------------------------------------------------------------------------------

    def kill(self, life: Life, peer: Life, request: RequestId) -> None:
        self._kill(life)
        raise Killed

    def kill_peer(self, life: Life, peer: Life, request: RequestId) -> None:
        self._kill(peer)

    def stop(self, life: Life, peer: Life, request: RequestId) -> None:
        seconds = self.world.random.choice((0.05, 0.4, 2.0, KEEPALIVE_S + 3.0))
        life.process.stop_for(seconds)
        self.fleet.network.stopped(life.process.name, seconds)

    def stop_peer(self, life: Life, peer: Life, request: RequestId) -> None:
        self.stop(peer, life, request)

    def clock_jump(self, life: Life, peer: Life, request: RequestId) -> None:
        life.process.jump(self.world.random.choice((0.3, 2.0, 30.0)))

    def clock_jump_peer(self, life: Life, peer: Life, request: RequestId) -> None:
        self.clock_jump(peer, life, request)

    def slow_steps(self, life: Life, peer: Life, request: RequestId) -> None:
        for worker in life.workers:
            worker.executor.slow_until = self.world.now + 1.5

    def bad_logits(self, life: Life, peer: Life, request: RequestId) -> None:
        life.parts.engine.bad_logits += 1

    def drain(self, life: Life, peer: Life, request: RequestId) -> None:
        """As by SIGTERM: what runs may end, new requests are refused; then the next life begins."""
        if not life.node.source.draining:
            life.process.create_task(self._drained(life))

    def drain_peer(self, life: Life, peer: Life, request: RequestId) -> None:
        if peer.alive and peer.node is not None:
            self.drain(peer, life, request)

    def compact(self, life: Life, peer: Life, request: RequestId) -> None:
        """Low pages are kept from requests for a while, so that cached ones are moved there, on both nodes."""
        for one in (life, peer):
            one.process.call_soon(self._compact, one, self.world.between(0.02, 0.3))

    def other_weights(self, life: Life, peer: Life, request: RequestId) -> None:
        """The peer's next life has another model, until the faults are over."""
        self._kill(peer, weights="others")

    # --- links ----------------------------------------------------------------------------------------------------

    def partition(self, life: Life, peer: Life, request: RequestId) -> None:
        """Of calls and reads, or of either of them."""
        seconds = self.world.random.choice((0.1, 1.0, 4.0, KEEPALIVE_S + 2.0))
        ends, what = (life.process.name, peer.process.name), self.world.random.randrange(3)
        if what != 1:
            self.fleet.network.cut(*ends, seconds)
        if what != 2:
            self.fleet.fabric.cut(*ends, seconds)

    def half_open(self, life: Life, peer: Life, request: RequestId) -> None:
        seconds = self.world.random.choice((0.1, 1.0, 4.0, KEEPALIVE_S + 2.0))
        ends = [life.process.name, peer.process.name]
        self.world.random.shuffle(ends)
        self.fleet.network.cut(ends[0], ends[1], seconds, both=False)

    def drop(self, life: Life, peer: Life, request: RequestId) -> None:
        a, b = life.process.name, peer.process.name
        self.fleet.network.link(*((a, b) if self.world.chance(0.5) else (b, a))).drop += 1

    def duplicate(self, life: Life, peer: Life, request: RequestId) -> None:
        a, b = life.process.name, peer.process.name
        self.fleet.network.link(a, b).duplicate += 1
        self.fleet.network.link(b, a).duplicate += 1

    def reorder(self, life: Life, peer: Life, request: RequestId) -> None:
        for a, b in ((life, peer), (peer, life)):
            self.fleet.network.link(a.process.name, b.process.name).reorder_until = self.world.now + 2.0

    def delay(self, life: Life, peer: Life, request: RequestId) -> None:
        until = self.world.now + self.world.between(0.5, 4.0)
        for a, b in ((life, peer), (peer, life)):
            self.fleet.network.link(a.process.name, b.process.name).slow_until = until

    def lease_calls_lost(self, life: Life, peer: Life, request: RequestId) -> None:
        until = self.world.now + self.world.between(0.5, 2.0) * self.fleet.shape.lease_ttl_s
        for a, b in ((life, peer), (peer, life)):
            self.fleet.network.link(a.process.name, b.process.name).lose_leases_until = until

    # --- reads ----------------------------------------------------------------------------------------------------

    def rail_down(self, life: Life, peer: Life, request: RequestId) -> None:
        """Of a node that reads or is read from, in the middle of its next read or at once."""
        some = self.world.random.choice((life, peer))
        name, rail = some.process.name, int(self.world.random.random() * self.fleet.shape.rails[some.role])
        seconds = self.world.random.choice((0.2, 1.0, 4.0, 12.0))
        cut = partial(self.fleet.fabric.cut_rail, name, rail, seconds)
        if self.world.chance(0.5):
            cut()
        else:
            self.fleet.fabric.amid[self._reader(life, peer).process.name] = cut

    def read_fails(self, life: Life, peer: Life, request: RequestId) -> None:
        self._script(life, peer, ReadFault("fail"))

    def read_lost(self, life: Life, peer: Life, request: RequestId) -> None:
        self._script(life, peer, ReadFault("lose"))

    def read_late(self, life: Life, peer: Life, request: RequestId) -> None:
        self._script(life, peer, ReadFault("late", self.fleet.shape.read_deadline_s + self.world.between(0.1, 6.0)))

    def read_hangs(self, life: Life, peer: Life, request: RequestId) -> None:
        self._script(life, peer, ReadFault("hang"))

    def rows_late(self, life: Life, peer: Life, request: RequestId) -> None:
        late_s = self.fleet.shape.read_deadline_s + self.world.between(0.1, 6.0)
        self._script(life, peer, ReadFault("late", late_s, of_rows=True))

    def rows_lost(self, life: Life, peer: Life, request: RequestId) -> None:
        """Probes' too: there are more of them."""
        for _ in range(self.world.random.choice((1, 4))):
            self._script(life, peer, ReadFault("lose", of_rows=True))

    def corrupt_main(self, life: Life, peer: Life, request: RequestId) -> None:
        """Sometimes twice, so that reading again doesn't help."""
        for _ in range(self.world.random.choice((1, 1, 3))):
            self._script(life, peer, ReadFault("corrupt-main"))

    def corrupt_index(self, life: Life, peer: Life, request: RequestId) -> None:
        for _ in range(self.world.random.choice((1, 1, 3))):
            self._script(life, peer, ReadFault("corrupt-index"))

    def slow_reads(self, life: Life, peer: Life, request: RequestId) -> None:
        for some in (life, peer):
            self.fleet.fabric.slow_until[some.process.name] = self.world.now + 2.0

    # --- what a prefill node has and says ---------------------------------------------------------------------------

    def stale(self, life: Life, peer: Life, request: RequestId) -> None:
        """Slow reads, and under them the source's leases end and its pages go to somebody else; its word comes late.
        Where decode is the source, its request is the lease."""
        self.slow_reads(life, peer, request)
        reader = self._reader(life, peer)
        source = peer if reader is life else life
        if self._pulls:
            self.fleet.fabric.amid[reader.process.name] = partial(self._reclaim, source, request)
            return
        self.fleet.network.link(source.process.name, reader.process.name).slow_until = self.world.now + 3.0
        self.fleet.network.link(reader.process.name, source.process.name).lose_leases_until = self.world.now + 3.0
        self.fleet.fabric.amid[reader.process.name] = partial(self._reuse, source)

    def lease_expiry(self, life: Life, peer: Life, request: RequestId) -> None:
        source = _prefill_of(life, peer)
        source.process.jump(self.fleet.shape.lease_ttl_s * 1.01)

    def exhaust(self, life: Life, peer: Life, request: RequestId) -> None:
        self._exhaust(life, self.world.between(0.1, 3.0))

    def exhaust_peer(self, life: Life, peer: Life, request: RequestId) -> None:
        self._exhaust(peer, self.world.between(0.1, 3.0))

    def garbage_words(self, life: Life, peer: Life, request: RequestId) -> None:
        """Of prefill's announcements, or of what decode offers."""
        self.garbage.next_from(self.world.random.choice((life, peer)), self.garbage.pages)

    def wrong_account(self, life: Life, peer: Life, request: RequestId) -> None:
        self.garbage.next_from(_prefill_of(life, peer), self.garbage.account)

    def garbage_metadata(self, life: Life, peer: Life, request: RequestId) -> None:
        """Of a node that begins a new life: its first introductions are damaged."""
        self.garbage.next_from(peer, self.garbage.intro)
        self._kill(peer)

    def abort_request(self, life: Life, peer: Life, request: RequestId) -> None:
        self.abort(life, request)

    # --- how ------------------------------------------------------------------------------------------------------

    def _kill(self, life: Life, weights: str = "simulated") -> None:
        if life.alive:
            self.fleet.kill(life)
            self.world.after(self.world.between(0.02, 2.0), self._restart, life.process.name, weights)

    def _restart(self, name: str, weights: str) -> None:
        if not self.fleet.lives[name].alive:
            self.fleet.start(name, "simulated" if self.calm else weights)

    async def _drained(self, life: Life) -> None:
        try:
            async with asyncio.timeout(GRACE_S):
                await life.node.drain()
        except TimeoutError:
            self.world.note("drain", life.process.name, "was cut short")
        self._kill(life)

    def _script(self, life: Life, peer: Life, fault: ReadFault) -> None:
        self.fleet.fabric.script(self._reader(life, peer).process.name, fault)

    def _reader(self, life: Life, peer: Life) -> Life:
        return life if self._pulls or life.role == "decode" else peer

    def _reclaim(self, source: Life, request: RequestId) -> None:
        """A request of the decode node ends, and soon others have its pages."""
        if source.alive and not self.calm:
            self.abort(source, request)
            self.world.after(0.005, self._exhaust, source, 0.2)

    def _reuse(self, source: Life) -> None:
        if source.alive and not self.calm:
            source.process.jump(self.fleet.shape.lease_ttl_s * 1.01)
            self.world.after(0.001, self._exhaust, source, 0.2)

    def _exhaust(self, life: Life, seconds: float) -> None:
        life.process.call_soon(self._hoard, life, seconds)

    def _hoard(self, life: Life, seconds: float) -> None:
        """Everything that can be had is somebody else's for a while, who writes to it."""
        self._taken(life, life.manager.census()["free"] + life.manager.tree.evictable, seconds, lambda: None)

    def _compact(self, life: Life, seconds: float) -> None:
        def compact() -> None:
            life.process.create_task(life.node.compact())

        self._taken(life, min(life.manager.census()["free"], 4), seconds, compact)

    def _taken(self, life: Life, amount: int, seconds: float, then: Callable[[], None]) -> None:
        """So many pages are somebody else's for a while."""
        if not amount:
            return
        try:
            reservation = life.manager.reserve(PageHashes(), amount, max_hit_pages=0)
        except CapacityError:
            return
        life.pool.zero(reservation.pages)

        def give_back() -> None:
            life.manager.end(reservation)
            then()

        life.process.call_later(seconds, give_back)


def _prefill_of(life: Life, peer: Life) -> Life:
    return life if life.role == "prefill" else peer


KINDS: dict[str, Callable[[Faults, Life, Life, RequestId], None]] = {
    "kill": Faults.kill,
    "kill-peer": Faults.kill_peer,
    "stop": Faults.stop,
    "stop-peer": Faults.stop_peer,
    "clock-jump": Faults.clock_jump,
    "clock-jump-peer": Faults.clock_jump_peer,
    "drain": Faults.drain,
    "drain-peer": Faults.drain_peer,
    "compact": Faults.compact,
    "other-weights": Faults.other_weights,
    "slow-steps": Faults.slow_steps,
    "bad-logits": Faults.bad_logits,
    "partition": Faults.partition,
    "half-open": Faults.half_open,
    "drop": Faults.drop,
    "duplicate": Faults.duplicate,
    "reorder": Faults.reorder,
    "delay": Faults.delay,
    "lease-calls-lost": Faults.lease_calls_lost,
    "rail-down": Faults.rail_down,
    "read-fails": Faults.read_fails,
    "read-lost": Faults.read_lost,
    "read-late": Faults.read_late,
    "read-hangs": Faults.read_hangs,
    "rows-late": Faults.rows_late,
    "rows-lost": Faults.rows_lost,
    "corrupt-main": Faults.corrupt_main,
    "corrupt-index": Faults.corrupt_index,
    "slow-reads": Faults.slow_reads,
    "stale": Faults.stale,
    "lease-expiry": Faults.lease_expiry,
    "exhaust": Faults.exhaust,
    "exhaust-peer": Faults.exhaust_peer,
    "garbage-words": Faults.garbage_words,
    "wrong-account": Faults.wrong_account,
    "garbage-metadata": Faults.garbage_metadata,
    "abort": Faults.abort_request,
}
