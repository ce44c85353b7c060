"""What SIGTERM and SIGINT do.

Guarantees: where nobody handles them they end the process at once, also as process 1 of a container, for which the
kernel does nothing by itself; a long command that has started processes ends by either in order, without a traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
FIRST_PROCESS = 1
INTERRUPTED = 130


def end_at_once(number: signal.Signals) -> None:
    """From now on, and for a signal that is pending, `number` ends the process; its exit status names the signal."""
    signal.signal(number, signal.SIG_DFL if os.getpid() != FIRST_PROCESS else _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, and SIGTERM is what Ctrl-C is, also where a shell has a command in its background ignore that:
    both let `work` clean up, a second SIGTERM ends the process at once. Raises `SystemExit` (130) then."""

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def told() -> None:
            loop.remove_signal_handler(signal.SIGTERM)
            end_at_once(signal.SIGTERM)
            if task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGTERM, told)
        return await work

    try:
        return asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("pdkv: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        end_at_once(signal.SIGTERM)


def ending(code: int | None) -> str:
    """How a process ended, in words; `code` as `subprocess` and `multiprocessing` have it."""
    if code is None or code >= 0:
        return f"ended with {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (", as the system does that runs out of memory" if code == -signal.SIGKILL else "")


@contextmanager
def deaf_children() -> Iterator[None]:
    """A process that is started in the body doesn't hear Ctrl-C: whoever started it ends it. In the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
