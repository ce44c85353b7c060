"""`pdkv rank`: a rank of a decode group, whose leader is a decode node.

Guarantees: heavy imports happen when the command runs; parts are closed in order however the process is told to end.
"""

from __future__ import annotations

from pdkv.cli.options import ServeOptions, config_command
from pdkv.config import RankConfig


def run_rank(config: RankConfig, options: ServeOptions) -> None:
    from pdkv.cli.assemble import build_parts
    from pdkv.cli.serve import Served, run_service, run_until_told
    from pdkv.node.rank import Rank
    from pdkv.rpc.server import GrpcServer, Services
    from pdkv.rpc.transport import Endpoint

    async def nothing_left() -> None:
        """Its requests are the leader's, and its pages are read by nobody."""

    async def serve() -> None:
        parts = build_parts(config)
        try:
            endpoint = Endpoint(config.bind, config.advertise)
            server = GrpcServer(endpoint, Services(rank=Rank(parts)), config.security(), config.gate())
            await run_until_told(Served(config, server, "rank", str(parts.name), nothing_left), options)
        finally:
            parts.close()

    run_service(config, serve, options)


rank = config_command(
    RankConfig,
    run_rank,
    doc="""Serve as a **rank** of a decode group: follow its leader, a decode node with `--rank-addresses`.

    Example:

    `pdkv rank --node-id d0-1 --model tiny --bind 127.0.0.1:7011 --insecure`
    """,
)
