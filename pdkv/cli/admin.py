"""`pdkv drain` and `pdkv compact`: what an operator tells a running node or router to do.

Guarantees: exit code 0 only when it was done; 2 with a named error otherwise, 130 when interrupted, which takes nothing
back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli.client import ClientOptions, options_command

if TYPE_CHECKING:
    from pdkv.rpc.client import GrpcAdmin

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class _AdminOptions(ClientOptions):
    address: Annotated[str, typer.Argument(help="host:port of a prefill node, a decode node or a router.")]


@dataclass(frozen=True, kw_only=True)
class DrainOptions(_AdminOptions):
    end: Annotated[bool, typer.Option("--end", help="Then the process ends, as on SIGTERM.")] = False
    wait: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Longest to wait for its requests.")] = 60.0


@dataclass(frozen=True, kw_only=True)
class CompactOptions(_AdminOptions):
    pass


def run_drain(options: DrainOptions) -> None:
    _told(options, lambda admin: admin.drain(end=options.end, wait_s=options.wait))
    then = "and ends now" if options.end else "and takes none until it is ended"
    print(f"{options.address} has no request and no lease any more, {then}", file=sys.stderr)


def run_compact(options: CompactOptions) -> None:
    async def told(admin: GrpcAdmin) -> None:
        print(f"{await admin.compact()} pages moved")

    _told(options, told)


def _told(options: _AdminOptions, tell: Callable[[GrpcAdmin], Awaitable[None]]) -> None:
    from pdkv.rpc.client import GrpcDirectory

    async def main() -> None:
        directory = GrpcDirectory(options.security())
        try:
            await tell(directory.admin(options.address))
        finally:
            await directory.close()

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("pdkv: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


drain = options_command(
    DrainOptions,
    run_drain,
    """Let a node or router take no new requests, and wait until those that run have ended.

    It isn't ready any more (its health service says so), pages that peers have a lease on stay readable, and `pdkv
    status` shows what it still waits for. A drained node stays so until it is ended.

    **Example**

    `pdkv drain 127.0.0.1:7000 --end --insecure`
    """,
)
compact = options_command(
    CompactOptions,
    run_compact,
    """Move a node's cached pages together, so that more of them go into one descriptor; requests go on meanwhile.

    **Example**

    `pdkv compact 127.0.0.1:7001 --insecure`
    """,
)
