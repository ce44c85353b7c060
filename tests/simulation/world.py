"""A world of processes on one virtual clock: each has an event loop of its own, one seeded schedule runs them all.

Guarantees: the same seed gives the same run, callback by callback, whatever the hash seed or the addresses of objects;
within a process callbacks run in the order in which they were made ready, as asyncio promises, and between processes
in an order that the seed draws; time passes only when nobody has anything to do; a process that is dead runs nothing
any more, not even its `finally` clauses, and one that is stopped runs nothing until it goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NoReturn

import xxhash

from pdkv.node.flow import _begun as begun_for_good

LATE_S = 1e-7
"""How long after its time a timer goes off."""


class Killed(BaseException):
    """Raised in a process at the point where it dies, so that the step which runs goes no further."""


class Violation(AssertionError):
    """A law is broken."""


class Handle:
    """Of a callback that is ready or waits for its time; what asyncio's own handles do for their callers."""

    __slots__ = ("_cancelled", "_when", "args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Any, when: float) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


class Step(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on where it lies in memory."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: Process, name: str, context: Any) -> None:
        self.serial = loop.world.next_serial()
        super().__init__(coroutine, loop=loop, name=name or str(self.serial), context=context)

    def __hash__(self) -> int:
        return self.serial


class Process(asyncio.AbstractEventLoop):
    """The event loop of one process. Its clock is the world's plus what it jumped."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.ahead_s = 0.0
        self.dead = False
        self.stopped_until = 0.0
        self.missed_s = 0.0
        """So long it stood still, or its clock left out, since its beginning."""
        self.ready: deque[Handle] = deque()
        self._queued = False
        self.pending: dict[Step, None] = {}
        """Tasks that are not done."""
        self._forget = self.pending.pop
        world.processes.append(self)

    # --- what asyncio asks of a loop ------------------------------------------------------------------------------

    def time(self) -> float:
        return self.world.now + self.ahead_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        if callback is self._forget:  # each task has that one: it needn't wait for its turn
            callback(*args)
            return None
        handle = Handle(callback, args, copy_context() if context is None else context, 0.0)
        if not self.dead:
            self.ready.append(handle)
            if not self._queued and self.stopped_until <= self.world.now:
                self._queued = True
                self.world.runnable.append(self)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, copy_context() if context is None else context, when)
        if not self.dead:
            # a little late: the sum of two floats must not say afterwards that the time has not come
            self.world.push(when - self.ahead_s + LATE_S, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = Step(coro, self, name or "", context)
        self.pending[task] = None
        task.add_done_callback(self._forget)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead

    def _timer_handle_cancelled(self, handle: Handle) -> None:
        """The heap drops it when its time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.world.broken(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    # --- what happens to a process --------------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._queued and self.ready and self.stopped_until <= self.world.now:
            self._queued = True
            self.world.runnable.append(self)

    def run(self) -> None:
        """What is ready now; what that makes ready has to wait for its turn."""
        ready, world = self.ready, self.world
        if world.running is not self:
            world.runs(self)
        for _ in range(len(ready)):
            if not ready or self.stopped_until > world.now:
                break
            handle = ready.popleft()
            if not handle._cancelled:
                handle.context.run(handle.callback, *handle.args)
        self._queued = False
        if ready:
            self.wake()

    def kill(self) -> None:
        self.dead = True
        self.ready.clear()
        for task in self.pending:
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # or it would be told of as forgotten

    def stop_for(self, seconds: float) -> None:
        goes_on = max(self.stopped_until, self.world.now)
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        self.missed_s += self.stopped_until - goes_on
        self.world.after(seconds + 1e-9, self.wake)

    def jump(self, seconds: float) -> None:
        """Its clock goes forward at once: timers that are due then are due now."""
        self.ahead_s += seconds
        self.missed_s += seconds
        self.world.hasten(self, seconds)


class World:
    """The clock, the schedule, and the record of what happened."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.random = random.Random(f"schedule of {seed}")
        self.now = 0.0
        self.processes: list[Process] = []
        self.runnable: list[Process] = []
        self._timers: list[tuple[float, int, Process | None, Handle]] = []
        self._serial = 0
        self._digest = xxhash.xxh3_64()
        self._keep_log = keep_log
        self.log: list[str] = []
        self.broken_law = ""
        self.running: Process | None = None
        """Whose callback runs now."""

    def runs(self, process: Process | None) -> None:
        self.running = process
        events._set_running_loop(process)

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def push(self, when: float, process: Process | None, handle: Handle) -> None:
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, process, handle))

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Outside of any process: networks, DMA engines, threads, faults."""
        when = self.now + seconds
        handle = Handle(callback, args, None, when)
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, None, handle))
        return handle

    def hasten(self, process: Process, seconds: float) -> None:
        self._timers[:] = [
            (when - seconds if of is process else when, serial, of, handle) for when, serial, of, handle in self._timers
        ]
        heapq.heapify(self._timers)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def note(self, *words: str, aside: object = "") -> None:
        """What happened, for the digest that two runs of a seed must agree on; `aside` is for the log alone, and may
        hold what is random in each run, such as the id of a lease."""
        line = f"{self.now:.6f} {' '.join(words)}"
        self._digest.update(line.encode())
        if self._keep_log:
            self.log.append(f"{line} {aside}")

    def broken(self, law: str) -> None:
        """The first law that is broken ends the run; where there is a step to end, at once."""
        if not self.broken_law:
            self.broken_law = law
            self.note("BROKEN", aside=law)

    def require(self, holds: object, law: str) -> None:
        if not holds:
            self.fail(law)

    def fail(self, law: str) -> NoReturn:
        """As `require`, where what would be said of each page that is right takes longer than looking at it."""
        self.broken(law)
        raise Violation(law)

    @property
    def digest(self) -> str:
        return f"{self._digest.intdigest():016x}"

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """True once `until()` holds, False at time `limit_s`, or when a law is broken."""
        runnable, timers, drawn = self.runnable, self._timers, self.random.random
        try:
            while not self.broken_law:
                if runnable:
                    process: Process | None = runnable.pop(int(drawn() * len(runnable)) if len(runnable) > 1 else 0)
                    if not process.dead:
                        process.run()
                    continue
                if until():
                    return True
                if not timers or timers[0][0] > limit_s:
                    self.now = max(self.now, limit_s)
                    return False
                when, _, process, handle = heapq.heappop(timers)
                if handle._cancelled:
                    continue
                if when > self.now:
                    self.now = when
                if process is None:
                    if self.running is not None:
                        self.runs(None)
                    handle.callback(*handle.args)
                elif not process.dead:
                    process.ready.append(handle)
                    if not process._queued:
                        process.wake()
            return False
        finally:
            self.runs(None)

    def end(self) -> None:
        """Nobody lives any more. What was half-way is closed now, and not whenever garbage is looked for."""
        for process in self.processes:
            process.kill()
        for task in [task for process in self.processes for task in process.pending]:
            begun_for_good.discard(task)
            coroutine: Any = task.get_coro()
            with suppress(Exception, Killed):  # clauses that wait for what never comes
                coroutine.close()
