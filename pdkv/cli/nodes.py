"""`pdkv prefill`, `pdkv decode` and `pdkv router`: the three serving processes.

Guarantees: heavy imports happen when a command runs; parts are closed in order however the process is told to end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdkv.cli.fronting import front_of
from pdkv.cli.options import ServeOptions, config_command
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig, ServiceConfig

if TYPE_CHECKING:
    from pdkv.node.decode import DecodeSettings
    from pdkv.node.keeper import KeeperSettings
    from pdkv.router.service import RouterSettings
    from pdkv.rpc.transport import Endpoint

log = logging.getLogger(__name__)


def run_prefill(config: PrefillConfig, options: ServeOptions) -> None:
    from pdkv.cli.assemble import build_parts
    from pdkv.cli.export import exporting_node
    from pdkv.cli.publish import publishing
    from pdkv.cli.serve import Served, run_service, run_until_told
    from pdkv.metrics.served import MeteredPrefillNode
    from pdkv.node.control import Control
    from pdkv.node.prefill import PrefillSettings
    from pdkv.rpc.server import GrpcServer, Services

    async def serve() -> None:
        parts = build_parts(config)
        try:
            settings = PrefillSettings(
                config.chunk_tokens,
                config.lease_ttl_s,
                config.max_batched_tokens,
                config.scores_bytes,
                config.leases_per_peer,
                pages_wait_s=config.pages_wait_s,
                pull_back_s=config.borrow_s if config.pull_back else None,
                keeper=_keeping(config),
            )
            node = MeteredPrefillNode(parts, settings)
            control = Control(parts.readiness, node.drain, node.compact)
            services = Services(prefill=node, source=node.source, admin=control, visit=parts.intro)
            server = GrpcServer(_endpoint(config), services, config.security(), config.gate())
            # Were leases never ended, pages would never be: the node doesn't outlive its watch.
            beside = (node.watch_leases, node.keeper.run)
            served = Served(
                config, server, "prefill", str(parts.name), node.drain, parts.readiness, control.told, beside
            )
            with publishing(config, parts.manager), exporting_node(config, node):
                await run_until_told(served, options)
        finally:
            parts.close()

    run_service(config, serve, options)


def run_decode(config: DecodeConfig, options: ServeOptions) -> None:
    from pdkv.cli.assemble import build_parts
    from pdkv.cli.export import exporting_node
    from pdkv.cli.publish import publishing
    from pdkv.cli.serve import Served, run_service, run_until_told
    from pdkv.discovery.finder import Finder, source_by
    from pdkv.kvcache.eviction import eviction_order
    from pdkv.metrics.served import MeteredDecodeNode
    from pdkv.metrics.timeline import Timeline
    from pdkv.node.control import Control
    from pdkv.node.fault_plan import FaultPlan
    from pdkv.node.group import lead
    from pdkv.rpc.client import GrpcDirectory
    from pdkv.rpc.server import GrpcServer, Services

    async def serve() -> None:
        timeline = Timeline()
        parts = timeline.watching(build_parts(config))
        directory = GrpcDirectory(config.security())
        group = None
        try:
            if config.rank_addresses:
                ranks = [directory.rank(address) for address in config.rank_addresses]
                parts, group = await lead(parts, ranks, order=eviction_order(config.eviction))
            faults = FaultPlan.parse(config.fault_plan)
            node = MeteredDecodeNode(
                parts, faults.directory(directory), _decoding(config), faults.sources(directory.sources)
            )
            node.timeline = timeline
            if not config.prefill_addresses:
                rest = f"only requests that name a prefill node of prefill_allow ({', '.join(config.prefill_allow)})"
                log.warning("no prefill_addresses: %s are served", rest if config.prefill_allow else "no requests")

            def known(_: str, addresses: tuple[str, ...]) -> None:
                node.links.replace_own(addresses)
                nobody = bool(config.prefill_addresses) and not addresses
                parts.readiness.say("discovery", "no prefill node is found" if nobody else "")

            finder = node.finder = Finder({"prefill": config.prefill_addresses}, known, source_by(config.dns_server))
            control = Control(parts.readiness, node.drain, node.compact)
            services = Services(decode=node, source=node.source, admin=control)
            server = GrpcServer(_endpoint(config), services, config.security(), config.gate())
            # As on a prefill node: what is lent has to come back.
            beside = (node.watch_leases, node.keeper.run, node.links.redial.run, finder.run)
            http, ready = front_of(config, node, parts.readiness), parts.readiness
            served = Served(config, server, "decode", str(parts.name), node.drain, ready, control.told, beside, http)
            with publishing(config, parts.manager), exporting_node(config, node):
                await run_until_told(served, options)
        finally:
            if group is not None:
                await group.close()
            await directory.close()
            parts.close()

    run_service(config, serve, options)


def run_router(config: RouterConfig, options: ServeOptions) -> None:
    from pdkv.cli.export import exporting_router
    from pdkv.cli.serve import Served, run_service, run_until_told
    from pdkv.discovery.finder import Finder, source_by
    from pdkv.metrics.routed import MeteredRouter
    from pdkv.node.control import Control
    from pdkv.node.readiness import Readiness
    from pdkv.router.registry import Registry, Role
    from pdkv.router.watch import Watch
    from pdkv.rpc.client import GrpcDirectory
    from pdkv.rpc.server import GrpcServer, Services

    async def serve() -> None:
        directory = GrpcDirectory(config.security())
        try:
            registry = Registry((), ())
            readiness = Readiness()
            router = MeteredRouter(registry, directory, _routing(config))
            watch = Watch(registry, directory, router.pairing, readiness)

            def known(role: str, addresses: tuple[str, ...]) -> None:
                registry.replace(Role(role), addresses)
                watch.changed.set()

            lists = {Role.PREFILL.value: config.prefill_addresses, Role.DECODE.value: config.decode_addresses}
            finder = router.finder = Finder(lists, known, source_by(config.dns_server))
            control = Control(readiness, router.drain, ended=router.ended)
            services = Services(router=router, admin=control)
            server = GrpcServer(_endpoint(config), services, config.security(), config.gate())
            beside = (watch.run, finder.run)
            http = front_of(config, router, readiness)
            served = Served(
                config,
                server,
                "router",
                config.node_id,
                router.ended,
                readiness,
                control.told,
                beside,
                http,
                hangs_up=True,
            )
            with exporting_router(config, router, readiness):
                await run_until_told(served, options)
        finally:
            await directory.close()

    run_service(config, serve, options)


def _decoding(config: DecodeConfig) -> DecodeSettings:
    from pdkv.node.decode import DecodeSettings
    from pdkv.node.messages import FailurePolicy
    from pdkv.node.preemption import PreemptPolicy

    return DecodeSettings(
        read_deadline_s=config.read_deadline_s,
        allow_fault_injection=config.allow_fault_injection,
        queue_limit=config.queue_limit,
        reserve_window_pages=config.reserve_window_pages if config.reserve == "late" else None,
        preempt=PreemptPolicy(config.preempt),
        offload_bytes=config.offload_bytes,
        cache_answers=config.cache_answers,
        on_failure=FailurePolicy(config.on_failure),
        silence_s=config.peer_silence_s,
        peer_pages_share=config.peer_pages_share,
        recompute_chunk_tokens=config.recompute_chunk_tokens,
        prefill_allow=config.prefill_allow,
        pull_back=config.pull_back,
        source_addresses=config.source_addresses,
        locate_s=config.locate_s,
        borrow_s=config.borrow_s,
        lease_ttl_s=config.lease_ttl_s,
        leases_per_peer=config.leases_per_peer,
        keeper=_keeping(config),
    )


def _routing(config: RouterConfig) -> RouterSettings:
    from pdkv.node.messages import FailurePolicy
    from pdkv.router.policy import Policy
    from pdkv.router.service import RouterSettings

    return RouterSettings(
        FailurePolicy(config.on_failure) if config.on_failure else None,
        Policy(config.policy),
        config.locate_s,
        config.running_limit,
        config.waiting_limit,
    )


def _keeping(config: NodeConfig) -> KeeperSettings:
    from pdkv.node.keeper import KeeperSettings

    return KeeperSettings(config.peer_probe_s, lost_s=config.peer_lost_s, forget_s=config.peer_forget_s)


def _endpoint(config: ServiceConfig) -> Endpoint:
    from pdkv.rpc.transport import Endpoint

    return Endpoint(config.bind, config.advertise)


prefill = config_command(
    PrefillConfig,
    run_prefill,
    doc="""Serve as a **prefill** node: compute prompts in chunks and let decode nodes pull the pages.

    Example:

    `pdkv prefill --node-id p0 --model tiny --chunk-tokens 512 --bind 0.0.0.0:7000 --advertise p0.fleet --insecure`
    """,
)
decode = config_command(
    DecodeConfig,
    run_decode,
    doc="""Serve as a **decode** node: pull the pages that are missing, prove them, decode.

    Example:

    `pdkv decode --node-id d0 --model tiny --prefill-addresses p0.fleet:7000 --bind 127.0.0.1:7001 --insecure`
    """,
)
router = config_command(
    RouterConfig,
    run_router,
    doc="""Serve as a **router**: give each request a prefill and a decode node.

    Prefill goes where most of the prompt is cached, and by load; decode where there is room.

    Example:

    `pdkv router --prefill-addresses p0:7000 --decode-addresses d0:7001,d1:7001 --bind 127.0.0.1:8000 --insecure`
    """,
)
