"""`pdkv bench transfer --role source`: a source for sinks on other hosts, until it is told to end.

Guarantees: served, and ended, as a node is; a raw source beside it serves one sink after another, and ends with it.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pdkv.cli.bench.pulls import SourceSettings
from pdkv.cli.bench.source import Source
from pdkv.cli.bench.transfer_options import TransferOptions
from pdkv.cli.bench.yardsticks import source_command
from pdkv.cli.options import ServeOptions, require_servable
from pdkv.cli.serve import Served, run_service, run_until_told
from pdkv.config import PrefillConfig
from pdkv.errors import PeerLost
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint


def run_source(options: TransferOptions) -> None:
    """Raises `ConfigError` for settings that it can't be served with."""
    config = PrefillConfig(
        node_id=options.name,
        bind=options.bind,
        advertise=options.advertise,
        tls_ca=options.tls_ca,
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        insecure=options.insecure,
    )
    require_servable(config)
    serve = ServeOptions(json=options.json_, exit_with=None)
    settings = SourceSettings(options.name, options.memory_bytes(), options.ucx_tls, options.net_devices)

    async def run() -> None:
        source = Source(settings)
        server = GrpcServer(
            Endpoint(config.bind, config.advertise),
            Services(prefill=source, bench=source),
            config.security(),
            config.gate(),
        )
        beside = [partial(raw_sources, options.raw_bind)] if options.raw_bind else []
        try:
            await run_until_told(Served(config, server, "source", options.name, source.close, beside=beside), serve)
        finally:
            await source.close()

    run_service(config, run, serve)


async def raw_sources(listen: str) -> None:
    """One after another, each for one sink. Raises `PeerLost` if one ends otherwise than by its sink's leaving."""
    while True:
        process = await asyncio.create_subprocess_exec(*source_command(listen), start_new_session=True)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code:
            raise PeerLost(f"the raw source at {listen} ended with {code}", address=listen)
