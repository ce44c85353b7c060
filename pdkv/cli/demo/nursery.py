"""Node processes that are born quickly: forked from one that has imported what a node needs, and nothing more.

Guarantees: each is a process of its own with the same command line as a node in a fleet, made before gRPC, UCX or any
thread is there; it counts as started when it has said its address; leaving the nursery ends all of them.

A node spends nine tenths of its first seconds importing torch and transformers. Where nodes die every few seconds, in a
soak, or many are wanted, in the demo and in tests, that would be most of what two cores do.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from pdkv.cli.demo.fleet import START_DEADLINE_S, NodeProcess, command
from pdkv.cli.signals import deaf_children, ending
from pdkv.errors import PeerLost
from pdkv.node.flow import deadline

_IMPORTED_FIRST = ["torch", "pdkv.cli.app", "pdkv.adapters.reference.model"]


class Forked:
    """A process that was forked elsewhere, as asyncio has its own. Make it in the loop that waits for it."""

    def __init__(self, process: BaseProcess) -> None:
        self.pid = process.pid or 0
        self._process = process
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._gone)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    def send_signal(self, signal: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, which this loop is still to hear
            os.kill(self.pid, signal)

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.exitcode or 0

    def _gone(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()


class Nursery:
    """An async context. Logs of a name's processes are in one file, `log(name)`, while it is there."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED_FIRST)
        self._processes: list[Forked] = []
        self._logs = tempfile.TemporaryDirectory(prefix="pdkv-")
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        with deaf_children():
            forkserver.ensure_running()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            await process.wait()
        await asyncio.gather(*self._pumps)
        self._logs.cleanup()

    def log(self, name: str) -> Path:
        return Path(self._logs.name) / f"{name}.log"

    async def start(
        self,
        role: str,
        name: str,
        flags: Mapping[str, str | int | bool],
        heard: Callable[[str], None] | None = None,
    ) -> NodeProcess:
        """Start `pdkv ROLE` in today's environment and wait until it serves; `heard` gets each line that it logs, and
        this loop must run for it to log on.

        Raises `PeerLost` with its last words if it ends instead.
        """
        said, says = self._context.Pipe(duplex=False)
        line = command(role, name, flags)
        with self._log_end(name, heard) as logs:
            given = (line[line.index("pdkv.cli") + 1 :], dict(os.environ), says, logs)
            born = self._context.Process(target=_node, args=given, name=name)
            await asyncio.to_thread(born.start)  # the first one waits for what is imported
        says.close()
        process = Forked(born)
        self._processes.append(process)
        async with deadline(START_DEADLINE_S, f"{name} starting"):
            facts = await (await _lines(said)).readline()
        if not facts:
            words = ending(await process.wait())
            last = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-12:])
            raise PeerLost(f"{name} {words} before it served:\n{last}", node=name)
        return NodeProcess(name, process, self.log(name), json.loads(facts))

    def _log_end(self, name: str, heard: Callable[[str], None] | None) -> Connection:
        """Where the process writes its log: the file, or a pipe that is heard on its way there."""
        if heard is None:
            return Connection(os.open(self.log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), readable=False)
        logged, logs = self._context.Pipe(duplex=False)
        pump = asyncio.create_task(self._pumped(logged, name, heard))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return logs

    async def _pumped(self, logged: Connection, name: str, heard: Callable[[str], None]) -> None:
        with self.log(name).open("ab", buffering=0) as sink:
            async for line in await _lines(logged):
                sink.write(line)
                heard(line.decode(errors="replace").rstrip())


async def _lines(end: Connection) -> asyncio.StreamReader:
    """What is written to the other end of a pipe, line by line. Takes the file descriptor over."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(end.fileno()), "rb", buffering=0)
    end.close()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _node(arguments: list[str], environ: dict[str, str], says: Connection, logs: Connection) -> None:
    """The child: stdout and stderr are what it was given; then it is what `pdkv` would be on that command line."""
    os.environ.clear()
    os.environ.update(environ)
    os.setsid()  # Ctrl-C in the terminal is for the parent, which then ends its nodes
    os.dup2(says.fileno(), 1)
    os.dup2(logs.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments[arguments.index("--exit-with") + 1] = str(os.getppid())
    from pdkv.cli.app import run

    run(arguments)
