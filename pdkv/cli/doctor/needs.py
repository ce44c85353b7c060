"""What a node is going to need, from its configuration alone.

Guarantees: figures are those that the node itself will use; no weight is loaded, and neither torch nor transformers
imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from pdkv.config import DecodeConfig, NodeConfig
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.kvcache.page_table import ROW_BYTES


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one node."""

    pages: int
    """Of the pool, with the write sink."""
    page_bytes: int
    memory: str
    """Kind of the pool's memory."""
    memory_path: str
    device: str
    offload_bytes: int
    """Host memory for requests that give way; 0 unless they do so by offloading."""
    ucx_tls: str
    """UCX_TLS as it will be in force; empty: all."""
    net_devices: str
    """UCX_NET_DEVICES, likewise."""
    require_rdma: bool
    numa_node: str

    @property
    def pool_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the node commits: pool, page table, copies of pages."""
        pool = 0 if self.on_device or self.memory in ("file", "hugetlb") else self.pool_bytes
        return pool + self.pages * ROW_BYTES + self.offload_bytes

    @property
    def on_device(self) -> bool:
        return self.device != "cpu"


def needs_of(config: NodeConfig) -> Needs:
    """Raises `ConfigError` for a model or pool that can't be."""
    shape = model_shape(load_config(config.model), draft_layers=int(config.speculation == "mtp"))
    built = replace(shape, indexer_types=config.indexer_types or shape.indexer_types)
    page_bytes = page_format(built, main_row=config.main_row).page_bytes
    offloads = isinstance(config, DecodeConfig) and config.preempt == "offload"
    return Needs(
        pages=config.total_pages(page_bytes),
        page_bytes=page_bytes,
        memory=config.memory,
        memory_path=config.memory_path,
        device=config.device,
        offload_bytes=config.offload_bytes if isinstance(config, DecodeConfig) and offloads else 0,
        ucx_tls=os.environ.get("UCX_TLS", config.ucx_tls),
        net_devices=os.environ.get("UCX_NET_DEVICES", config.net_devices or ",".join(config.rails)),
        require_rdma=config.require_rdma,
        numa_node=config.numa_node,
    )
