"""`pdkv health`: whether a service is ready, or at least alive; for a container's health check and a pod's probes.

Guarantees: exit code 0 only for a service that says SERVING itself; 1 in every other case, with the reason on stderr;
it is cheap: neither torch nor nixl nor a node's parts are imported.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from pdkv.cli.client import ClientOptions, options_command
from pdkv.config import ENV_PREFIX, host_name
from pdkv.errors import PdkvError

UNHEALTHY = 1
"""Exit code; Docker keeps 2 for itself."""
PORT = 7000
"""Where a service is looked for that has no `PDKV_BIND`."""

HELP = """Ask a service whether it is **ready**: exit code 0 if it says so, 1 otherwise.

Ready is a node that can serve now: one that drains, or reaches none of its peers, is not, and gets ready again by
itself. **Alive** (`--live`) is every process whose server still answers, ready or not: what isn't should be started
anew.

**Examples**

`pdkv health`: the service of this host or container.

`pdkv health prefill-0.prefill:7000 --live --insecure`
"""


@dataclass(frozen=True, kw_only=True)
class HealthOptions(ClientOptions):
    """The command line, one field an option."""

    address: Annotated[
        str,
        typer.Argument(
            metavar="[ADDRESS]",
            help=f"host:port. Without it this host's own service: the port of {ENV_PREFIX}BIND, or {PORT}; under mutual"
            f" TLS its certificate has to name {ENV_PREFIX}NODE_ID, or the host.",
            show_default=False,
        ),
    ] = ""
    live: Annotated[bool, typer.Option("--live", help="Ask whether it is alive, not whether it is ready.")] = False
    within: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Longest to wait for the answer.")] = 5.0

    def target(self) -> tuple[str, str]:
        """host:port, and the node that has to be there; empty: whoever has the host in its certificate."""
        if self.address:
            return self.address, ""
        _, _, port = os.environ.get(f"{ENV_PREFIX}BIND", "").rpartition(":")
        return f"localhost:{port or PORT}", os.environ.get(f"{ENV_PREFIX}NODE_ID") or host_name()


def run_health(options: HealthOptions) -> None:
    try:
        state = asyncio.run(_state(options))
    except PdkvError as error:
        state = f"{error.kind}: {' '.join(str(error).split())}"
    if state != "SERVING":
        print(f"pdkv: {options.target()[0]}: {state}", file=sys.stderr)
        raise SystemExit(UNHEALTHY)


async def _state(options: HealthOptions) -> str:
    from pdkv.rpc.health import LIVE, READY, state_of

    address, node = options.target()
    service = LIVE if options.live else READY
    return await state_of(address, options.security(), service=service, node=node, within_s=options.within)


health = options_command(HealthOptions, run_health, HELP)
