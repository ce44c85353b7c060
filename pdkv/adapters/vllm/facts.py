"""What two engines must agree on, from what vLLM is configured to and has allocated.

Guarantees: everything that determines the bytes of a block is in the contract's content: the model and its weights, the
order of the bytes within a block, layer by layer, the backend that writes them, the cache's dtype, the block size; and
vLLM's version up to its second number, because how a backend packs a block is vLLM's own affair. Another version than
those it was tested with is refused, by name.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pdkv import __version__
from pdkv.contract import HASH_ALGORITHM, PROTOCOL_MAJOR, PROTOCOL_MINOR, SEED_RULE, Contract, Topology
from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.kvcache.pool import SlotPool

SUPPORTED = ("0.32",)
"""Versions of vLLM whose connector interface this is written for and tested with."""
SHADOW_SEED_RULE = "pdkv-1 shadow(extra_key, cache_salt)"
"""Two nodes whose contracts may differ name pages without it."""
SAMPLES, SAMPLE_BYTES = 64, 64 << 10
"""Of each weight file, for `directory_id`."""


class ModelConfig(Protocol):
    """vLLM's, as far as it is needed; so are the others."""

    model: str
    revision: str | None
    dtype: object
    quantization: object
    hf_config: Any

    def get_vocab_size(self) -> int: ...
    def get_total_num_hidden_layers(self) -> int: ...


class CacheConfig(Protocol):
    block_size: int
    cache_dtype: object


class ParallelConfig(Protocol):
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_index: int


class SpeculativeConfig(Protocol):
    method: str | None
    num_speculative_tokens: int | None
    model: str | None


class VllmConfig(Protocol):
    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | None


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the engine has made of its configuration."""

    pool: SlotPool
    row_order: str
    """See `memory.row_order`."""
    backends: Sequence[str]
    """Names of the attention backends that write rows."""
    version: str
    """Of vLLM."""


def require_supported(version: str) -> str:
    """The first two numbers. Raises `ConfigError` for a version that this wasn't tested with."""
    found = re.match(r"\d+\.\d+", version)
    if not found or found[0] not in SUPPORTED:
        raise ConfigError("vLLM's version", version, " or ".join(f"{v}.x" for v in SUPPORTED) + ", or another pdkv")
    return found[0]


def contract_of(config: VllmConfig, have: Allocated, *, weights_id: str = "", shadow: bool = False) -> Contract:
    """Raises `ConfigError` for what can't be told, or isn't supported."""
    model, cache, fmt = config.model_config, config.cache_config, have.pool.fmt
    indexed = {s.layer for s in fmt.group_segments(Group.INDEX)}
    layers = sorted({s.layer for s in fmt.segments})
    total = model.get_total_num_hidden_layers()
    writer = "+".join(sorted(set(have.backends))) or "unknown"
    return Contract(
        architecture=", ".join(getattr(model.hf_config, "architectures", None) or ["unknown"]),
        weights_id=weights_id or f"{weights_of(model)}/{model.dtype}/{model.quantization or 'plain'}",
        vocab_size=model.get_vocab_size(),
        num_layers=total,
        indexer_types=tuple("full" if layer in indexed else "shared" for layer in layers) if indexed else (),
        draft_layers=sum(layer >= total for layer in layers),
        main_row_format=f"vllm {require_supported(have.version)} {writer} {cache.cache_dtype}",
        main_row_bytes=fmt.main_row.row_bytes,
        main_row_parts=have.row_order[:1024],
        scale_rule="vllm",
        rope_dtype=str(model.dtype),
        rope_order="vllm",
        index_row_bytes=fmt.index_row.row_bytes,
        index_order="vllm",
        index_kpool=1,
        index_topk=int(getattr(model.hf_config, "index_topk", None) or 0),
        page_tokens=fmt.page_tokens,
        segments=tuple((s.name, s.length) for s in fmt.segments),
        hash_algorithm=HASH_ALGORITHM,
        bigram=False,
        seed_rule=SHADOW_SEED_RULE if shadow else SEED_RULE,
        **_draft(config.speculative_config),
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        topology=_topology(config.parallel_config),
        placement=have.pool.placement.kind,
        digest_algorithms=("xxh3_64",),
        version=__version__,
        lane="",
        host=platform.node(),
        gpu="" if have.pool.memory.memory == "DRAM" else str(have.pool.memory.device),
        engine=f"vllm {have.version}",
    )


def weights_of(model: ModelConfig) -> str:
    """ "revision:..." of a model of the hub, or "sampled:..." of a directory, see `directory_id`."""
    directory = Path(model.model)
    if directory.is_dir():
        return directory_id(directory)
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not revision:
        raise ConfigError("weights_id", "", f"a name for the weights of {model.model}: it has no revision")
    return f"revision:{model.model}@{revision}"


def directory_id(directory: Path) -> str:
    """ "sampled:" and 32 hex digits: of the config, and of names, lengths and 64 samples of 64 KiB of all weight files.

    Weights that differ anywhere but between the samples have another id; those that do only there share it, which the
    digest of no page would show: name them by `weights_id`. Raises `ConfigError` for a directory without weights.
    """
    running = hashlib.sha256()
    config = directory / "config.json"
    running.update(config.read_bytes() if config.is_file() else b"")
    files = sorted(p for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for p in directory.glob(pattern))
    if not files:
        raise ConfigError("weights_id", str(directory), "a directory with weights, or a name for them")
    for path in files:
        size = path.stat().st_size
        running.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            step = max(1, (size - SAMPLE_BYTES) // (SAMPLES - 1))
            for at in range(0, size, max(step, SAMPLE_BYTES)):
                file.seek(at)
                running.update(file.read(SAMPLE_BYTES))
    return f"sampled:{running.hexdigest()[:32]}"


def _draft(config: SpeculativeConfig | None) -> dict[str, Any]:
    """vLLM's drafters with layers of their own keep them in the same blocks; others need nothing of a peer's."""
    method = str(config.method) if config is not None else ""
    drafting = "mtp" if "mtp" in method else "eagle" if "eagle" in method else "none"
    tokens = int(config.num_speculative_tokens or 0) if config is not None and drafting != "none" else 0
    return {
        "speculation": drafting,
        "eagle_rule": "none" if drafting == "none" else "drop_page",
        "rollback_tokens": tokens,
        "draft_tokens": tokens,
        "draft_topk": min(tokens, 1),
        "index_sharing": False,
    }


def _topology(config: ParallelConfig) -> Topology:
    """Each worker reads from the one of its own rank, so groups must be equal; `topology` alone would let others
    pass."""
    if config.decode_context_parallel_size > 1:
        raise ConfigError("decode_context_parallel_size", config.decode_context_parallel_size, "1")
    if config.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, "1")
    return Topology(tp=config.tensor_parallel_size)
