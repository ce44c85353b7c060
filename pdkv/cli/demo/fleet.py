"""Node processes of a benchmark or a test: started as a user does, waited for, killed, and never left behind.

Guarantees: a node counts as started when it has said its address itself; one that ends instead raises with the last
lines it wrote; leaving the fleet, in whatever way, ends every process, and the kernel ends them if this process dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pdkv.errors import DeadlineExceeded, PeerLost
from pdkv.node.flow import deadline

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0
_TAIL_LINES = 12


class Process(Protocol):
    """What is asked of a process, however it was started: as asyncio's own."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


class NodeProcess:
    """One `pdkv prefill`, `decode`, `rank` or `router` process."""

    def __init__(self, name: str, process: Process, log: Path, facts: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.address = facts["address"]
        self.http = facts.get("http", "")
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens to a process that has ended."""
        if self.running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: no farewell of any kind."""
        self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code; -n if signal n ended it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heard in time."""
        self.signal(signal.SIGTERM)
        try:
            async with deadline(STOP_DEADLINE_S, f"{self.name} stopping"):
                await self.wait()
        except DeadlineExceeded:
            self.kill()
        await self.wait()


class Fleet:
    """An async context: every process started in it has ended when it is left."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._logs = tempfile.TemporaryDirectory(prefix="pdkv-")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        for process in self._processes:
            await process.wait()
        self._logs.cleanup()

    @property
    def pids(self) -> list[int]:
        """Of all processes that were started in it."""
        return [process.pid for process in self._processes]

    def log(self, name: str) -> Path:
        """Where a node's stderr goes while the fleet is there."""
        return Path(self._logs.name) / f"{name}.log"

    async def start(self, role: str, name: str, flags: Mapping[str, str | int | bool]) -> NodeProcess:
        """Start `pdkv ROLE` and wait until it serves. Raises `PeerLost` with its last words if it ends instead."""
        log = self.log(name)
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                *command(role, name, flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                start_new_session=True,  # Ctrl-C in the terminal is for the parent, which then ends its nodes
            )
        self._processes.append(process)
        if process.stdout is None:
            raise PeerLost(f"{name} has no output to read its address from", node=name)
        async with deadline(START_DEADLINE_S, f"{name} starting"):
            line = await process.stdout.readline()
        if not line:
            await process.wait()
            said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise PeerLost(f"{name} ended with {process.returncode} before it served:\n{said}", node=name)
        return NodeProcess(name, process, log, json.loads(line))


def command(role: str, name: str, flags: Mapping[str, str | int | bool]) -> list[str]:
    """The command line of a node; a flag of True is a switch, of False is left out.

    All of a fleet are on one machine: a decode node may be sent to any prefill node there, unless told otherwise.
    """
    if role == "decode":
        flags = {"prefill_allow": "127.0.0.1:*", **flags}
    line = [sys.executable, "-m", "pdkv.cli", role, "--node-id", name, "--json"]
    line += ["--exit-with", str(os.getpid())]
    for flag, value in flags.items():
        option = "--" + flag.replace("_", "-")
        if value is True:
            line.append(option)
        elif value is not False:
            line += [option, str(value)]
    return line
