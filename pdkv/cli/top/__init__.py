"""`pdkv top`: a live view of a fleet in the terminal.

Guarantees: asking changes nothing; a node that doesn't answer holds up nobody; Ctrl-C, and SIGTERM, leave the terminal
as it was. Exit code 0: somebody answered (`--once`); 2: nobody did, or an option can't be used; 130: interrupted.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli.client import ClientOptions, options_command
from pdkv.cli.console import table_console
from pdkv.cli.status import INTERRUPTED, status_of
from pdkv.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from rich.console import Console

    from pdkv.cli.top.line import Line
    from pdkv.cli.top.look import Fleet, Seen

HELP = """Watch a fleet: a line a node, again every few seconds, until Ctrl-C.

Its state; what its pool's pages are used for; requests that run and wait; the part of prompts that was in its cache;
bytes a second of main KV and index-K, read from peers (in) and announced or lent to them (out); leases; its peers by
state, and what carries reads from them; refusals by contract, digests that were wrong, requests that failed.

A router is enough: it names all its nodes. What doesn't fit a narrow terminal is left out, the least important first.

**Examples**

`pdkv top --router 127.0.0.1:8000 --insecure`

`pdkv top 127.0.0.1:7000 127.0.0.1:7001 --once --insecure`

`pdkv top --router 127.0.0.1:8000 --json --every-s 10 --insecure`: one JSON object a look.
"""


@dataclass(frozen=True, kw_only=True)
class TopOptions(ClientOptions):
    """The command line, one field an option."""

    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS]...", help="host:port of decode nodes, prefill nodes or routers."),
    ] = field(default=None)
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of a router, whose nodes are watched.")] = ""
    every_s: Annotated[float, typer.Option(metavar="SECONDS", help="From one look to the next.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON object a look, in a line.")] = False

    @property
    def where(self) -> list[str]:
        return [*filter(None, [self.router]), *(self.addresses or ())]


def run_top(options: TopOptions) -> None:
    from pdkv.rpc.transport import require_address

    if not 0 < options.every_s < math.inf:
        raise ConfigError("every_s", options.every_s, "a number of seconds above 0")
    if not options.where:
        raise ConfigError("ADDRESS", "", "the host:port of a node or router, or --router HOST:PORT")
    for address in options.where:
        require_address("ADDRESS", address)
    security = options.security()

    async def main() -> None:
        from pdkv.cli.top.look import ASK_S, Fleet
        from pdkv.rpc.client import ClientSettings, GrpcDirectory

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: task and task.cancel())
        directory = GrpcDirectory(security, ClientSettings(ASK_S, ASK_S))
        try:
            await _watch(Fleet(lambda address: status_of(directory, address), options.where), options)
        finally:
            await directory.close()

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise SystemExit(INTERRUPTED) from None


async def _watch(fleet: Fleet, options: TopOptions) -> None:
    from pdkv.cli.top.line import lines_of

    console = table_console()
    loop = asyncio.get_running_loop()
    before: list[Seen] = []
    with _showing(options, console) as show:
        while True:
            began_s = loop.time()
            seen = await fleet.look()
            show(lines_of(seen, before))
            if options.once:
                if not any(each.status for each in seen):
                    raise PeerLost(f"nobody answers at {', '.join(options.where)}")
                return
            before = seen
            await asyncio.sleep(max(began_s + options.every_s - loop.time(), 0.0))


@contextmanager
def _showing(options: TopOptions, console: Console) -> Iterator[Callable[[Sequence[Line]], None]]:
    """What shows the lines of a look."""
    from pdkv.cli.top.view import view

    if options.json:
        yield lambda lines: print(json.dumps({"nodes": [asdict(line) for line in lines]}), flush=True)
    elif options.once or not console.is_terminal:
        yield lambda lines: console.print(view(lines, console), soft_wrap=True)
    else:
        from rich.live import Live

        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda lines: live.update(view(lines, console), refresh=True)


top = options_command(TopOptions, run_top, HELP)
