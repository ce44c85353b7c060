"""A serving process: says where it serves, runs until it is told to end, then gives everything back in order.

Guarantees: SIGTERM and SIGINT end it the same way: not ready and no new requests first, then running ones and leases
have a grace period (lease calls are still answered), what is left then is told why it ends, then the agents go, then
the process; the address is said only once the port is open and the health service answers SERVING, which it does
afterwards for as long as the node is ready.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdkv.cli.options import ServeOptions
from pdkv.cli.signals import end_at_once
from pdkv.cli.tracing import traced
from pdkv.config import ServiceConfig
from pdkv.errors import DeadlineExceeded, Draining, PeerLost
from pdkv.logs import say, to_stderr
from pdkv.machine.heap import keep_freed
from pdkv.node.flow import deadline, together
from pdkv.node.readiness import Readiness
from pdkv.rpc.server import GrpcServer

if TYPE_CHECKING:
    from pdkv.http.front import HttpFront

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
LAST_WORDS_S = 1.0
"""For the statuses of calls that have ended to be sent; it takes no longer than they do."""


def die_with(parent: int) -> None:
    """Let the kernel end this process (SIGKILL) when its parent, process `parent`, ends. Raises `PeerLost` if it has.

    Linux only; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise PeerLost("the process that started this one has ended", parent=parent)


@dataclass(frozen=True, slots=True)
class Served:
    """A server and what stands behind it."""

    config: ServiceConfig
    server: GrpcServer
    role: str
    name: str
    drain: Callable[[], Awaitable[None]]
    """Refuse new requests, unless it `hangs_up`; return when the running ones, and what they left to be read, have
    ended."""
    readiness: Readiness = field(default_factory=Readiness)
    """What the health service says while it serves."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is to end: by a signal, or by an operator's call."""
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Run from the first call to the last; the process doesn't outlive them."""
    http: HttpFront | None = None
    """Beside the server, and ends with it."""
    hangs_up: bool = False
    """Nobody has to call it again while it drains: connections end as soon as their calls have. HTTP requests
    that had come by then are served, as no other node could take them over."""


async def run_until_told(served: Served, options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    told = served.told
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with together() as group:
        beside = [group.create_task(run()) for run in served.beside]
        await _serve(served, options, told)
        for task in beside:
            task.cancel()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log.info("ended")


async def _serve(served: Served, options: ServeOptions, told: asyncio.Event) -> None:
    """From the first call to the last."""
    config, server, http = served.config, served.server, served.http
    heard = {"http": await http.start()} if http is not None else {}
    address = await server.start()
    facts = {"role": served.role, "name": served.name, "address": address, **heard}
    if options.json:
        print(json.dumps(facts), flush=True)
    say(log, logging.INFO, "serving", facts)
    ready = "ready" if served.readiness.unready else "ready again"

    async def tell(unready: str) -> None:
        """The health service, and whoever reads the log."""
        nonlocal ready
        if unready:
            log.warning("not ready: %s", unready)
        else:
            log.info(ready)
            ready = "ready again"
        await server.set_serving(serving=not unready)

    async with together() as group:
        health = group.create_task(served.readiness.watch(tell))
        await told.wait()
        health.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        end_at_once(number)  # a second one, without a traceback
    log.info("told to end: no new requests, running ones and leases have %.3g s", config.drain_grace_s)
    await server.set_serving(serving=False)
    if served.hangs_up:
        server.hang_up()
    if http is not None:
        await http.drain()
    try:
        async with deadline(config.drain_grace_s, "draining"):
            await served.drain()
            await server.calls_ended()
            if http is not None:
                await http.ended()
    except DeadlineExceeded as error:
        log.warning("%s: what is left is cancelled", error)
    ended = Draining(f"{served.name} has ended", node=served.name)
    await server.end_calls(ended)
    if http is not None:
        await http.stop(ended)
    await server.stop(LAST_WORDS_S)


def run_service(config: ServiceConfig, serve: Callable[[], Awaitable[None]], options: ServeOptions) -> None:
    """The whole life of a serving process."""
    if options.exit_with is not None:
        die_with(options.exit_with)
    keep_freed()

    async def main() -> None:
        await serve()

    role = type(config).__name__.removesuffix("Config").lower()
    with (
        to_stderr(config.node_id, config.log_level, config.log_format),
        traced(config.trace_endpoint, config.trace_ratio, service=f"pdkv-{role}", instance=config.node_id),
    ):
        asyncio.run(main())
