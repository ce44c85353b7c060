"""The contract of an engine: what differs between two is named by its field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkv.adapters.vllm.facts import SAMPLE_BYTES, Allocated, contract_of, directory_id, require_supported
from pdkv.adapters.vllm.memory import LayerCache, engine_pool, row_order
from pdkv.contract import Contract, diff
from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from tests.adapters.vllm.engines import BLOCKS, TOKENS, Config, Speculative, config, layers


class Dsa:
    architectures = ("GlmMoeDsaForCausalLM",)
    index_topk = 2048


def contract(
    settings: Config | None = None, caches: list[LayerCache] | None = None, *, tokens: int = TOKENS, **more: Any
) -> Contract:
    caches = layers() if caches is None else caches
    version = more.pop("version", "0.32.1")
    have = Allocated(engine_pool(caches, BLOCKS, tokens), row_order(caches, BLOCKS), ["CPU_ATTN"], version)
    return contract_of(settings or config(), have, **more)


def differing(other: Contract) -> set[str]:
    return {d.field for d in diff(contract(), other)}


def test_equal_engines_agree_and_it_survives_the_wire() -> None:
    assert diff(contract(), contract()) == []
    assert Contract.from_dict(contract().to_dict()) == contract()


def swapped(cache: LayerCache) -> LayerCache:
    """The same shape and bytes, tokens before heads in memory."""
    return replace(cache, tensor=cache.tensor.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (contract(config(revision="r2")), {"weights_id"}),
        (contract(config(dtype="torch.bfloat16")), {"weights_id", "rope_dtype"}),
        (contract(config(quantization="fp8")), {"weights_id"}),
        (contract(tokens=8), {"page_tokens", "main_row_bytes"}),
        (contract(caches=[swapped(c) for c in layers()]), {"main_row_parts"}),
        (contract(caches=layers()[:2]), {"segments"}),
        (contract(shadow=True), {"seed_rule"}),
        (
            contract(replace(config(), speculative_config=Speculative())),
            {"speculation", "eagle_rule", "rollback_tokens", "draft_tokens", "draft_topk"},
        ),
    ],
)
def test_what_differs_is_named(other: Contract, fields: set[str]) -> None:
    assert differing(other) == fields


def test_a_cache_of_another_type_is_named() -> None:
    assert "segments" in differing(contract(caches=[replace(c, tensor=c.tensor.to(torch.bfloat16)) for c in layers()]))


def test_a_third_number_of_the_version_may_differ() -> None:
    assert differing(contract(version="0.32.9")) == set()


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0", "dev"])
def test_another_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        require_supported(version)


def test_layers_with_an_indexer_are_told_from_those_without() -> None:
    index = [
        LayerCache(f"model.layers.{i}.indexer", torch.zeros(BLOCKS, TOKENS, 132, dtype=torch.uint8), Group.INDEX)
        for i in (0, 2)
    ]
    made = contract(config(hf_config=Dsa()), [*layers(), *index])
    assert made.indexer_types == ("full", "shared", "full")
    assert (made.index_topk, made.index_row_bytes, made.architecture) == (2048, 132, "GlmMoeDsaForCausalLM")


def test_a_model_without_a_revision_needs_a_name_for_its_weights() -> None:
    with pytest.raises(ConfigError, match="weights_id"):
        contract(config(revision=None))
    assert contract(config(revision=None), weights_id="mine").weights_id == "mine"


@pytest.mark.parametrize("field", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_groups_that_arent_supported_are_refused_by_name(field: str) -> None:
    asked = config()
    setattr(asked.parallel_config, field, 2)
    with pytest.raises(ConfigError, match=field):
        contract(asked)


def test_a_directory_is_known_by_its_config_and_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="weights"):
        directory_id(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * SAMPLE_BYTES))
    before = directory_id(tmp_path)
    assert before == directory_id(tmp_path)
    weights.write_bytes(bytes(2 * SAMPLE_BYTES) + b"\1" + bytes(SAMPLE_BYTES - 1))
    after = directory_id(tmp_path)
    assert before != after
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert directory_id(tmp_path) != after
    assert contract(config(model=str(tmp_path))).weights_id.startswith("sampled:")
