"""Sparse attention's two caches through vLLM's own allocation: GLM-5-like layers, main rows of 656 bytes in all of
them, indexer rows of 132 bytes in some. No kernel of it runs on CPU, so bytes are written by hand; who groups the
layers, plans the cache and cuts it into views is vLLM.

Guarantees: what is compared at the end is read from vLLM's tensors, not through pdkv.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from pdkv.adapters.vllm.facts import Allocated, contract_of
from pdkv.adapters.vllm.memory import engine_pool, layer_caches, row_order
from pdkv.adapters.vllm.orders import Hold, Load, Prompt, StepOrders
from pdkv.adapters.vllm.settings import Settings
from pdkv.adapters.vllm.worker import Identity, Results, WorkerSide
from pdkv.geometry.page_layout import Group
from pdkv.ids import NodeId

LAYERS, INDEXED, TOKENS, BLOCKS = 6, (0, 1, 4), 64, 12
PAGE_BYTES = TOKENS * (LAYERS * 656 + len(INDEXED) * 132)


def _specs() -> dict[str, MLAAttentionSpec]:
    common: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "max_tp_shards": 1, "dtype": torch.uint8}
    main = {"head_size": 576, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
    specs = {f"model.layers.{i}.self_attn.attn": MLAAttentionSpec(**common, **main) for i in range(LAYERS)}
    for i in INDEXED:
        specs[f"model.layers.{i}.self_attn.indexer.k_cache"] = MLAAttentionSpec(
            **common, head_size=132, cache_role=SparseCacheRole.INDEXER
        )
    return specs


class Side:
    """A worker side over a cache that vLLM has planned and allocated in this layout."""

    def __init__(self, model: Path, layout: KVCacheLayout, name: str, seed: int) -> None:
        config = EngineArgs(
            model=str(model), dtype="float32", block_size=TOKENS, enforce_eager=True
        ).create_engine_config()
        config.cache_config.kv_cache_layout = layout.name
        planned = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, _specs()), BLOCKS * PAGE_BYTES)
        self.groups, self.blocks = len(planned.transfer_groups), planned.num_blocks
        self.tensors = allocate_kv_cache(planned, torch.device("cpu"), layout)
        made = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=made, dtype=torch.uint8))
        caches = layer_caches(self.tensors, planned.transfer_groups[0])
        pool = engine_pool(caches, self.blocks, TOKENS)
        self.page_bytes, self.placement = pool.fmt.page_bytes, pool.placement.kind
        self.index_bytes = pool.fmt.group_length(Group.INDEX)
        have = Allocated(pool, row_order(caches, self.blocks), ["FLASHMLA_SPARSE"], "0.32.0")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        contract = contract_of(config, have)
        self.side = WorkerSide(Settings(host="127.0.0.1", port=self.port), Identity(NodeId(name), 0, contract), pool)

    def block(self, number: int) -> list[bytes]:
        return [tensor[number].contiguous().view(torch.uint8).numpy().tobytes() for tensor in self.tensors.values()]


def run(model: Path) -> dict[str, Any]:
    """Pages from an engine whose layers lie apart into one whose blocks are packed."""
    p, d = Side(model, KVCacheLayout.LBHNC, "p", 1), Side(model, KVCacheLayout.BLHNC, "d", 2)
    try:
        prompt = Prompt(np.arange(3 * TOKENS, dtype=np.uint64))
        p.side.begin(StepOrders(holds=[Hold("r", prompt, (3, 7, 5))]))
        d.side.begin(StepOrders(loads=[Load("r", prompt, (2, 4, 9), 0, "127.0.0.1", p.port)]))
        done, ends_s = Results(), time.monotonic() + 60
        while not done.received and time.monotonic() < ends_s:
            done = d.side.results()
            os.sched_yield()
        equal = [p.block(theirs) == d.block(mine) for theirs, mine in ((3, 2), (7, 4), (5, 9))]
        return {
            "groups": p.groups,
            "page_bytes": [p.page_bytes, d.page_bytes, PAGE_BYTES],
            "index_bytes": p.index_bytes,
            "placements": [p.placement, d.placement],
            "received": sorted(done.received - done.failed),
            "equal_blocks": sum(equal),
            "others_untouched": p.block(1) != d.block(1),
        }
    finally:
        p.side.close()
        d.side.close()
