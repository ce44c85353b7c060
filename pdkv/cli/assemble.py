"""Builds a node from its configuration: model, pool, contract, tree, transfer engine, in this order.

Guarantees: the contract's layer lists come from the layers that the engine built, and the pool's segments from the same
lists; the transfer engine, which is the first part with a thread, starts only when the others could be made.
"""

from __future__ import annotations

import os
import platform

import torch

from pdkv import __version__
from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel, load_model
from pdkv.config import DecodeConfig, NodeConfig
from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import PageFormat, page_format
from pdkv.ids import NodeId, PeerName, new_incarnation
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.flow import Worker
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.engine import TransferEngine
from pdkv.transfer.orders import TransferSettings


def build_parts(config: NodeConfig) -> NodeParts:
    """Raises `ConfigError` naming the field that can't be used."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.draft_layers:
        raise ConfigError("draft_layers", config.draft_layers, "0: transformers' model builds no draft layer")
    model = load_model(config.model, seed=config.seed, indexer_types=config.indexer_types)
    fmt = page_format(model.shape, main_row=config.main_row)
    pool = SlotPool.create(
        fmt,
        config.total_pages(fmt.page_bytes),
        placement=config.placement,
        memory=config.memory,
        path=config.memory_path or None,
        device=config.device,
    )
    engine = ReferenceEngine(model, pool)
    name = PeerName(NodeId(config.node_id), new_incarnation())
    return NodeParts(
        name=name,
        contract=contract_of(config, model, fmt),
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, config.digest),
        transfer=_transfer(config, name, pool),
        engine=engine,
        steps=Worker("engine"),
        digests=Worker("digests"),
    )


def contract_of(config: NodeConfig, model: LoadedModel, fmt: PageFormat) -> Contract:
    """A node that doesn't check digests still reads from one that makes them; one that makes none is found out."""
    unchecked = config.digest == "none"
    facts = ContractFacts(
        weights_id=model.weights_id,
        speculation="none" if config.eagle_rule == "none" else "eagle",
        eagle_rule=config.eagle_rule,
        rollback_tokens=config.rollback_tokens,
        placement=config.placement,
        digest_algorithms=("xxh3_64", "none") if unchecked and isinstance(config, DecodeConfig) else (config.digest,),
        version=__version__,
        host=platform.node(),
        gpu=torch.cuda.get_device_name() if config.device.startswith("cuda") else "",
    )
    return build_contract(model.shape, fmt, identity=facts)


def _transfer(config: NodeConfig, name: PeerName, pool: SlotPool) -> TransferEngine:
    """UCX reads its settings from the environment when the agent is made; what the operator set there wins."""
    for variable, value in (("UCX_TLS", config.ucx_tls), ("UCX_NET_DEVICES", config.net_devices)):
        if value:
            os.environ.setdefault(variable, value)
    settings = TransferSettings(read_max_bytes=config.read_max_bytes, require_rdma=config.require_rdma)
    return TransferEngine(backend_factory(config.backend), name, pool.map(), settings=settings)
