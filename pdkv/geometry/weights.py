"""Weights in parameters and bytes, by part of the model and by rank.

Guarantees: the parameters are those of transformers' own classes, matrix by matrix (checked in the tests); a rank's
bytes are those of the fullest rank. Integers only. What an engine makes at load beside the checkpoint's matrices
(copies of kv_b for absorbed attention, padding of kernels) is not in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pdkv.errors import ConfigError
from pdkv.geometry.model_config import FULL, ModelShape, WeightShape

WEIGHT_DTYPES = ("fp8", "bf16")
"""The smallest first."""
BF16_BYTES = 2
FLOAT32_BYTES = 4
SCALE_BLOCK = 128
"""fp8 matrices have one float32 scale a block of 128 x 128, as in DeepSeek-V3's and GLM-5's fp8 checkpoints."""


class Part(StrEnum):
    """Parts that a plan tells apart."""

    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE = "dense MLP"
    ROUTED = "routed experts"
    SHARED = "shared experts"
    EMBEDDINGS = "embeddings"
    LM_HEAD = "lm_head"
    OTHER = "router and norms"
    MTP = "MTP"


class Spread(StrEnum):
    """How a matrix is laid over the ranks of a pipeline stage."""

    WHOLE = "whole"
    """Every rank has all of it."""
    TENSOR = "tensor"
    """Split over the tensor-parallel ranks."""
    EXPERT = "expert"
    """Whole experts over the expert-parallel ranks, each split over what ranks remain."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` matrices of rows x cols; `fp8`: stored so where the weights are fp8, else always bf16."""

    part: Part
    rows: int
    cols: int
    spread: Spread = Spread.WHOLE
    fp8: bool = False
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.rows * self.cols * self.count

    def one_bytes(self, dtype: str) -> int:
        if dtype == "fp8" and self.fp8:
            return self.rows * self.cols + FLOAT32_BYTES * -(-self.rows // SCALE_BLOCK) * -(-self.cols // SCALE_BLOCK)
        return self.rows * self.cols * BF16_BYTES

    def rank_bytes(self, dtype: str, ranks: Ranks) -> int:
        """Of the fullest rank."""
        if self.spread is Spread.TENSOR:
            return self.count * -(-self.one_bytes(dtype) // ranks.tensor)
        if self.spread is Spread.EXPERT:
            return -(-self.count // ranks.expert) * -(-self.one_bytes(dtype) // ranks.expert_tensor)
        return self.count * self.one_bytes(dtype)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ways in which one stage's weights are split."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share one expert."""


def stage_matrices(shape: ModelShape, weights: WeightShape, stage: range) -> tuple[Matrix, ...]:
    """All matrices of the layers in `stage`; embeddings with the first layer, lm_head and MTP with the last.

    `shape` is the whole model's; `range(shape.num_layers)` is one stage with everything. A last stage that isn't the
    first has a copy of the embeddings if it drafts. Raises `ConfigError` for layers that the model doesn't have.
    """
    if not 0 <= stage.start < stage.stop <= shape.num_layers or stage.step != 1:
        raise ConfigError("stage", stage, f"consecutive layers of 0 to {shape.num_layers - 1}")
    first, last = stage.start == 0, stage.stop == shape.num_layers
    made: list[Matrix] = []
    vocabulary = Matrix(Part.EMBEDDINGS, shape.vocab_size, weights.hidden, Spread.TENSOR)
    if first or (last and (shape.draft_layers or weights.tied_embeddings)):
        made.append(vocabulary)
    for layer in stage:
        made += _attention(shape, weights)
        made += _indexer(shape, weights) if shape.indexer_types[layer] == FULL else ()
        made += _dense(weights) if weights.dense[layer] else _experts(weights)
        made.append(Matrix(Part.OTHER, 2, weights.hidden))
    if last:
        made.append(Matrix(Part.OTHER, 1, weights.hidden))
        if not weights.tied_embeddings:
            made.append(Matrix(Part.LM_HEAD, shape.vocab_size, weights.hidden, Spread.TENSOR))
        made += _draft(shape, weights) * shape.draft_layers
    return tuple(made)


def parameters(matrices: Iterable[Matrix]) -> dict[Part, int]:
    """Parameters by part; every part stands there, in order."""
    total = dict.fromkeys(Part, 0)
    for matrix in matrices:
        total[matrix.part] += matrix.parameters
    return total


def weight_bytes(matrices: Iterable[Matrix], dtype: str, ranks: Ranks | None = None) -> dict[Part, int]:
    """Bytes by part on the fullest rank; every part stands there. Raises `ConfigError` for an unknown dtype."""
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError("weights", dtype, ", ".join(WEIGHT_DTYPES))
    ranks = ranks or Ranks()
    total = dict.fromkeys(Part, 0)
    for matrix in matrices:
        total[matrix.part] += matrix.rank_bytes(dtype, ranks)
    return total


def _attention(shape: ModelShape, w: WeightShape) -> tuple[Matrix, ...]:
    """MLA: both down projections are whole on every rank, what is split by heads is split over the ranks."""
    compressed = shape.kv_lora_rank + shape.rope_dim
    head = w.qk_nope_dim + shape.rope_dim
    biases = (Matrix(Part.ATTENTION, 1, w.q_lora_rank + compressed + w.hidden),) if w.attention_bias else ()
    return (
        Matrix(Part.ATTENTION, w.q_lora_rank, w.hidden, fp8=True),
        Matrix(Part.ATTENTION, 1, w.q_lora_rank),
        Matrix(Part.ATTENTION, w.heads * head, w.q_lora_rank, Spread.TENSOR, fp8=True),
        Matrix(Part.ATTENTION, compressed, w.hidden, fp8=True),
        Matrix(Part.ATTENTION, 1, shape.kv_lora_rank),
        Matrix(Part.ATTENTION, w.heads * (w.qk_nope_dim + w.v_dim), shape.kv_lora_rank, Spread.TENSOR, fp8=True),
        Matrix(Part.ATTENTION, w.hidden, w.heads * w.v_dim, Spread.TENSOR, fp8=True),
        *biases,
    )


def _indexer(shape: ModelShape, w: WeightShape) -> tuple[Matrix, ...]:
    """Whole on every rank: each scores all keys for itself."""
    return (
        Matrix(Part.INDEXER, w.index_heads * shape.index_head_dim, w.q_lora_rank, fp8=True),
        Matrix(Part.INDEXER, shape.index_head_dim, w.hidden, fp8=True),
        # k_norm has a weight and a bias
        Matrix(Part.INDEXER, 2, shape.index_head_dim),
        Matrix(Part.INDEXER, w.index_heads, w.hidden),
    )


def _mlp(part: Part, w: WeightShape, width: int, spread: Spread, count: int) -> tuple[Matrix, ...]:
    """Gate, up and down projection of `count` MLPs."""
    return (
        Matrix(part, width, w.hidden, spread, fp8=True, count=2 * count),
        Matrix(part, w.hidden, width, spread, fp8=True, count=count),
    )


def _dense(w: WeightShape) -> tuple[Matrix, ...]:
    return _mlp(Part.DENSE, w, w.dense_width, Spread.TENSOR, 1)


def _experts(w: WeightShape) -> tuple[Matrix, ...]:
    shared = _mlp(Part.SHARED, w, w.expert_width * w.shared_experts, Spread.TENSOR, 1) if w.shared_experts else ()
    return (
        *_gated_experts(w),
        *shared,
        Matrix(Part.OTHER, w.routed_experts, w.hidden),
    )


def _gated_experts(w: WeightShape) -> tuple[Matrix, ...]:
    """Three matrices an expert, counted apart so that whole experts are spread and not thirds of them."""
    shapes = ((w.expert_width, w.hidden), (w.expert_width, w.hidden), (w.hidden, w.expert_width))
    return tuple(
        Matrix(Part.ROUTED, rows, cols, Spread.EXPERT, fp8=True, count=w.routed_experts) for rows, cols in shapes
    )


def _draft(shape: ModelShape, w: WeightShape) -> tuple[Matrix, ...]:
    """An MTP layer: a layer with experts and an indexer of its own, and eh_proj, enorm, hnorm and a final norm.

    It shares embeddings and lm_head with the model.
    """
    layer = (*_attention(shape, w), *_indexer(shape, w), *_experts(w))
    own = (*layer, Matrix(Part.MTP, w.hidden, 2 * w.hidden), Matrix(Part.MTP, 5, w.hidden))
    return tuple(Matrix(Part.MTP, m.rows, m.cols, m.spread, m.fp8, m.count) for m in own)
