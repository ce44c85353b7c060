"""A serving process: says where it serves, runs until it is told to end, then gives everything back in order.

Guarantees: SIGTERM and SIGINT end it the same way: not ready first, running calls a grace period, then the agents, then
the process; the address is said only once the port is open and the health service answers SERVING.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from pdkv.cli.options import ServeOptions
from pdkv.config import ServiceConfig
from pdkv.errors import PeerLost
from pdkv.rpc.server import GrpcServer

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process (SIGKILL) when its parent ends. Raises `PeerLost` if that has happened already.

    Linux only; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise PeerLost("the process that started this one has ended", parent=parent)


def set_up_logging(config: ServiceConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {config.node_id} %(name)s: %(message)s",
    )


async def run_until_told(
    config: ServiceConfig, server: GrpcServer, facts: dict[str, str], options: ServeOptions
) -> None:
    """Serve until SIGTERM or SIGINT; a second one is left to the default, which ends the process at once."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    address = await server.start()
    facts = {**facts, "address": address}
    if options.json:
        print(json.dumps(facts), flush=True)
    log.info("serving %s", " ".join(f"{name}={value}" for name, value in facts.items()))
    await told.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    log.info("told to end: no new calls, running ones have %.3g s", config.drain_grace_s)
    await server.stop(config.drain_grace_s)


def run_service(config: ServiceConfig, serve: Callable[[], Awaitable[None]], options: ServeOptions) -> None:
    """The whole life of a serving process."""
    if options.exit_with_parent:
        die_with_parent()
    set_up_logging(config)

    async def main() -> None:
        await serve()

    asyncio.run(main())
