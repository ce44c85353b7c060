import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from pdkv.adapters.reference.model import LoadedModel, describe_model, load_model, seeded_weight
from pdkv.errors import ConfigError
from pdkv.geometry.model_config import FULL, SHARED

F, S = FULL, SHARED
TINY_TYPES = (F, F, F, S, S, S, F, S)


def weights_digest(model: LoadedModel) -> str:
    digest = xxhash.xxh3_64()
    for name, weight in sorted(model.module.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def logits_of(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.module(input_ids=torch.arange(40)[None], logits_to_keep=1).logits[0, -1]


def test_seeded_weights_are_these_bytes_on_any_machine(tiny: LoadedModel) -> None:
    assert weights_digest(tiny) == "c5a55476a22be99d"
    assert weights_digest(load_model("tiny", seed=1)) != weights_digest(tiny)


def test_a_draft_layer_is_one_more_layer_of_the_models_kind(tiny: LoadedModel) -> None:
    model = load_model("tiny", draft_layers=1)
    assert weights_digest(model) == weights_digest(tiny)
    digest = xxhash.xxh3_64()
    for name, weight in sorted(model.draft.named_parameters()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "14a3519b4e169518"
    assert (model.shape.draft_layers, tiny.shape.draft_layers, tiny.draft) == (1, 0, None)
    assert type(model.draft.layer) is type(model.module.model.layers[2])
    assert model.draft.layer.self_attn.indexer is not None
    assert model.draft.layer.self_attn.layer_idx == 8
    assert len({tiny.weights_id, model.weights_id, load_model("tiny", draft_layers=1, seed=1).weights_id}) == 3


def test_a_draft_layer_in_bfloat16_keeps_its_router_exact() -> None:
    head = load_model("tiny", draft_layers=1, dtype="bfloat16").draft
    assert head.layer.mlp.gate.weight.dtype is torch.float32
    assert {head.eh_proj.weight.dtype, head.layer.self_attn.kv_b_proj.weight.dtype} == {torch.bfloat16}


def test_a_model_is_described_without_being_loaded(tiny: LoadedModel, tmp_path: Path) -> None:
    described = describe_model("tiny")
    assert (described.shape, described.weights_id) == (tiny.shape, tiny.weights_id)
    tiny.module.save_pretrained(tmp_path)
    loaded, described = load_model(tmp_path, dtype="bfloat16"), describe_model(tmp_path, dtype="bfloat16")
    assert (described.shape, described.weights_id) == (loaded.shape, loaded.weights_id)
    with pytest.raises(ConfigError, match="draft_layers"):
        describe_model(tmp_path, draft_layers=1)


def test_draft_layers_that_it_cannot_have_are_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.module.save_pretrained(tmp_path)
    for source, layers in (("tiny", 2), (tmp_path, 1)):
        with pytest.raises(ConfigError, match="draft_layers"):
            load_model(source, draft_layers=layers)


def test_seeded_weights_keep_a_spread_of_one() -> None:
    weight = seeded_weight("some.q_proj.weight", (64, 400), 0)
    assert abs(weight.std() * 20 - 1) < 0.02
    assert np.array_equal(weight, seeded_weight("some.q_proj.weight", (64, 400), 0))
    assert not np.array_equal(weight, seeded_weight("some.k_proj.weight", (64, 400), 0))


def test_loading_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    load_model("tiny")
    assert torch.equal(torch.rand(3), want)


def test_layer_list_comes_from_the_layers_that_own_an_indexer(tiny: LoadedModel) -> None:
    assert tiny.shape.indexer_types == TINY_TYPES
    assert tiny.shape.draft_layers == 0
    other = (F, S, F, S, F, S, F, S)
    loaded = load_model("tiny", indexer_types=other)
    assert loaded.shape.indexer_types == other
    assert [layer.self_attn.indexer is not None for layer in loaded.module.model.layers] == [t == F for t in other]
    assert loaded.weights_id != tiny.weights_id


def test_weights_id_tells_seed_and_dtype_apart(tiny: LoadedModel) -> None:
    assert tiny.weights_id.startswith("sha256:")
    assert load_model("tiny").weights_id == tiny.weights_id
    ids = {tiny.weights_id, load_model("tiny", seed=1).weights_id, load_model("tiny", dtype="bfloat16").weights_id}
    assert len(ids) == 3


def test_bfloat16_keeps_the_weights_that_transformers_keeps_in_float32(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.module.save_pretrained(tmp_path)
    seeded = load_model("tiny", dtype="bfloat16")
    restored = load_model(tmp_path, dtype="bfloat16")
    dtypes = {name: weight.dtype for name, weight in seeded.module.named_parameters()}
    assert dtypes == {name: weight.dtype for name, weight in restored.module.named_parameters()}
    assert dtypes["model.layers.2.mlp.gate.weight"] is torch.float32
    assert dtypes["model.layers.2.self_attn.kv_b_proj.weight"] is torch.bfloat16
    assert torch.equal(logits_of(seeded), logits_of(restored))


def test_a_saved_model_comes_back(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.module.save_pretrained(tmp_path)
    restored = load_model(tmp_path)
    assert restored.shape == tiny.shape
    assert weights_digest(restored) == weights_digest(tiny)
    assert torch.equal(logits_of(restored), logits_of(tiny))
    assert restored.module.config._attn_implementation == "eager"
    assert restored.module.config._experts_implementation == "eager"


def test_other_weights_of_equal_geometry_have_another_id(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.module.save_pretrained(tmp_path)
    before = load_model(tmp_path).weights_id
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, file, metadata={"format": "pt"})
    assert load_model(tmp_path).weights_id != before
    del weights["model.layers.4.self_attn.o_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.self_attn\.o_proj\.weight"):
        load_model(tmp_path)


def test_an_indexer_that_the_checkpoint_lacks_is_not_made_up(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.module.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.self_attn\.indexer"):
        load_model(tmp_path, indexer_types=(F, F, F, F, S, S, F, S))


def test_a_hub_snapshot_is_known_by_its_revision(tiny: LoadedModel, tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--a--b" / "snapshots" / revision
    tiny.module.save_pretrained(snapshot)
    assert load_model(snapshot).weights_id == f"revision:{revision}/float32"


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"source": "no-such-model"}, {"source": "deepseek-v3.2"}])
def test_what_it_cannot_load_is_refused_by_name(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change.values())).replace("deepseek-v3.2", "DeepseekV32")):
        load_model(**({"source": "tiny"} | change))


def test_a_preset_of_real_size_is_not_filled_with_noise() -> None:
    with pytest.raises(ConfigError, match="parameters"):
        load_model("glm-5.3")


def test_a_bad_checkpoint_directory_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    config = tiny.module.config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="transformers can load"):  # no weights at all
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(ConfigError, match="hidden_size"):
        load_model(tmp_path)
