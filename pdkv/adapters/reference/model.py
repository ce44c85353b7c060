"""transformers' own GLM-5-class model, from a preset with seeded weights or from a checkpoint directory.

Guarantees: the modules are transformers', unmodified; the same (preset, seed, indexer types, dtype) gives the same
bytes of weights in every process and on every machine, whatever the order of construction, and leaves torch's global
random state alone; a checkpoint is used only if it holds every weight; `weights_id` differs whenever a weight could.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdkv.errors import ConfigError, MissingDependency
from pdkv.geometry.model_config import FULL, PRESETS, SHARED, ModelShape, load_config, model_shape

try:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
        GlmMoeDsaDecoderLayer,
        GlmMoeDsaForCausalLM,
        GlmMoeDsaRMSNorm,
    )
except ImportError as e:
    raise MissingDependency("transformers", "the reference engine", extra="reference") from e

ARCHITECTURE = "GlmMoeDsaForCausalLM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SEEDED_PARAMETERS = 500_000_000
"""Seeded weights are for small presets: a real one would fill the memory with noise."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what its pages depend on."""

    module: Any
    """A `GlmMoeDsaForCausalLM` in evaluation mode."""
    shape: ModelShape
    """`indexer_types` are those of the layers as built, and so is the number of draft layers."""
    weights_id: str
    """"revision:..." or "sha256:...", with the dtype that the weights were turned into."""

    draft: Any = None
    """A `DraftHead` in evaluation mode, or None."""

    @property
    def max_positions(self) -> int:
        return int(self.module.config.max_position_embeddings)


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model that isn't loaded."""

    shape: ModelShape
    weights_id: str


def load_model(
    source: str | Path,
    *,
    seed: int = 0,
    indexer_types: tuple[str, ...] | None = None,
    dtype: str = "float32",
    draft_layers: int = 0,
) -> LoadedModel:
    """A preset's name gives weights made from `seed`; a directory gives its checkpoint (`seed` is then not used).

    `indexer_types` overrides the config's list ("full" or "shared" a layer). One draft layer can be had with a preset;
    transformers builds none and reads none from a checkpoint. Raises `ConfigError` for an unknown preset, dtype or
    architecture, a config that transformers refuses, a checkpoint with missing or misshapen weights, a preset too large
    to fill with noise, more than one draft layer or one of a checkpoint.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, ", ".join(DTYPES))
    config, shape = _checked(source, indexer_types, draft_layers)
    settings = _settings(config, shape)
    draft: Any = None
    if str(source) in PRESETS:
        module = _seeded(settings, seed, DTYPES[dtype])
        if draft_layers:
            longer = {**config, "num_hidden_layers": shape.num_layers + 1}
            longer["mlp_layer_types"] = [*settings.mlp_layer_types, "sparse"]
            longer_shape = replace(shape, indexer_types=(*shape.indexer_types, FULL))
            draft = _seeded_draft(_settings(longer, longer_shape), seed, DTYPES[dtype])
    else:
        module = _from_checkpoint(Path(source), settings, DTYPES[dtype])
    module.eval().requires_grad_(False)
    built = replace(shape, indexer_types=_built_indexer_types(module), draft_layers=int(draft is not None))
    return LoadedModel(module, built, f"{_weights_id(source, config, seed, built.draft_layers)}/{dtype}", draft)


def describe_model(
    source: str | Path,
    *,
    seed: int = 0,
    indexer_types: tuple[str, ...] | None = None,
    dtype: str = "float32",
    draft_layers: int = 0,
) -> DescribedModel:
    """What `load_model` would say of itself, without a weight made or loaded: layers are what the config asks for."""
    config, shape = _checked(source, indexer_types, draft_layers)
    return DescribedModel(shape, f"{_weights_id(source, config, seed, draft_layers)}/{dtype}")


def _checked(
    source: str | Path, indexer_types: tuple[str, ...] | None, draft_layers: int
) -> tuple[dict[str, Any], ModelShape]:
    config = load_config(source)
    if indexer_types is not None:
        config["indexer_types"] = list(indexer_types)
    shape = model_shape(config, draft_layers=draft_layers)
    if shape.architecture != ARCHITECTURE:
        raise ConfigError("architectures", shape.architecture, ARCHITECTURE)
    if draft_layers not in (0, 1) or (draft_layers and str(source) not in PRESETS):
        raise ConfigError("draft_layers", draft_layers, "0, or 1 with a preset: none is read from a checkpoint")
    return config, shape


def _weights_id(source: str | Path, config: Mapping[str, Any], seed: int, draft_layers: int) -> str:
    if str(source) not in PRESETS:
        return _checkpoint_id(Path(source), config)
    facts = {"config": config, "seed": seed, "init": INIT_VERSION}
    return _digest(facts | ({"draft_init": DRAFT_INIT_VERSION} if draft_layers else {}))


class DraftHead(torch.nn.Module):
    """The weights of an MTP layer, named as in checkpoints, but for `model.layers.N.` and what is in `layer`."""

    def __init__(self, settings: Any, layer: int) -> None:
        super().__init__()
        width, eps = settings.hidden_size, settings.rms_norm_eps
        self.enorm = GlmMoeDsaRMSNorm(width, eps)
        self.hnorm = GlmMoeDsaRMSNorm(width, eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(settings, layer)
        self.norm = GlmMoeDsaRMSNorm(width, eps)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the layer, [..., width], from the embeddings of the tokens after and the hidden states."""
        x: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return x


def _settings(config: Mapping[str, Any], shape: ModelShape) -> Any:
    try:
        settings = GlmMoeDsaConfig(**{**config, "indexer_types": list(shape.indexer_types)})
    except (StrictDataclassError, TypeError, ValueError) as e:
        raise ConfigError("config", str(e), "what transformers' GlmMoeDsaConfig accepts") from e
    # the plain loops: other implementations choose kernels by size, and results must not depend on that
    settings._attn_implementation = "eager"
    settings._experts_implementation = "eager"
    return settings


def _built_indexer_types(module: Any) -> tuple[str, ...]:
    """From what exists, not from what was asked for."""
    return tuple(FULL if layer.self_attn.indexer is not None else SHARED for layer in module.model.layers)


def _seeded(settings: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        size = sum(p.numel() for p in GlmMoeDsaForCausalLM(settings).parameters())
    if size > MAX_SEEDED_PARAMETERS:
        words = f"at most {MAX_SEEDED_PARAMETERS:,}; else a checkpoint's directory, or the synthetic engine"
        raise ConfigError("preset with seeded weights", f"{size:,} parameters", words)
    with torch.random.fork_rng(devices=[]):
        module = GlmMoeDsaForCausalLM(settings)
    exact = module._keep_in_fp32_modules_strict or ()  # the router; from_pretrained leaves the same in float32
    for name, weight in module.named_parameters():
        values = torch.from_numpy(seeded_weight(name, tuple(weight.shape), seed))
        weight.data = values if any(part in name for part in exact) else values.to(dtype)
    return module


DRAFT_INIT_VERSION = 1
"""Part of the weights id, as `INIT_VERSION` is."""
_DRAFT_KEEPS = (1.0, 0.3)
"""Of the token's embedding and of the hidden state, what passes through eh_proj; noise a tenth of that beside it. The
layer itself adds little (`_DRAFT_SPREAD`). Nothing is trained here: the model's residual stream begins with that very
embedding, so a head that passes it on agrees with the model now and then, where one of pure noise never does.
"""
_DRAFT_SPREAD = 0.5


def _seeded_draft(settings: Any, seed: int, dtype: torch.dtype) -> DraftHead:
    """The last layer of `settings`, with its head; weights as `seeded_weight`, but those above."""
    number = settings.num_hidden_layers - 1
    with torch.random.fork_rng(devices=[]):
        head = DraftHead(settings, number)
    for name, weight in head.named_parameters():
        full_name = f"model.layers.{number}.{name.removeprefix('layer.')}"
        values = seeded_weight(full_name, tuple(weight.shape), seed)
        if "eh_proj" in name:
            width = weight.shape[0]
            values = values * np.float32(0.1) + np.hstack([np.eye(width, dtype=np.float32) * k for k in _DRAFT_KEEPS])
        elif "o_proj" in name or "down_proj" in name:
            values = values * np.float32(_DRAFT_SPREAD)
        exact = "mlp.gate.weight" in name  # the router, as in the model
        weight.data = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(torch.float32 if exact else dtype)
    head.eval().requires_grad_(False)
    return head


INIT_VERSION = 1
"""Part of the weights id: raise it when `seeded_weight` changes."""
_SPREADS = {"embed_tokens": 1.0, "lm_head": 3.0, "o_proj": 0.5}
"""Of a weight's outputs, when not 1. Logits at 3: sampling at temperature 1 prefers some tokens, as a trained model
does. Attention's output at 0.5: a lost index-K still changes every generation tried, while one changed rounding
(another chunk size) mostly changes none; at 1 that alone is often enough.
"""


def seeded_weight(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """float32 values of one parameter: ones for norms, else uniform, such that inputs of spread 1 give outputs of
    spread 1 (but see `_SPREADS`).

    Depends on the name, shape and seed only. Uniform, because that needs no logarithm or cosine, whose last bit differs
    between machines.
    """
    if "norm" in name:
        return np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    draws = np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], "<u8")))
    spread = next((value for part, value in _SPREADS.items() if part in name), 1.0)
    inputs = 1 if "embed_tokens" in name else shape[-1]
    return (draws.random(shape, np.float32) * 2 - 1) * np.float32(spread * math.sqrt(3.0 / inputs))


def _from_checkpoint(directory: Path, settings: Any, dtype: torch.dtype) -> Any:
    try:
        loaded: Any = GlmMoeDsaForCausalLM.from_pretrained(
            directory, config=settings, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as e:
        raise ConfigError("checkpoint", str(directory), f"a directory that transformers can load ({e})") from e
    module, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConfigError("checkpoint", f"{directory}: {len(missing)} weights missing, as {missing[0]}", "all weights")
    return module


def _checkpoint_id(directory: Path, config: Mapping[str, Any]) -> str:
    """The hub's revision when the directory is a snapshot of one, else a digest of the config and every weight file."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", resolved.name):
        return f"revision:{resolved.name}"
    files: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors*")):
        digest = xxhash.xxh3_128()
        with path.open("rb") as f:
            while block := f.read(1 << 24):
                digest.update(block)
        files[path.name] = digest.hexdigest()
    return _digest({"config": config, "files": files})


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
