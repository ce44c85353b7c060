"""Every way in which a config writes its list of full layers, and every way in which it gets it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.geometry.model_config import PRESETS, load_config, max_positions, model_shape, weight_shape

GLM = load_config("glm-5.3")
FULL_OF_GLM = (0, 1, 2, *range(6, 78, 4))
BARE = {k: v for k, v in GLM.items() if not k.startswith(("index_topk_", "index_skip", "indexer_types"))}


def test_glm() -> None:
    shape = model_shape(GLM)
    assert shape.full_layers == FULL_OF_GLM
    assert (shape.num_layers, shape.draft_layers, shape.vocab_size) == (78, 0, 154_880)
    assert (shape.kv_lora_rank, shape.rope_dim, shape.index_head_dim) == (512, 64, 128)
    assert (shape.index_topk, shape.index_kpool) == (2048, 1)


def test_another_offset_has_as_many_full_layers_but_others() -> None:
    shape = model_shape({**BARE, "index_topk_freq": 4})
    assert shape.full_layers == (0, 1, *range(5, 78, 4))
    assert len(shape.full_layers) == len(FULL_OF_GLM)


def test_every_way_to_write_the_list() -> None:
    types = model_shape(GLM).indexer_types
    letters = "".join(t[0].upper() for t in types)
    for way in (
        {"indexer_types": list(types)},
        {"index_topk_pattern": letters},
        {"index_topk_pattern": list(types)},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        # the order of precedence is transformers': the list, the pattern, the formula
        {"indexer_types": list(types), "index_topk_pattern": "F" * 78, "index_topk_freq": 2},
        {"index_topk_pattern": letters, "index_topk_freq": 2},
    ):
        assert model_shape({**BARE, **way}).indexer_types == types


def test_no_list_means_all_full() -> None:
    shape = model_shape(load_config("deepseek-v3.2"))
    assert shape.full_layers == tuple(range(61))
    assert model_shape(BARE).full_layers == tuple(range(78))


def test_draft_layers() -> None:
    assert model_shape(load_config("glm-5.3-mtp")).draft_layers == 1
    assert model_shape(load_config("glm-5.3-mtp"), draft_layers=0).draft_layers == 0
    assert model_shape(GLM, draft_layers=1).draft_layers == 1
    with pytest.raises(ConfigError, match="draft_layers: -1"):
        model_shape(GLM, draft_layers=-1)


@given(st.integers(1, 90), st.integers(-3, 9), st.integers(-5, 90))
def test_the_formula_is_that_of_transformers(layers: int, freq: int, offset: int) -> None:
    config = {**BARE, "num_hidden_layers": layers, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    want = ["full" if max(i - offset + 1, 0) % max(freq, 1) == 0 else "shared" for i in range(layers)]
    if want[0] == "full":
        assert list(model_shape(config).indexer_types) == want
    else:
        with pytest.raises(ConfigError, match="index_skip_topk_offset"):
            model_shape(config)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": "GlmMoeDsaForCausalLM"}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": ["GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"]}, "architectures"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "78"}, "num_hidden_layers"),
        ({"num_hidden_layers": 78.0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"kv_lora_rank": -1}, "kv_lora_rank"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"index_head_dim": None}, "index_head_dim"),
        ({"index_topk": None}, "index_topk"),
        ({"index_kpool": 0}, "index_kpool"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"index_topk_freq": "4"}, "index_topk_freq"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1.5}, "index_skip_topk_offset"),
        ({"indexer_types": ["full"] * 77}, "indexer_types, entries"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, "indexer_types[77]"),
        ({"indexer_types": ["full"] * 77 + [["full"]]}, "indexer_types[77]"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, "indexer_types[0]"),
        ({"indexer_types": "F" * 78}, "indexer_types"),
        ({"indexer_types": 21}, "indexer_types"),
        ({"index_topk_pattern": "FX" + "F" * 76}, "index_topk_pattern[1]"),
        ({"index_topk_pattern": "F" * 79}, "index_topk_pattern, entries"),
        ({"index_topk_pattern": ""}, "index_topk_pattern, entries"),
        ({"index_topk_pattern": {"0": "F"}}, "index_topk_pattern"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_shape({**BARE, **change})
    assert error.value.fields["field"] == field
    assert error.value.fields["allowed"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_real_configs(name: str) -> None:
    shape = model_shape(load_config(name))
    assert len(shape.indexer_types) == shape.num_layers
    assert load_config(name)["model_type"] in ("glm_moe_dsa", "deepseek_v32")


def test_tiny_is_small_and_shares() -> None:
    shape = model_shape(load_config("tiny"))
    assert "".join(t[0].upper() for t in shape.indexer_types) == "FFFSSSFS"
    # the selection must bite in tests: far fewer tokens than a prompt has
    assert (shape.vocab_size, shape.index_topk) == (257, 64)


def test_sources(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GLM), "utf-8")
    assert load_config(file) == load_config(str(tmp_path)) == load_config(GLM) == GLM
    assert load_config(GLM) is not GLM


@pytest.mark.parametrize("text", ["{", "[]", b"\xff\xfe"])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match="model: "):
        load_config(file)


def test_a_missing_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*glm-5\.3-mtp"):
        load_config(tmp_path / "none.json")


def test_weight_shape() -> None:
    shape = weight_shape(GLM)
    assert (shape.hidden, shape.heads, shape.index_heads) == (6144, 64, 32)
    assert shape.dense == (True,) * 3 + (False,) * 75
    assert (shape.routed_experts, shape.shared_experts, shape.tied_embeddings) == (256, 1, False)
    tiny = weight_shape(load_config("tiny"))
    assert tiny.dense == (True, True, *(False,) * 6)
    assert max_positions(GLM) == 1_048_576


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"n_routed_experts": "256"}, "n_routed_experts"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "thick"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types, entries"),
    ],
)
def test_errors_of_weights_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        weight_shape({**GLM, **change})
    assert error.value.fields["field"] == field
