"""The weight ledger against transformers' own classes, against published sizes, and over ranks."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from pdkv.errors import ConfigError
from pdkv.geometry.model_config import ModelShape, WeightShape, load_config, model_shape, weight_shape
from pdkv.geometry.weights import Matrix, Part, Ranks, parameters, stage_matrices, weight_bytes

CLASSES: dict[str, Any] = {
    "glm-5.3": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "deepseek-v3.2": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "tiny": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


def shapes(name: str, **change: Any) -> tuple[ModelShape, WeightShape]:
    config = {**load_config(name), **change}
    return model_shape(config), weight_shape(config)


def whole(name: str, **change: Any) -> tuple[Matrix, ...]:
    shape, weights = shapes(name, **change)
    return stage_matrices(shape, weights, range(shape.num_layers))


def total(matrices: tuple[Matrix, ...], *without: Part) -> int:
    return sum(n for part, n in parameters(matrices).items() if part not in without)


@pytest.mark.parametrize("change", [{}, {"attention_bias": True}], ids=["plain", "bias"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_of_the_models_own_class_is_counted(name: str, change: dict[str, Any]) -> None:
    config_class, model_class = CLASSES[name]
    config = {k: v for k, v in load_config(name).items() if k != "architectures"}
    # with no memory behind them, and MTP layers are not part of the class
    with torch.device("meta"):
        model = model_class(config_class(**config | change))
    by_part = parameters(whole(name, **change))
    assert sum(p.numel() for p in model.parameters()) == sum(by_part.values()) - by_part[Part.MTP]
    named = {n: p.numel() for n, p in model.named_parameters()}
    for part, key in {Part.ROUTED: "mlp.experts", Part.SHARED: "shared_experts", Part.INDEXER: "indexer"}.items():
        assert by_part[part] == sum(count for n, count in named.items() if key in n)


def test_published_counts() -> None:
    # GLM-5: 744B (technical report, arXiv:2602.15763); all of its layers have an indexer
    assert total(whole("glm-5.3", index_topk_freq=1)) == pytest.approx(744e9, rel=0.001)
    # GLM-5.2 with its MTP layer: 753B (model card of zai-org/GLM-5.2)
    assert total(whole("glm-5.3-mtp")) == pytest.approx(753e9, rel=0.001)
    # DeepSeek-V3, without indexers: 671B and an MTP module of 11.5B beside what it shares (its README_WEIGHTS.md)
    v3 = parameters(whole("deepseek-v3.2"))
    assert sum(v3.values()) - v3[Part.MTP] - v3[Part.INDEXER] == pytest.approx(671e9, rel=0.001)
    assert v3[Part.MTP] == pytest.approx(11.5e9, rel=0.02)
    # V3.2 on Hugging Face: 685B, where the MTP module's copies of embeddings and head count again
    assert sum(v3.values()) + v3[Part.EMBEDDINGS] + v3[Part.LM_HEAD] == pytest.approx(685e9, rel=0.001)


def test_bytes_of_a_published_fp8_checkpoint() -> None:
    """deepseek-ai/DeepSeek-V3's safetensors are 688,586,727,753 B, with their headers (some 12 MB of names)."""
    shape, weights = shapes("deepseek-v3.2")
    without_mtp, _ = shapes("deepseek-v3.2", num_nextn_predict_layers=0)
    made = weight_bytes(stage_matrices(shape, weights, range(61)), "fp8")
    plain = weight_bytes(stage_matrices(without_mtp, weights, range(61)), "fp8")
    indexer = made[Part.INDEXER] * 62 // 61
    copies = made[Part.EMBEDDINGS] + made[Part.LM_HEAD]
    checkpoint = sum(made.values()) - indexer + copies
    assert 0 < 688_586_727_753 - checkpoint < 20e6
    assert sum(made.values()) - sum(plain.values()) == made[Part.MTP]


def test_bf16_is_two_bytes_a_parameter() -> None:
    matrices = whole("glm-5.3-mtp")
    assert weight_bytes(matrices, "bf16") == {part: 2 * n for part, n in parameters(matrices).items()}
    # GLM-5.2 in bf16: 1,507 GB (model card of Mapika/GLM-5.2-NVFP4)
    assert sum(weight_bytes(matrices, "bf16").values()) == pytest.approx(1507e9, rel=0.001)


@pytest.mark.parametrize(("dtype", "scale"), [("fp8", 4), ("bf16", 0)])
def test_scales_are_one_a_block(dtype: str, scale: int) -> None:
    size = 1 if dtype == "fp8" else 2
    assert Matrix(Part.DENSE, 129, 256, fp8=True).one_bytes(dtype) == 129 * 256 * size + 2 * 2 * scale
    assert Matrix(Part.OTHER, 129, 256).one_bytes(dtype) == 129 * 256 * 2


def test_ranks() -> None:
    matrices = whole("glm-5.3-mtp")
    one = weight_bytes(matrices, "fp8")
    tp8 = weight_bytes(matrices, "fp8", Ranks(8, 8, 1))
    assert tp8[Part.ROUTED] * 8 == one[Part.ROUTED]
    assert tp8[Part.INDEXER] == one[Part.INDEXER]  # whole on every rank
    assert one[Part.ATTENTION] // 8 < tp8[Part.ATTENTION] < one[Part.ATTENTION]  # down projections are whole
    # an expert to itself or in 8 slices: the same bytes, but for the blocks of scales
    sliced = weight_bytes(matrices, "bf16", Ranks(8, 1, 8))
    assert sliced[Part.ROUTED] == weight_bytes(matrices, "bf16", Ranks(8, 8, 1))[Part.ROUTED]
    # 256 experts over 48 ranks: the fullest has 6
    assert weight_bytes(matrices, "fp8", Ranks(8, 48, 1))[Part.ROUTED] * 256 == one[Part.ROUTED] * 6


def test_stages_are_the_whole() -> None:
    shape, weights = shapes("glm-5.3")
    all_of_it = parameters(stage_matrices(shape, weights, range(78)))
    stages = [parameters(stage_matrices(shape, weights, s)) for s in (range(38), range(38, 78))]
    assert {part: sum(s[part] for s in stages) for part in Part} == all_of_it
    assert (stages[0][Part.LM_HEAD], stages[1][Part.EMBEDDINGS]) == (0, 0)
    drafting, _ = shapes("glm-5.3-mtp")
    last = parameters(stage_matrices(drafting, weights, range(38, 78)))
    assert last[Part.EMBEDDINGS] == all_of_it[Part.EMBEDDINGS]  # a draft layer on another stage needs its own copy
    assert parameters(stage_matrices(drafting, weights, range(38)))[Part.MTP] == 0


def test_tied_embeddings_are_counted_once() -> None:
    assert total(whole("tiny", tie_word_embeddings=True)) == total(whole("tiny")) - 257 * 128


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: weight_bytes((), "int4"), "weights"),
        (lambda: stage_matrices(*shapes("tiny"), range(9)), "stage"),
        (lambda: stage_matrices(*shapes("tiny"), range(3, 3)), "stage"),
    ],
)
def test_errors_name_the_field(call: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.fields["field"] == field
