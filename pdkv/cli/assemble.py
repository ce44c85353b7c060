"""Builds a node from its configuration: model, pool, contract, tree, transfer engine, in this order.

Guarantees: the contract's layer lists come from the layers that the engine built, and the pool's segments from the same
lists; the transfer engine, which is the first part with a thread, starts only when the others could be made; what the
contract says of drafting is what is effective, not what was asked for.
"""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

import torch

from pdkv import __version__
from pdkv.adapters.reference.engine import ENGINE_NAME, ReferenceEngine
from pdkv.adapters.reference.model import DescribedModel, LoadedModel, describe_model, load_model
from pdkv.adapters.reference.mtp import MtpDrafter
from pdkv.adapters.synthetic import engine as synthetic
from pdkv.config import DecodeConfig, NodeConfig
from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import PageFormat, page_format
from pdkv.ids import NodeId, PeerName, new_incarnation
from pdkv.kvcache.eviction import eviction_order
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.machine.affinity import Affinity, affinity
from pdkv.machine.devices import devices
from pdkv.machine.resources import numa_nodes
from pdkv.node.base import NodeParts
from pdkv.node.fault_plan import FaultPlan
from pdkv.node.flow import Worker
from pdkv.node.oracle import Oracle
from pdkv.node.ports import Drafter
from pdkv.transfer.backends import backend_factory
from pdkv.transfer.backends.base import BackendFactory
from pdkv.transfer.backends.ucx_settings import NET_DEVICES, allow
from pdkv.transfer.engine import TransferEngine
from pdkv.transfer.orders import TransferSettings

log = logging.getLogger(__name__)
Model = LoadedModel | synthetic.SyntheticModel
AnyEngine = ReferenceEngine | synthetic.SyntheticEngine


def build_parts(config: NodeConfig) -> NodeParts:
    """Raises `ConfigError` naming the field that can't be used."""
    model = _synthetic_of(config) if config.engine == synthetic.ENGINE_NAME else model_of(config)
    return parts_of(config, model, page_format(model.shape, main_row=config.main_row))


def parts_of(config: NodeConfig, model: Model, fmt: PageFormat) -> NodeParts:
    """With pages of that format, which fits the model. Raises as `build_parts`."""
    if config.threads:
        torch.set_num_threads(config.threads)
    faults = FaultPlan.parse(config.fault_plan)
    place = _place(config)
    pool = _pool(config, fmt, place.node)
    engine = _engine_of(config, model, pool)
    contract = contract_of(config, model, fmt)
    name = PeerName(NodeId(config.node_id), new_incarnation())
    return NodeParts(
        name=name,
        contract=contract,
        pool=pool,
        manager=CacheManager(pool, order=eviction_order(config.eviction)),
        verifier=Verifier(pool, config.digest),
        transfer=_transfer(config, name, faults, pool, place.cpus),
        engine=engine,
        steps=Worker("engine"),
        digests=Worker("digests"),
        drafter=drafter_of(config, contract, model, engine),
        at=faults.hook(),
    )


def model_of(config: NodeConfig) -> LoadedModel:
    """With its draft layer if that is what drafts."""
    return load_model(config.model, **_model_settings(config))


def described_contract(config: NodeConfig) -> Contract:
    """The contract that a node of this configuration would have, without loading its model. Raises `ConfigError`."""
    model: Model | DescribedModel
    if config.engine == synthetic.ENGINE_NAME:
        model = _synthetic_of(config)
    else:
        model = describe_model(config.model, **_model_settings(config))
    return contract_of(config, model, page_format(model.shape, main_row=config.main_row))


def _model_settings(config: NodeConfig) -> dict[str, Any]:
    layers = int(config.speculation == "mtp")
    return {"seed": config.seed, "indexer_types": config.indexer_types, "draft_layers": layers}


def _synthetic_of(config: NodeConfig) -> synthetic.SyntheticModel:
    if config.speculation == "mtp":
        raise ConfigError("speculation", config.speculation, "none or oracle: a synthetic engine has no draft layer")
    return synthetic.synthetic_model(config.model, seed=config.seed, indexer_types=config.indexer_types)


def _engine_of(config: NodeConfig, model: Model, pool: SlotPool) -> AnyEngine:
    if isinstance(model, LoadedModel):
        return ReferenceEngine(model, pool)
    return synthetic.SyntheticEngine(model, pool, token_us=config.synthetic_token_us)


def drafter_of(config: NodeConfig, contract: Contract, model: Model, engine: AnyEngine) -> Drafter | None:
    """An oracle drafts on the engine, a draft layer in its pool; None without speculation."""
    if config.speculation == "mtp" and isinstance(model, LoadedModel) and isinstance(engine, ReferenceEngine):
        return MtpDrafter(model, engine.pool, topk=contract.draft_topk, index_sharing=contract.index_sharing)
    if config.speculation == "oracle":
        return Oracle(engine, contract.vocab_size, acceptance=config.oracle_acceptance, seed=config.seed)
    return None


def contract_of(config: NodeConfig, model: Model | DescribedModel, fmt: PageFormat) -> Contract:
    """A node that doesn't check digests still reads from one that makes them; one that makes none is found out."""
    unchecked = config.digest == "none"
    facts = ContractFacts(
        weights_id=model.weights_id,
        **_draft_facts(config),
        placement=config.placement,
        digest_algorithms=("xxh3_64", "none") if unchecked and isinstance(config, DecodeConfig) else (config.digest,),
        version=__version__,
        host=platform.node(),
        gpu=torch.cuda.get_device_name() if config.device.startswith("cuda") else "",
        engine=synthetic.ENGINE_NAME if isinstance(model, synthetic.SyntheticModel) else ENGINE_NAME,
    )
    return build_contract(model.shape, fmt, identity=facts)


def _draft_facts(config: NodeConfig) -> dict[str, Any]:
    """What the contract says of drafting. An engine that drafts by itself is known by its rule."""
    if config.speculation == "none":
        spoken = "none" if config.eagle_rule == "none" else "eagle"
        return {"speculation": spoken, "eagle_rule": config.eagle_rule, "rollback_tokens": config.rollback_tokens}
    facts: dict[str, Any] = {
        "speculation": config.speculation,
        "eagle_rule": config.eagle_rule,
        "rollback_tokens": config.draft_tokens,
        "draft_tokens": config.draft_tokens,
    }
    if config.speculation == "mtp":
        sharing = config.index_sharing and config.draft_topk == 1
        facts |= {"eagle_rule": "bigram", "draft_topk": config.draft_topk, "index_sharing": sharing}
    return facts


def _place(config: NodeConfig) -> Affinity:
    """UCX reads its settings from the environment when the agent is made; what the operator set there wins."""
    allow(tls=config.ucx_tls, net_devices=config.net_devices)
    used = os.environ.get(NET_DEVICES) or ",".join(config.rails)
    place = affinity(config.numa_node, devices(), numa_nodes(), used)
    log.info("NUMA: %s (%s)", "not bound" if place.node is None else f"node {place.node}", place.why)
    return place


def _pool(config: NodeConfig, fmt: PageFormat, node: int | None) -> SlotPool:
    """Its memory bound before it is touched."""
    pool = SlotPool.create(
        fmt,
        config.total_pages(fmt.page_bytes),
        placement=config.placement,
        memory=config.memory,
        path=config.memory_path or None,
        device=config.device,
    )
    if node is not None:
        pool.memory.bind(node)
    if config.touch_pool:
        pool.memory.commit()
    return pool


def rails_of(config: NodeConfig) -> dict[str, BackendFactory]:
    """What makes the backends of each rail, by device. Raises `ConfigError` for devices that can't all be rails.

    The environment's devices would be those of every rail's agents: NIXL doesn't let a rail's own go before them.
    """
    others = os.environ.get(NET_DEVICES) or config.net_devices
    if len(set(config.rails)) < len(config.rails) or (config.rails and others):
        given = ",".join(config.rails) + (f" with net_devices or {NET_DEVICES} {others}" if others else "")
        raise ConfigError("rails", given, f"each device once, and then neither net_devices nor {NET_DEVICES}")
    return {device: backend_factory(config.backend, device) for device in config.rails or ("",)}


def _transfer(
    config: NodeConfig, name: PeerName, faults: FaultPlan, pool: SlotPool, cpus: frozenset[int]
) -> TransferEngine:
    settings = TransferSettings(
        read_max_bytes=config.read_max_bytes,
        require_rdma=config.require_rdma,
        fence_after_s=config.fence_after_s,
        cpus=cpus,
    )
    engine = TransferEngine(faults.backends(rails_of(config)), name, pool.map(), settings=settings)
    facts = pool.memory.facts() | {"registered": str(engine.status().registration)}
    log.info("pool: %s", "; ".join(f"{what}: {words}" for what, words in facts.items()))
    return engine
