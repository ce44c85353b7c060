"""Keeps a fleet's nodes alive, and sees to it that they die: at stages of a request's life, and at random times.

Guarantees: a node that has died serves again under its name and address, as a new incarnation; a node that was stopped
is continued; every death that nobody ordered is noted as a fault of the product.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.signals import ending
from pdkv.cli.soak.aims import AT_ANY_TIME, Aims
from pdkv.cli.soak.report import SoakReport
from pdkv.cli.soak.traffic import CHUNK_TOKENS

LEASE_TTL_S = 5.0
READ_DEADLINE_S = 4.0
FENCE_AFTER_S = 3.0
STOPPED_S = (0.5, 8.0)
"""Shorter and longer than a lease."""
KILL_SHARE = 0.6
"""Of the faults from outside; the others stop a node."""
MEASURED_SHARE = 0.75
"""Of those that come while all nodes are well: a prefill node dies, which is when a recovery can be measured."""
Flags = dict[str, str | int | bool]


@dataclass
class Post:
    """A node's place in the fleet; processes come and go in it."""

    role: str
    name: str
    address: str
    flags: Flags
    process: NodeProcess | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    lives: int = 0
    stopped: bool = False

    @property
    def well(self) -> bool:
        return self.serving.is_set() and not self.stopped


class Keeper:
    """`disturbed` is called when a node has died or was stopped; then `lost`, if that was a prefill node's death
    and all others were well."""

    def __init__(self, fleet: Nursery, report: SoakReport, seed: int, *, pool_pages: int, say: Callable[[str], None]):
        self._fleet = fleet
        self._report = report
        self._say = say
        self._rng = Random(f"{seed} faults")
        self._aims = Aims(report.faults, self._rng)
        self._loop_tasks: set[asyncio.Task[None]] = set()
        self.lost: Callable[[], None] = lambda: None
        self.disturbed: Callable[[], None] = lambda: None
        self.at_peace = False
        """No faults any more: what dies now has failed."""
        prefills = [Post("prefill", f"p{i}", free_address(), {}) for i in range(2)]
        known = ",".join(post.address for post in prefills)
        decodes = [Post("decode", f"d{i}", free_address(), {}) for i in range(2)]
        common: Flags = {"model": "tiny", "threads": 1, "insecure": True, "pool_pages": pool_pages, "drain_grace_s": 15}
        for post in prefills:
            post.flags = {**common, "chunk_tokens": CHUNK_TOKENS, "lease_ttl_s": str(LEASE_TTL_S)}
            post.flags["borrow_s"] = str(READ_DEADLINE_S)
        for post, other, preempt in zip(decodes, reversed(decodes), ("offload", "recompute"), strict=True):
            post.flags = {**common, "preempt": preempt, "prefill_addresses": known, "source_addresses": other.address}
            post.flags |= {"read_deadline_s": str(READ_DEADLINE_S), "fence_after_s": str(FENCE_AFTER_S)}
            post.flags |= {"lease_ttl_s": str(LEASE_TTL_S), "borrow_s": str(READ_DEADLINE_S)}
            post.flags["recompute_chunk_tokens"] = CHUNK_TOKENS
            post.flags["no_cache_answers"] = True  # pages of steps of one token differ in bits
        for post in (*prefills, *decodes):
            post.flags |= {"bind": post.address, "allow_fault_injection": True}
        self.prefills, self.decodes = tuple(prefills), tuple(decodes)
        self.router = Post("router", "r0", free_address(), {})
        self.router.flags = {
            "insecure": True,
            "bind": self.router.address,
            "prefill_addresses": known,
            "decode_addresses": ",".join(post.address for post in decodes),
        }

    @property
    def nodes(self) -> tuple[Post, ...]:
        return (*self.prefills, *self.decodes)

    async def keep(self, post: Post) -> None:
        """Runs for the soak's life: a process after the other."""
        while True:
            flags = dict(post.flags)
            if post.role != "router" and not self.at_peace:
                flags["fault_plan"] = self._aims.plan(post.role)
            process = await self._fleet.start(post.role, post.name, flags, lambda line: self._heard(post, line))
            post.process, post.lives, post.stopped = process, post.lives + 1, False
            post.serving.set()
            self._report.restarts += post.lives > 1
            code = await process.wait()
            post.serving.clear()
            if code != -signal.SIGKILL or self.at_peace:
                self._report.unclean_exits += 1
                self._report.notes.append(f"{post.name} ended by itself with {code}: {self._last_words(post)}")
            else:
                self._report.kills += 1
                self.disturbed()
                if post.role == "prefill" and all(other.well for other in self.nodes if other is not post):
                    self.lost()
            self._say(f"{post.name} is gone ({code})")

    async def harass(self, every_s: float) -> None:
        """Runs until it is cancelled: kills or stops one node after the other, at times that the seed draws."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / every_s))
            measured = all(post.well for post in self.nodes) and self._rng.random() < MEASURED_SHARE
            post = self._rng.choice(self.prefills if measured else self.nodes)
            if post.process is None or not post.serving.is_set():
                continue
            if measured or self._rng.random() < KILL_SHARE:
                self._report.faults["kill", AT_ANY_TIME] += 1
                post.process.kill()
            else:
                self._report.faults["stop", AT_ANY_TIME] += 1
                post.process.signal(signal.SIGSTOP)
                self._stopped(post, post.process)

    def make_peace(self) -> None:
        """No fault from here on, and everybody who was stopped goes on."""
        self.at_peace = True
        for post in self.nodes:
            if post.process is not None:
                post.process.signal(signal.SIGCONT)

    async def end(self) -> None:
        """Tell every node to end; one that doesn't do it by itself, cleanly, is counted."""
        for post in (self.router, *self.nodes):
            if post.process is not None:
                await post.process.stop()
                if (code := await post.process.wait()) != 0:
                    self._report.unclean_exits += 1
                    self._report.notes.append(f"{post.name} {ending(code)} when told to end: {self._last_words(post)}")

    def _heard(self, post: Post, line: str) -> None:
        """A node says which fault it is about to suffer, on a line of its own."""
        if not line.startswith('{"fault"'):
            return
        said = json.loads(line)
        self._report.faults[said["fault"], said.get("stage", AT_ANY_TIME)] += 1
        if said["fault"] == "stop" and post.process is not None:
            self._stopped(post, post.process)

    def _stopped(self, post: Post, process: NodeProcess) -> None:
        self._report.stops += 1
        post.stopped = True
        self.disturbed()
        self._say(f"{post.name} is stopped")
        task = asyncio.create_task(self._continue(post, process, self._rng.uniform(*STOPPED_S)))
        self._loop_tasks.add(task)
        task.add_done_callback(self._loop_tasks.discard)

    async def _continue(self, post: Post, process: NodeProcess, after_s: float) -> None:
        await asyncio.sleep(after_s)
        process.signal(signal.SIGCONT)
        post.stopped &= post.process is not process

    def _last_words(self, post: Post) -> str:
        lines = self._fleet.log(post.name).read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])


def free_address() -> str:
    """Of a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
