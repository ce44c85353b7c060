"""All checks of one node, in the order in which a reader wants them.

Guarantees: each check runs whatever the others found; UCX is started in a process of its own; torch and transformers
are imported only for a pool on a device, and to ask peers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pdkv.cli.doctor import network, system
from pdkv.cli.doctor.finding import Finding, fail, ok
from pdkv.cli.doctor.needs import Needs, needs_of
from pdkv.config import DecodeConfig, NodeConfig
from pdkv.contract import Contract
from pdkv.discovery.finder import found_now, source_by
from pdkv.errors import DiscoveryFailed, PdkvError
from pdkv.machine import resources
from pdkv.machine.devices import Devices, devices
from pdkv.transfer.backends.ucx_probe import UcxFacts, ask_ucx
from pdkv.transfer.backends.ucx_settings import allow, tuning


def this_machine(config: NodeConfig) -> list[Finding]:
    """Raises `ConfigError` for a model or pool that can't be."""
    allow(tls=config.ucx_tls, net_devices=config.net_devices)
    needs, found, process = needs_of(config), devices(), resources.process()
    facts = _ucx()
    known = None if isinstance(facts, str) else frozenset(transport for transport, _ in facts.resources)
    memory = resources.memory()
    return [
        system.pool(needs, memory),
        system.huge_pages(needs, memory),
        system.numa(needs, found),
        system.memlock(needs, process, found),
        system.copying(process, known, needs.ucx_tls),
        network.rdma(needs, found),
        network.ucx(facts, needs, found),
        *network.settings(tuning(found, os.environ), process),
        *(_gpu(needs, found) if needs.on_device else ()),
    ]


async def peers(config: NodeConfig, words: Sequence[str]) -> list[Finding]:
    """Of nodes that are asked over the network, by their addresses or where they are found.

    Raises `ConfigError` unless TLS files or plain text were asked for.
    """
    from pdkv.cli.doctor.peers import Visited, contracts, lane, state, visit
    from pdkv.rpc.client import GrpcDirectory

    findings, addresses = await _found(config, words)
    visited = []
    needs, found = needs_of(config), devices()
    directory = GrpcDirectory(config.security())
    try:
        for address in addresses:
            answer = await visit(directory, address)
            if isinstance(answer, Visited):
                visited.append(answer)
                findings.append(state(answer))
            else:
                findings.append(answer)
    finally:
        await directory.close()
    findings += contracts(_own_contract(config), visited)
    findings += [await lane(peer, needs, found) for peer in visited]
    return findings


async def _found(config: NodeConfig, words: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Of each place what it comes to, and all addresses."""
    make = source_by(config.dns_server if isinstance(config, DecodeConfig) else "")
    findings: list[Finding] = []
    addresses: list[str] = []
    for word in words:
        try:
            found = await found_now((word,), make)
        except DiscoveryFailed as error:
            findings.append(fail("discovery", str(error), "see the name, and that DNS or the API server answers here"))
            continue
        if found != (word,):
            findings.append(ok("discovery", f"{word} finds {', '.join(found) or 'nobody'}"))
        addresses += found
    return findings, list(dict.fromkeys(addresses))


def _ucx() -> UcxFacts | str:
    try:
        return ask_ucx()
    except PdkvError as error:
        return str(error)


def _gpu(needs: Needs, found: Devices) -> Iterator[Finding]:
    from pdkv.cli.doctor import gpu

    card = gpu.look(needs.device)
    yield gpu.gpu(needs, card)
    yield network.gpu_transports(needs)
    if not isinstance(card, str):
        yield gpu.nearest_nic(needs, card, found)
        yield from gpu.gpudirect(card, found)


def _own_contract(config: NodeConfig) -> Contract | None:
    """None unless a model was named: the default is only for trying things out."""
    if "model" not in config.model_fields_set:
        return None
    from pdkv.cli.assemble import described_contract

    return described_contract(config)
