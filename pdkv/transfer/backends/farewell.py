"""The TCP connections of an agent, ended so that the processes at the other ends can bear it.

Guarantees: only connections of this agent are touched; what still arrives on one after its agent is gone goes nowhere;
we say at once that we send no more, but close only when the other side has closed, or when the process ends.

Why: a process that serves a read over TCP is aborted by UCX (1.23) if its connection is reset while it sends: of 40
sources that were stopped in the middle of a read and fenced off, 20 died when they went on. They bear to be told that
nobody sends any more. So while the agent is destroyed each connection is held by a second descriptor; a thread that
does nothing else reads it empty. UCX closes its own descriptors and doesn't shut connections down.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH_BYTES = 1 << 20
"""Read at once and forgotten."""
AT_EXIT_S = 0.5
"""The other sides have it to close theirs before the process ends: one that runs needs a few milliseconds."""
_FDS = Path("/proc/self/fd")
_threads: list[threading.Thread] = []


class Connections:
    """Of one agent. UCX waits for them with epoll instances of the agent's own, and the kernel says what is in one."""

    def __init__(self) -> None:
        self._epolls: frozenset[int] = frozenset()

    @contextmanager
    def of_agent(self) -> Iterator[None]:
        """Around making the agent; no other agent may be made meanwhile."""
        before = _epolls()
        yield
        self._epolls = frozenset(fd for fd in _epolls() - before if any(_tcp(other) for other in _waited_for(fd)))

    @contextmanager
    def parting(self) -> Iterator[None]:
        """Around destroying it. Nothing happens to a connection that is open afterwards."""
        waited_for = {fd for epoll in self._epolls for fd in _waited_for(epoll)}
        kept = {fd: socket.socket(fileno=os.dup(fd)) for fd in waited_for if _tcp(fd)}
        try:
            yield
        finally:
            ended = [connection for fd, connection in kept.items() if not _same(fd, connection.fileno())]
            for connection in set(kept.values()) - set(ended):
                connection.close()
        if ended:
            _threads[:] = [thread for thread in _threads if thread.is_alive()]
            _threads.append(threading.Thread(target=_read_empty, args=(ended,), name="farewell", daemon=True))
            _threads[-1].start()


def _read_empty(connections: list[socket.socket]) -> None:
    scratch = bytearray(SCRATCH_BYTES)
    with selectors.DefaultSelector() as waiting:
        for connection in connections:
            connection.setblocking(False)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            waiting.register(connection, selectors.EVENT_READ, connection)
        while waiting.get_map():
            for key, _ in waiting.select():
                try:
                    more = key.data.recv_into(scratch)
                except BlockingIOError:
                    continue
                except OSError:
                    more = 0
                if not more:
                    waiting.unregister(key.data)
                    key.data.close()


@atexit.register
def _last_words() -> None:
    until = time.monotonic() + AT_EXIT_S
    for thread in _threads:
        thread.join(max(0.0, until - time.monotonic()))


def _epolls() -> set[int]:
    found = set()
    for name in os.listdir(_FDS):
        with suppress(OSError):
            if os.readlink(_FDS / name) == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _waited_for(epoll: int) -> list[int]:
    """Descriptors in an epoll instance."""
    with suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []


def _tcp(fd: int) -> bool:
    """It is a TCP connection."""
    try:
        one = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        one.getpeername()
        return one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False
    finally:
        one.detach()


def _same(fd: int, other: int) -> bool:
    """Both are open and the same socket."""
    with suppress(OSError):
        return os.fstat(fd).st_ino == os.fstat(other).st_ino
    return False
