"""vLLM's connector interface, and nothing else: the one file that imports vLLM.

Guarantees: every hook returns at once; vLLM is neither patched nor copied. Its version was checked by whoever imports
this (`pdkv.adapters.vllm`), before what such a version may lack is imported here; and by `contract_of` once more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from pdkv.adapters.vllm.facts import Allocated, contract_of
from pdkv.adapters.vllm.memory import engine_pool, layer_caches, row_order
from pdkv.adapters.vllm.orders import StepOrders
from pdkv.adapters.vllm.scheduler import Engine, SchedulerSide
from pdkv.adapters.vllm.settings import settings_of, worker_id
from pdkv.adapters.vllm.tally import NAMES, WITH_KIND
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.adapters.vllm.worker import WorkerSide

log = logging.getLogger(__name__)


@dataclass
class PdkvMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step, from the scheduler to the workers."""

    orders: StepOrders = field(default_factory=StepOrders)


class PdkvStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of `tally.NAMES` since the last step, of one worker or of several."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: PdkvStats) -> PdkvStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PdkvMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """vllm:pdkv_NAME_total, with vLLM's own labels and, for what has kinds, `kind`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        self._counters = {
            name: self._counter_cls(f"vllm:pdkv_{name}", words, [*labels, *(["kind"] if name in WITH_KIND else [])])
            for name, words in NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        own = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, _, kind = key.partition("/")
            self._counters[name].labels(*own, *([kind] if kind else [])).inc(value)


class PdkvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Either half of it, by role."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self._config, self._caches = vllm_config, kv_cache_config
        transfer = vllm_config.kv_transfer_config
        said, parallel = settings_of(transfer.kv_connector_extra_config), vllm_config.parallel_config
        first = said.port + parallel.data_parallel_index * parallel.tensor_parallel_size
        self._settings = replace(said, port=first)
        worker_id(transfer.engine_id, parallel.tensor_parallel_size - 1)  # else it would be refused by every peer
        _require_one_full_group(kv_cache_config.transfer_groups)
        self._worker: WorkerSide | None = None
        self._bad_blocks: set[int] = set()
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            engine = Engine(
                transfer.engine_id,
                self._settings.host,
                self._settings.port,
                parallel.tensor_parallel_size,
                kv_cache_config.transfer_groups[0].kv_cache_spec.block_size,
                str(vllm_config.lora_config.lora_dtype) if vllm_config.lora_config is not None else "",
            )
            self._scheduler = SchedulerSide(engine)

    # --- the scheduler's half --------------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._caches.transfer_group_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduling.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, self._of_group(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PdkvMetadata:
        return PdkvMetadata(self._scheduling.orders())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._scheduling.finished(request, block_ids, completed=completed)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, self._of_group(block_ids))

    # --- a worker's half -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # here, so that no process but a worker has gRPC and NIXL, and none has them when it is forked
        from pdkv.adapters.vllm.worker import Identity, WorkerSide

        blocks, group = self._caches.num_blocks, self._caches.transfer_groups[0]
        caches = layer_caches(kv_caches, group)
        pool = engine_pool(caches, blocks, group.kv_cache_spec.block_size)
        have = Allocated(pool, row_order(caches, blocks), self._backends(), vllm.__version__)
        settings = self._settings
        contract = contract_of(self._config, have, weights_id=settings.weights_id, shadow=settings.shadow)
        rank = int(get_tensor_model_parallel_rank())
        node_id = worker_id(self._config.kv_transfer_config.engine_id, rank)
        self._worker = WorkerSide(settings, Identity(node_id, rank, contract), pool)
        log.info("%s: %d blocks of %d B, %s; %s", node_id, blocks, pool.fmt.page_bytes, contract.placement, contract)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, PdkvMetadata):
            self._worker.begin(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Blocks that failed are told by number; vLLM keeps those before the first of them."""
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.results()
        self._bad_blocks = results.bad_blocks
        return KVConnectorTransferResults(finished_sending=results.sent, finished_recving=results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._bad_blocks

    def get_kv_connector_stats(self) -> PdkvStats | None:
        counts = self._worker.tally.take() if self._worker is not None else {}
        return PdkvStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdkvStats:
        return PdkvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PdkvMetrics:
        return PdkvMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError("role of this half of the connector", "worker", "scheduler")
        return self._scheduler

    def _of_group(self, block_ids: tuple[list[int], ...]) -> list[int]:
        return list(self._caches.select_transfer_block_ids(block_ids)[0])

    def _backends(self) -> list[str]:
        return [str(backend.get_name()) for backend in get_current_attn_backends(self._config)]


with suppress(ValueError):  # somebody has registered the name already
    # MultiConnector finds the statistics of its parts by name only, whatever module path was said for them
    KVConnectorFactory.register_connector("PdkvConnector", "pdkv.adapters.vllm", "PdkvConnector")


def _require_one_full_group(groups: Sequence[Any]) -> None:
    """Other layers give blocks back while their request runs, or keep a state in them that no chain of tokens names."""
    specs = [
        spec for g in groups for spec in getattr(g.kv_cache_spec, "kv_cache_specs", {"": g.kv_cache_spec}).values()
    ]
    if len(groups) != 1 or not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ConfigError(
            "groups of layers with blocks of their own", f"{len(groups)}: {kinds}", "one, of full attention"
        )


def _log_as_vllm_does() -> None:
    """Where nobody has said otherwise: vLLM sets up its own logger and no other."""
    ours, theirs = logging.getLogger("pdkv"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
