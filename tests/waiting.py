"""Waiting for a thing, with a deadline; never for a time to pass.

The one place that polls: what is in another process can only be asked for, and `PAUSE_S` apart, or the asking would
take the processor from what is waited for.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.01
DEADLINE_S = 60.0
"""Far above what anything here takes on a busy machine: a test that gets there has failed."""


async def until(
    ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], what: str, *, deadline_s: float = DEADLINE_S
) -> T:
    """Ask again `PAUSE_S` after the answer is there, until one holds; that one is returned."""
    last: T | None = None
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                last = await ask()
                if holds(last):
                    return last
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {deadline_s:g} s; last: {last}") from None


def until_ended(pids: Iterable[int], *, deadline_s: float = DEADLINE_S) -> None:
    """Until none of these processes runs any more, whoever's children they are."""
    poll = select.poll()
    running: dict[int, int] = {}
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            running[fd] = pid
            poll.register(fd, select.POLLIN)
        while running:
            ended = poll.poll(deadline_s * 1000)
            assert ended, f"still running after {deadline_s:g} s: {sorted(running.values())}"
            for fd, _ in ended:
                poll.unregister(fd)
                os.close(fd)
                del running[fd]
    finally:
        for fd in running:
            os.close(fd)


def children_of(pid: int) -> set[int]:
    """Processes that any thread of `pid` has started and not yet waited for."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return found
