"""Structured waiting: an event stream with an owner, a worker thread whose steps always end, named deadlines.

Guarantees: when a stream is closed, cancelled or fails, the task behind it has *ended* before control returns, so
whatever it held is given back; a step that runs in a thread is never abandoned, since it may still write into pages.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from pdkv.errors import BoundsError, DeadlineExceeded, PdkvError, RequestCancelled

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


async def settle(future: asyncio.Future[Any], *, told: bool = False) -> None:
    """Wait until `future` has ended, in whatever way, however often the caller is cancelled meanwhile.

    Raises `asyncio.CancelledError` afterwards if the caller was cancelled; never what the future holds, which counts as
    heard then, and is logged if it is a bug that nobody was `told` of: nobody waits for it any more.
    """
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    _heard(future, told=told)
    if cancelled:
        raise asyncio.CancelledError


async def streamed(run: Callable[[Callable[[T], None]], Awaitable[None]]) -> AsyncGenerator[T, None]:
    """Yield what `run(emit)` emits. `run` goes on while the consumer is busy; its error is raised after its events.

    Raises `RequestCancelled` if `run` was cancelled by somebody else than its consumer: `asyncio.CancelledError` would
    tell the consumer that it was cancelled itself.
    """
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

    async def body() -> None:
        await run(lambda event: queue.put_nowait((event,)))

    task = asyncio.create_task(body())
    task.add_done_callback(lambda _: queue.put_nowait(None))
    told = False
    try:
        while (item := await queue.get()) is not None:
            yield item[0]
        if task.cancelled():
            raise RequestCancelled("the request was cancelled inside the node")
        told = True
        await task
    finally:
        task.cancel()
        await settle(task, told=told)


_begun: set[asyncio.Task[Any]] = set()


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """It goes on to its own end, whoever waits for it and gives up waiting; wait with `asyncio.shield`."""
    task = asyncio.create_task(work)
    _begun.add(task)
    task.add_done_callback(_over)
    return task


def _over(task: asyncio.Task[Any]) -> None:
    _begun.discard(task)
    _heard(task)


def _heard(future: asyncio.Future[Any], *, told: bool = False) -> None:
    """Its error is nobody's any more: logged if it is a bug that nobody was `told` of."""
    error = None if future.cancelled() else future.exception()
    if error is not None and not told and not isinstance(error, PdkvError):
        log.error("failed after its caller had gone", exc_info=error)


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Cancel the body after `seconds`; raises `DeadlineExceeded` naming what was waited for.

    Raises `BoundsError` for what is no finite number: NaN would put the loop's other timers out of order.
    """
    if not math.isfinite(seconds):
        raise BoundsError(f"deadline of {what}, seconds", seconds, "a finite number")
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"{what} did not end within {seconds:.3g} s", what=what, seconds=seconds) from error


class Idle:
    """Something that can be waited for to have ended: running requests, held leases."""

    def __init__(self, busy: Callable[[], int]) -> None:
        self._busy = busy
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """To be called after anything has ended."""
        self._changed.set()

    async def wait(self) -> None:
        """Return once nothing is busy."""
        while self._busy():
            self._changed.clear()
            await self._changed.wait()


class _Group(asyncio.TaskGroup):
    """Whose tasks end in its body. When one fails it cancels its owner to end the body, and takes that back there: from
    a body that is over, Python before 3.13 never takes it back, so the owner would seem to be cancelled by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = Idle(lambda: len(self._running))

    def create_task(self, *args: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **more)
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._idle.changed()

    async def ended(self) -> None:
        await self._idle.wait()


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error is raised as itself; the other tasks, and the body, have ended by then.

    Who was cancelled while they ended hears of that instead, which Python's own forgets before 3.13: else a request
    would go on from the error, without its client or past its deadline.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        async with _Group() as group:
            yield group
            await group.ended()
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if task and isinstance(first, Exception) and task.cancelling() > before:  # not one that is being closed
            raise asyncio.CancelledError from first
        raise first from None


async def ended(work: Future[Any]) -> None:
    """Wait until a thread has ended it. A caller that is cancelled leaves at once, and the work goes on.

    As `asyncio.shield(asyncio.wrap_future(work))`, by one future and two turns of the loop in place of three and five.
    """
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def tell() -> None:
        if not over.done():
            over.set_result(None)

    def over_there(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell)

    work.add_done_callback(over_there)
    await over


class Worker:
    """One thread of its own for work that blocks (an engine's steps, digests), first come, first served."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `step` there. If the caller is cancelled, a step that has started is waited for before this returns."""
        started = self._pool.submit(step, *args, **kwargs)
        try:
            await ended(started)
        except asyncio.CancelledError:
            # Cancelling works only while the step is queued; a running one may still write into pages.
            started.cancel()
            await settle(asyncio.wrap_future(started))
            raise
        if started.cancelled():
            raise asyncio.CancelledError  # the thread was closed
        return started.result()

    def soon(self, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """From any thread: run `step` there, behind what was given before; nobody waits for it, or hears how it ended.

        Nothing happens in a closed worker.
        """
        with suppress(RuntimeError):
            self._pool.submit(step, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
