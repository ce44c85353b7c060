"""Processes of a benchmark on this host: sources that serve, and sinks that are called.

Guarantees: source and sink are processes of their own, with nothing in them but what they measure; what a sink raises
is raised at its caller; a process that ends unasked is an error with its last words; leaving `Workers`, in whatever
way, ends all of them, and the kernel ends them if this process dies.

They are forked from one process that has imported what they need, before gRPC, UCX or any thread is there.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pdkv.cli.signals import deaf_children, ending
from pdkv.errors import PdkvError, PeerLost, RemoteError
from pdkv.rpc.security import Security

if TYPE_CHECKING:
    from pdkv.cli.bench.pulls import Opened, Pulled, SinkNode, SourceSettings, Wish
    from pdkv.ids import UInt64Array
    from pdkv.rpc.bench import BenchPrompt

_IMPORTED_FIRST = ["torch", "pdkv.cli.assemble"]
STOP_S = 10.0
LAST_LINES = 12

Main = Callable[..., Coroutine[Any, Any, None]]


class Worker:
    """One process, which is asked and answers over a pipe."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection, log: Path) -> None:
        self.name = name
        self._process = process
        self._pipe = pipe
        self._log = log
        self._asking = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    async def heard(self) -> Any:
        """What it says next. Raises what it raised, as `RemoteError`, and `PeerLost` if it has ended."""
        try:
            kind, answer = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as error:
            await asyncio.to_thread(self._process.join, STOP_S)
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            words = f"{self.name} {ending(self._process.exitcode)}; its last words: {last or 'none'}"
            raise PeerLost(words, name=self.name) from error
        if kind:
            raise RemoteError(f"{self.name}: {kind}: {answer}", kind=kind)
        return answer

    async def ask(self, what: str, *given: Any) -> Any:
        async with self._asking:
            with suppress(OSError):  # `heard` says how it ended
                self._pipe.send((what, given))
            return await self.heard()

    def end(self) -> None:
        """Now, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class SinkProcess:
    """`bench.sink.Sink` in a process of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def open(self, node: SinkNode, addresses: tuple[str, ...]) -> Opened:
        opened: Opened = await self._worker.ask("open", node, addresses)
        return opened

    async def ready(self, wish: Wish) -> None:
        await self._worker.ask("ready", wish)

    async def pull(self, wish: Wish) -> Pulled:
        pulled: Pulled = await self._worker.ask("pull", wish)
        return pulled

    async def digests(self, prompt: BenchPrompt) -> UInt64Array:
        found: UInt64Array = await self._worker.ask("digests", prompt)
        return found

    async def huge_share(self) -> float:
        return float(await self._worker.ask("huge_share"))

    async def cpu_s(self) -> float:
        return float(await self._worker.ask("cpu_s"))

    async def close(self) -> None:
        await self._worker.ask("close")


class Workers:
    """An async context: every process started in it has ended when it is left."""

    def __init__(self) -> None:
        # the server that others are forked from ends with this process; each context has one of its own
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED_FIRST)
        self._workers: list[Worker] = []
        self._logs = tempfile.TemporaryDirectory(prefix="pdkv-bench-")

    async def __aenter__(self) -> Self:
        with deaf_children():
            forkserver.ensure_running()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._logs.cleanup()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def source(self, settings: SourceSettings, security: Security) -> str:
        """Start one; its address, on this host."""
        worker = await self.start(settings.node_id, _serve, settings, security)
        return str(await worker.heard())

    async def sink(self, name: str, security: Security) -> SinkProcess:
        worker = await self.start(name, _answer, security)
        await worker.heard()
        return SinkProcess(worker)

    async def start(self, name: str, main: Main, *given: Any) -> Worker:
        """A process that runs `main(pipe, *given)`; what it first says is still to be `heard`."""
        mine, theirs = self._context.Pipe()
        log = Path(self._logs.name) / f"{name}.log"
        log.touch()
        process = self._context.Process(target=_child, args=(main, theirs, str(log), *given), name=name, daemon=True)
        await asyncio.to_thread(process.start)  # the first one waits for what is imported
        theirs.close()
        worker = Worker(name, process, mine, log)
        self._workers.append(worker)
        return worker


# --- in the child ---------------------------------------------------------------------------------------------------


def _child(main: Main, pipe: Connection, log: str, *given: Any) -> None:
    from pdkv.cli.serve import die_with

    os.setsid()  # Ctrl-C in the terminal is for the parent, which then ends its children
    die_with(os.getppid())
    with open(log, "ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(main(pipe, *given))
    except PdkvError as error:
        pipe.send((error.kind, str(error)))
        raise SystemExit(1) from error


async def _serve(pipe: Connection, settings: SourceSettings, security: Security) -> None:
    """Until the pipe is closed."""
    from pdkv.cli.bench.source import Source
    from pdkv.rpc.server import GrpcServer, Services
    from pdkv.rpc.transport import Endpoint

    source = Source(settings)
    server = GrpcServer(Endpoint("127.0.0.1:0"), Services(prefill=source, bench=source), security)
    pipe.send(("", await server.start()))
    try:
        while True:
            await asyncio.to_thread(pipe.recv)
    except EOFError:
        await server.stop(0.0)
        await source.close()


async def _answer(pipe: Connection, security: Security) -> None:
    """One question after another, until the pipe is closed."""
    from pdkv.cli.bench.sink import Sink

    sink = Sink(security)
    pipe.send(("", None))
    try:
        while True:
            what, given = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send(("", await getattr(sink, what)(*given)))
            except PdkvError as error:
                pipe.send((error.kind, str(error)))
    except EOFError:
        await sink.close()
