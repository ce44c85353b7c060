"""Node processes that are born quickly: forked from one that has imported what a node needs, and nothing more.

Guarantees: each is a process of its own with the same command line as a node in a fleet, made before gRPC, UCX or any
thread is there; it counts as started when it has said its address; leaving the nursery ends all of them.

A node spends nine tenths of its first seconds importing torch and transformers. Where nodes die every few seconds,
that would be most of what two cores do.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from pdkv.cli.demo.fleet import START_DEADLINE_S, STOP_DEADLINE_S, command
from pdkv.cli.signals import deaf_children, ending
from pdkv.errors import DeadlineExceeded, PeerLost
from pdkv.node.flow import deadline

_IMPORTED_FIRST = ["torch", "pdkv.cli.app", "pdkv.adapters.reference.model"]


class NurseryProcess:
    """One node process."""

    def __init__(self, name: str, process: BaseProcess, address: str) -> None:
        self.name = name
        self.address = address
        self._process = process
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._gone)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens to a process that has ended."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code; -n if signal n ended it."""
        await self._ended.wait()
        return self._process.exitcode or 0

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heard in time."""
        self.signal(signal.SIGTERM)
        try:
            async with deadline(STOP_DEADLINE_S, f"{self.name} stopping"):
                await self._ended.wait()
        except DeadlineExceeded:
            self.kill()
            await self._ended.wait()

    def _gone(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()


class Nursery:
    """An async context. Logs of a name's processes are in one file, `log(name)`, while it is there."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED_FIRST)
        self._processes: list[NurseryProcess] = []
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
            process.kill()
        for process in self._processes:
            await process.wait()
        await asyncio.gather(*self._pumps)
        self._logs.cleanup()

    def log(self, name: str) -> Path:
        return Path(self._logs.name) / f"{name}.log"

    async def start(
        self, role: str, name: str, flags: Mapping[str, str | int | bool], heard: Callable[[str], None]
    ) -> NurseryProcess:
        """Start `pdkv ROLE` and wait until it serves; `heard` gets each line that it logs.

        Raises `PeerLost` with its last words if it ends instead.
        """
        said, says = self._context.Pipe(duplex=False)
        logged, logs = self._context.Pipe(duplex=False)
        line = command(role, name, flags)
        born = self._context.Process(target=_node, args=(line[line.index("pdkv.cli") + 1 :], says, logs), name=name)
        await asyncio.to_thread(born.start)  # the first one waits for what is imported
        says.close()
        logs.close()
        pump = asyncio.create_task(self._pumped(logged, name, heard))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        process = NurseryProcess(name, born, "")
        self._processes.append(process)
        async with deadline(START_DEADLINE_S, f"{name} starting"):
            facts = await (await _lines(said)).readline()
        if not facts:
            await process.wait()
            last = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-12:])
            raise PeerLost(f"{name} {ending(await process.wait())} before it served:\n{last}", node=name)
        process.address = json.loads(facts)["address"]
        return process

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


def _node(arguments: list[str], says: Connection, logs: Connection) -> None:
    """The child: stdout and stderr are the pipes; then it is what `pdkv` would be on that command line."""
    os.setsid()  # Ctrl-C in the terminal is for the parent, which then ends its nodes
    os.dup2(says.fileno(), 1)
    os.dup2(logs.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments[arguments.index("--exit-with") + 1] = str(os.getppid())
    from pdkv.cli.app import run

    run(arguments)
