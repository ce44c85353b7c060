"""Takes pages from a running request for the one at the head of the queue, and gives it others later.

Guarantees: only a request that decodes is retracted, between two steps, when nothing is written to its pages; the
youngest first, none more than `MAX_PREEMPTIONS` times, and nobody unless the retracted ones together make enough room.
It comes back with the bytes that it had, from host memory and proved by their digests, or computed again from its
tokens in the same shapes; so it goes on with the token that it would have said. Pages that its prompt left in the tree
are hit like any others. A retracted request takes no page from a running one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from pdkv.errors import CapacityError, ConfigError
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.offload import HostCopy, HostStore, freed_by_end, require_retractable
from pdkv.node.answer import Answer
from pdkv.node.base import NodeParts
from pdkv.node.prompt import Prompt
from pdkv.node.queue import AdmissionQueue, Ask

MAX_PREEMPTIONS = 3
"""Of one request."""
RECOMPUTE_TOKENS = 512
"""Most tokens of one step, where prefill's chunks don't say another number."""


class PreemptPolicy(StrEnum):
    NONE = "none"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(eq=False, slots=True)
class Runner:
    """A request that decodes."""

    prompt: Prompt
    ask: Ask
    reservation: Reservation
    answer: Answer
    chunk_starts: tuple[int, ...]
    """Of prefill."""
    said: list[int] = field(default_factory=list)
    age: int = 0
    """The highest number is the youngest."""
    preempted: int = 0
    asked: bool = False
    """To give way before its next step."""
    copy: HostCopy | None = None
    """Of its pages, while it has none."""

    @property
    def tokens(self) -> UInt32Array:
        """uint32: prompt and answer."""
        return np.concatenate((self.prompt.tokens, np.array(self.said, np.uint32)))


class Preemption:
    """Who runs on a node, and who has to give way."""

    def __init__(self, parts: NodeParts, queue: AdmissionQueue, policy: PreemptPolicy, offload_bytes: int) -> None:
        """Raises `ConfigError` for offload in a group: the other ranks' pages would stay where they are."""
        if policy is PreemptPolicy.OFFLOAD and parts.barrier is not None:
            raise ConfigError("preempt", policy.value, "none or recompute in a group of ranks")
        self.store = HostStore(parts.pool, offload_bytes)
        self.preemptions = 0
        """So far, of all requests."""
        self._parts = parts
        self._queue = queue
        self._policy = policy
        self._running: list[Runner] = []
        self._begun = 0
        if policy is not PreemptPolicy.NONE:
            queue.make_room = self.make_room

    @contextmanager
    def running(self, runner: Runner) -> Iterator[None]:
        """From its first token to its last; however it ends, its pages are given back."""
        self._begun += 1
        runner.age = self._begun
        self._running.append(runner)
        try:
            yield
        finally:
            if runner in self._running:
                self._running.remove(runner)
            self._parts.manager.end(runner.reservation)

    def holds(self, runner: Runner) -> bool:
        """It has its pages, and all of its rows are in them."""
        return runner in self._running

    def make_room(self, short_pages: int) -> bool:
        """Ask as many to give way as it takes for `short_pages`; nobody if it takes more than there are. True if some
        are on their way out now."""
        manager = self._parts.manager
        leaving = [runner for runner in self._running if runner.asked]
        missing = short_pages - sum(freed_by_end(manager, runner.reservation) for runner in leaving)
        chosen: list[Runner] = []
        for runner in sorted(self._running, key=lambda runner: -runner.age):
            if missing <= 0:
                break
            if not runner.asked and runner.preempted < MAX_PREEMPTIONS:
                chosen.append(runner)
                missing -= freed_by_end(manager, runner.reservation)
        if missing <= 0:
            for runner in chosen:
                runner.asked = True
            return bool(leaving or chosen)
        return bool(leaving)

    async def give_way(self, runner: Runner) -> None:
        """Give the pages back, wait for others, and bring back what was in them. Called between two steps.

        If host memory has no room for it the request keeps its pages and goes on. Raises as `AdmissionQueue.admit`, and
        what the way back raises.
        """
        manager = self._parts.manager
        if not len(self._queue):  # whoever it was for has gone
            runner.asked = False
            return
        try:
            require_retractable(manager, runner.reservation)
            if self._policy is PreemptPolicy.OFFLOAD:
                try:
                    await self._parts.digests.run(self._save, runner)
                except CapacityError:
                    runner.preempted = MAX_PREEMPTIONS
                    runner.asked = False
                    self._queue.retry()
                    return
            runner.asked = False
            runner.preempted += 1
            self.preemptions += 1
            self._running.remove(runner)
            manager.end(runner.reservation)
            recorded = len(runner.prompt.hashes)
            runner.reservation = await self._queue.admit(
                replace(runner.ask, max_hit_pages=recorded, drop_pages=0), again=True
            )
            await self._come_back(runner, runner.copy)
            self._running.append(runner)
        finally:
            if runner.copy is not None:
                self.store.drop(runner.copy)
                runner.copy = None

    def _save(self, runner: Runner) -> None:
        """Kept with the runner in the thread itself: whoever waits for the thread may be cancelled meanwhile."""
        place = runner.answer.place
        pages = runner.reservation.sequence[: -(-place // runner.prompt.page_tokens)]
        runner.copy = self.store.save(pages, place)

    async def _come_back(self, runner: Runner, copy: HostCopy | None) -> None:
        """Fill the new pages up to the answer's place, and make them what the old ones were."""
        parts, prompt, reservation = self._parts, runner.prompt, runner.reservation
        reservation.public = prompt.public
        hit, recorded, sequence = len(reservation.hit), prompt.recorded_pages, reservation.sequence
        if copy is None:
            await self._compute(runner, hit * prompt.page_tokens)
        else:
            await parts.digests.run(self.store.load, copy, hit, sequence[hit : copy.pages])
        if hit < recorded:
            new, hashes = sequence[hit:recorded], prompt.hashes.part(hit, recorded)
            if copy is None:
                verified = await parts.digests.run(parts.verifier.seal, reservation.id, hit, new, hashes)
            else:
                arrival = Arrival(reservation.id, hit, new, hashes, copy.digests[hit:recorded])
                verified = await parts.digests.run(parts.verifier.verify, arrival)
            parts.manager.commit(verified)
            if parts.barrier:
                await parts.barrier()
        parts.manager.take_private(reservation, sequence[recorded:])
        runner.answer.pages = sequence

    async def _compute(self, runner: Runner, start: int) -> None:
        """Rows from `start` to the answer's place, in the shapes in which they were computed first: the prompt in
        prefill's chunks, as far as they are known, the answer token by token."""
        prompt, tokens, pages = runner.prompt, runner.tokens, runner.reservation.sequence
        for span in spans(start, len(prompt.tokens), runner.answer.place, runner.chunk_starts):
            await self._parts.steps.run(self._step, tokens, span, len(prompt.tokens), pages)

    def _step(self, tokens: UInt32Array, span: slice, prompt_tokens: int, pages: LocalPages) -> None:
        """One span, with its draft rows where the pages have some. Runs in the engine's thread."""
        engine, drafter = self._parts.engine, self._parts.drafter
        run = engine.verify if span.start >= prompt_tokens else engine.chunk
        computed = run(tokens[span], span.start, pages)
        if drafter is not None and self._parts.contract.draft_layers:
            drafter.extend(computed.hidden, tokens[span.start + 1 : span.stop + 1], span.start, pages)


def spans(start: int, prompt_tokens: int, stop: int, chunk_starts: tuple[int, ...]) -> list[slice]:
    """[start, stop) in steps that end where a chunk of the prompt began, and where the prompt ends."""
    longest = max((b - a for a, b in pairwise(chunk_starts)), default=RECOMPUTE_TOKENS)
    edges = [edge for edge in (*chunk_starts, prompt_tokens, stop) if start < edge <= stop]
    found: list[slice] = []
    for edge in edges:
        while start < edge:
            found.append(slice(start, min(start + longest, edge)))
            start = found[-1].stop
    return found
