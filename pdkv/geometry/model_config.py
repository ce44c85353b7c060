"""A model's `config.json` turned into the few numbers that size its caches and its weights.

Guarantees: this is the only file that knows Hugging Face config keys; a `ModelShape` is complete and consistent (one
indexer type a layer, the first one full), whichever way the config wrote the list; a missing, ill-typed or unknown
value raises `ConfigError` that names the field and what is allowed. Reads files only in `load_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError

FULL = "full"
SHARED = "shared"
ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")
"""Sparse-attention models whose cache is an MLA row a layer and an index-K row a full layer."""
PRESETS = ("glm-5.3", "glm-5.3-mtp", "deepseek-v3.2", "tiny")

_LETTERS = {"F": FULL, "S": SHARED}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size and the meaning of a page depend on."""

    architecture: str
    vocab_size: int
    num_layers: int
    indexer_types: tuple[str, ...]
    """One of "full" (stores index-K) or "shared" (reuses the last full layer's selection) for each layer."""
    draft_layers: int
    """MTP layers whose rows are kept in the pool; each has a main row and an index-K row of its own."""
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    """Tokens that share one index-K row; 1 when the index is not pooled."""

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)


@dataclass(frozen=True, slots=True)
class WeightShape:
    """What the size of the weights depends on, beside a `ModelShape`. Widths in elements."""

    hidden: int
    heads: int
    q_lora_rank: int
    qk_nope_dim: int
    v_dim: int
    index_heads: int
    dense: tuple[bool, ...]
    """For each layer whether its MLP is dense; the others have experts."""
    dense_width: int
    expert_width: int
    routed_experts: int
    shared_experts: int
    tied_embeddings: bool
    attention_bias: bool


def load_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A config as a dict, from a preset's name, a `config.json`, a directory with one, or a mapping.

    Raises `ConfigError` if there is nothing at `source` or it is not a JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if source in PRESETS:
        text = (resources.files(__package__) / "presets" / f"{source}.json").read_text("utf-8")
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            words = f"{', '.join(PRESETS)}, or the path of a config.json or of a directory with one ({e})"
            raise ConfigError("model", str(source), words) from e
    try:
        config = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError("model", str(source), f"a JSON file ({e})") from e
    if not isinstance(config, dict):
        raise ConfigError("model", str(source), "a JSON object")
    return config


def model_shape(config: Mapping[str, Any], *, draft_layers: int | None = None) -> ModelShape:
    """Shape of the caches of a model.

    `draft_layers` overrides `num_nextn_predict_layers`: a checkpoint may hold MTP layers that a deployment doesn't run.
    Raises `ConfigError` naming the field.
    """
    num_layers = _integer(config, "num_hidden_layers")
    if draft_layers is None:
        draft_layers = _integer(config, "num_nextn_predict_layers", default=0, least=0)
    elif draft_layers < 0:
        raise ConfigError("draft_layers", draft_layers, "an integer of at least 0")
    return ModelShape(
        architecture=_architecture(config),
        vocab_size=_integer(config, "vocab_size"),
        num_layers=num_layers,
        indexer_types=_indexer_types(config, num_layers),
        draft_layers=draft_layers,
        kv_lora_rank=_integer(config, "kv_lora_rank"),
        rope_dim=_integer(config, "qk_rope_head_dim"),
        index_head_dim=_integer(config, "index_head_dim"),
        index_topk=_integer(config, "index_topk"),
        index_kpool=_integer(config, "index_kpool", default=1),
    )


def weight_shape(config: Mapping[str, Any]) -> WeightShape:
    """Shape of a model's weights. Raises `ConfigError` naming the field."""
    layers = _integer(config, "num_hidden_layers")
    return WeightShape(
        hidden=_integer(config, "hidden_size"),
        heads=_integer(config, "num_attention_heads"),
        q_lora_rank=_integer(config, "q_lora_rank"),
        qk_nope_dim=_integer(config, "qk_nope_head_dim"),
        v_dim=_integer(config, "v_head_dim"),
        index_heads=index_heads(config),
        dense=_dense_layers(config, layers),
        dense_width=_integer(config, "intermediate_size"),
        expert_width=_integer(config, "moe_intermediate_size"),
        routed_experts=_integer(config, "n_routed_experts"),
        shared_experts=_integer(config, "n_shared_experts", default=0, least=0),
        tied_embeddings=_switch(config, "tie_word_embeddings"),
        attention_bias=_switch(config, "attention_bias"),
    )


def max_positions(config: Mapping[str, Any]) -> int:
    """Tokens of the longest context that the model was made for. Raises `ConfigError` naming the field."""
    return _integer(config, "max_position_embeddings")


def index_heads(config: Mapping[str, Any]) -> int:
    """Heads of the indexer's queries. Raises `ConfigError` naming the field."""
    return _integer(config, "index_n_heads")


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false")
    return value


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types`, or else the first `first_k_dense_replace` layers, 3 by default: transformers' rule."""
    types = config.get("mlp_layer_types")
    if types is None:
        first = _integer(config, "first_k_dense_replace", default=3, least=0)
        return tuple(i < first for i in range(layers))
    if not isinstance(types, Sequence) or isinstance(types, str) or set(types) - {"dense", "sparse"}:
        raise ConfigError("mlp_layer_types", types, 'a list of "dense" and "sparse"')
    if len(types) != layers:
        raise ConfigError("mlp_layer_types, entries", len(types), f"num_hidden_layers, {layers}")
    return tuple(kind == "dense" for kind in types)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError("architectures", names, f"a list with one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _integer(config: Mapping[str, Any], key: str, *, default: int | None = None, least: int | None = 1) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    allowed = "an integer" if least is None else f"an integer of at least {least}"
    # bool is an int to Python; in a config it is a mistake
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise ConfigError(key, value, allowed)
    return value


def _indexer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Precedence and formula are those of transformers' `GlmMoeDsaConfig`: list, pattern, frequency and offset."""
    for key in ("indexer_types", "index_topk_pattern"):
        if config.get(key) is not None:
            return _listed_types(key, config[key], num_layers)
    freq = max(_integer(config, "index_topk_freq", default=1, least=None), 1)
    offset = _integer(config, "index_skip_topk_offset", default=2, least=None)
    types = tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers))
    if types[0] != FULL:
        raise ConfigError("index_skip_topk_offset", offset, "a value that leaves layer 0 full")
    return types


def _listed_types(key: str, value: object, num_layers: int) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ConfigError(key, value, f'a list of "{FULL}" and "{SHARED}", or a string of F and S')
    if key == "indexer_types" and isinstance(value, str):
        raise ConfigError(key, value, f'a list of "{FULL}" and "{SHARED}"')
    names: list[object] = [_LETTERS.get(c, c) for c in value] if isinstance(value, str) else list(value)
    for i, name in enumerate(names):
        if name not in (FULL, SHARED):
            raise ConfigError(f"{key}[{i}]", name, f'"{FULL}" or "{SHARED}" (F or S in a pattern)')
    if len(names) != num_layers:
        raise ConfigError(f"{key}, entries", len(names), f"num_hidden_layers, {num_layers}")
    if names[0] != FULL:
        raise ConfigError(f"{key}[0]", names[0], f'"{FULL}": there is no earlier layer to share with')
    return tuple(str(n) for n in names)
