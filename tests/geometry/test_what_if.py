"""Variants of a plan, and which of them make a request fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import slot_page_bytes, usable_pages
from pdkv.geometry.fleet import Gpu, GpuMemory, Layout, find_gpu
from pdkv.geometry.model_config import load_config, model_shape, weight_shape
from pdkv.geometry.what_if import Setup, Variant, fit_of, variants, what_fits

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))
GLM = load_config("glm-5.3")
SHAPE = model_shape(GLM)
MTP = model_shape(load_config("glm-5.3-mtp"))
EIGHT = Layout(gpus=8, tp=8, ep=8)
M1 = 1_048_576


def named(setup: Setup) -> dict[str, Variant]:
    return {v.name: v for v in variants(setup)}


def test_every_change_costs_what_the_golden_ledger_says() -> None:
    made = named(Setup(SHAPE))
    assert {name: v.bytes_per_slot.total for name, v in made.items()} == {
        "as planned": 53_940,
        "half of the layers full (39)": GOLDEN["glm-5.3, 39 full layers"]["bytes_per_token"],
        "all layers full (78)": 78 * (656 + 132),
        "kpool 2": GOLDEN["glm-5.3, index_kpool 2 (page 128 tokens, index page still 64 rows)"]["bytes_per_token"],
        "kpool 4": 51_168 + 33 * 21,
        "kpool 16": 51_168 + GOLDEN["glm-5.3, index_kpool 16"]["index_bytes_per_token_ceil"],
        **{f"dcp {d['dcp']}": d["bytes_per_local_token"] for d in GOLDEN["dcp"][1:]},
        "1 MTP layer": GOLDEN["glm-5.3 with one MTP layer (own main KV and own index-K)"]["bytes_per_token"],
        "row 576 (fp8)": GOLDEN["glm-5.3, main row 576 B"]["bytes_per_token"],
        "row 1152 (bf16)": GOLDEN["glm-5.3, main row 1152 B"]["bytes_per_token"],
        "row 352 (nvfp4)": 78 * 352 + 2772,
    }
    half = made["half of the layers full (39)"]
    assert round(half.ratio, 5) == GOLDEN["glm-5.3, 39 full layers"]["capacity_ratio_vs_21_full"]
    assert made["as planned"].ratio == 1


def test_pool_tokens() -> None:
    memory = 56 * 10**9
    made = named(Setup(SHAPE, memory=memory))
    assert made["as planned"].pool_tokens == 1_038_080
    assert made["dcp 2"].pool_tokens == usable_pages(memory, 64 * 56_712) * 128
    pooled = slot_page_bytes(replace(SHAPE, index_kpool=16)).total
    assert made["kpool 16"].pool_tokens == usable_pages(memory, pooled) * 1024
    assert made["row 576 (fp8)"].ratio == made["row 576 (fp8)"].pool_tokens / 1_038_080
    drafting = named(Setup(MTP, memory=memory))
    assert drafting["no MTP layer"].pool_tokens == 1_038_080
    assert "2 MTP layers" in drafting


def test_on_gpus_a_draft_layers_weights_count_too() -> None:
    memory = GpuMemory(find_gpu("h200"), weight_shape(GLM))
    made = named(Setup(SHAPE, layout=EIGHT, memory=memory))
    assert made["1 MTP layer"].ratio < named(Setup(SHAPE))["1 MTP layer"].ratio
    # a layout of 2 has no room for dcp 4
    two = Setup(SHAPE, layout=Layout(gpus=8, tp=2, dp=4, ep=8), memory=memory)
    assert [n for n in named(two) if n.startswith("dcp")] == ["dcp 2"]


def test_a_variant_that_can_not_be_is_left_out() -> None:
    # so many drafts leave no room in the pages of a pooled index
    many = named(Setup(SHAPE, memory=56 * 10**9, rollback_tokens=127))
    assert [n for n in many if n.startswith("kpool")] == ["kpool 4", "kpool 16"]
    # 40 stages can't start at 21 full layers
    stages = Layout(gpus=160, tp=8, ep=8, pp=20)
    memory = GpuMemory(Gpu("small", 10**9, 1), weight_shape(GLM))
    alone = Setup(model_shape(load_config("deepseek-v3.2")), layout=stages, memory=memory)
    assert "gpus 320 with pp 40" not in what_fits(alone, M1)
    with pytest.raises(ConfigError, match="pp"):
        variants(replace(alone, layout=Layout(gpus=800, tp=8, ep=8, pp=100)))


def test_what_makes_it_fit() -> None:
    setup = Setup(SHAPE, memory=56 * 10**9)
    fit = fit_of(setup, M1 + 256)
    assert fit is not None
    assert (fit.missing_pages, fit.missing_bytes) == (168, 577_450_240)
    assert what_fits(setup, M1 + 256) == ("dcp 2", "dcp 4", "dcp 8", "row 576 (fp8)", "row 352 (nvfp4)")
    assert what_fits(Setup(SHAPE, memory=56_577_450_240), M1 + 256) == ()
    assert what_fits(Setup(SHAPE, memory=10**9), M1) == ()  # nothing helps
    assert what_fits(Setup(SHAPE), M1) == ()
    assert fit_of(Setup(SHAPE), M1) is None


def test_what_makes_it_fit_on_gpus() -> None:
    h200 = GpuMemory(find_gpu("h200"), weight_shape(GLM))
    made = what_fits(Setup(SHAPE, layout=EIGHT, memory=h200), M1 + 256)
    assert made[0] == "dcp 2"
    assert {"row 352 (nvfp4)", "gpus 16 with pp 2", "gpus 16 with dp 2, ep 16", "b200", "b300"} <= set(made)
    assert "row 576 (fp8)" not in made
    # no DCP saves where not even the weights fit, and the missing bytes are those of the weights, too
    h100 = Setup(SHAPE, layout=EIGHT, memory=GpuMemory(find_gpu("h100"), weight_shape(GLM)))
    pool, fit = h100.pool(), fit_of(h100, M1)
    assert pool is not None
    assert pool.budget is not None
    assert fit is not None
    assert fit.missing_bytes == 16_385 * 3_452_160 - pool.budget.left_bytes
    assert not [name for name in what_fits(h100, M1) if name.startswith("row")]


def cards(count: int, *, gpu: str = "h200", dtype: str = "fp8") -> Setup:
    memory = GpuMemory(find_gpu(gpu), weight_shape(GLM), weight_dtype=dtype)
    return Setup(SHAPE, layout=Layout(gpus=count, tp=count, ep=count), memory=memory)


@pytest.mark.parametrize(
    ("setup", "tokens", "layouts"),
    [
        # the pages of 8 cards are too few, those of 16 are not
        (cards(8), M1, ("gpus 16 with tp 16, ep 16", "gpus 16 with dp 2, ep 16", "gpus 16 with pp 2")),
        # not even the weights go onto 4, and onto 8 the request only with DCP
        (cards(4), M1, ("gpus 8 with tp 8, ep 8, dcp 2", "gpus 8 with dp 2, ep 8, dcp 2", "gpus 8 with pp 2")),
        (cards(4), 8192, ("gpus 8 with tp 8, ep 8", "gpus 8 with dp 2, ep 8", "gpus 8 with pp 2")),
        (cards(1), M1, ("gpus 8 with tp 8, ep 8, dcp 2", "gpus 8 with pp 8")),
        (cards(1, dtype="bf16"), M1, ("gpus 16 with tp 16, ep 16, dcp 2",)),
    ],
)
def test_the_fewest_cards_that_hold_it(setup: Setup, tokens: int, layouts: tuple[str, ...]) -> None:
    made = tuple(name for name in what_fits(setup, tokens + 256) if name.startswith("gpus"))
    assert made == layouts
    # each holds what it is named for, and half of its cards don't
    for name in made:
        sizes = dict(part.split() for part in name.replace(" with ", ", ").split(", "))
        layout = replace(setup.layout, **{way: int(size) for way, size in sizes.items()})
        larger = fit_of(replace(setup, layout=layout), tokens + 256)
        assert larger is not None
        assert larger.fits


def test_more_cards_in_several_ways_where_one_way_is_not_enough() -> None:
    """64 heads go onto 64 cards, 21 full layers begin 21 stages: on cards that are too small for either, both."""
    small = GpuMemory(Gpu("8GB", 8 * 10**9, 1), weight_shape(GLM))
    setup = Setup(SHAPE, layout=Layout(gpus=2, tp=2, ep=2), memory=small)
    assert what_fits(setup, 8192) == (
        "gpus 128 with tp 32, ep 32, pp 4",
        "gpus 128 with tp 16, dp 2, ep 32, dcp 2, pp 4",
    )
    tiny = replace(small, gpu=Gpu("1GB", 10**9, 1))
    assert what_fits(replace(setup, memory=tiny), 8192) == ()  # the embeddings alone are larger


def test_smaller_weights_help_where_they_are_not_the_smallest() -> None:
    assert "weights fp8" in what_fits(cards(8, dtype="bf16"), 8192)
    assert "weights fp8" not in what_fits(cards(8), M1 + 256)


@pytest.mark.parametrize("change", ["no MTP layer", "mem fraction static 0.95"])
def test_small_changes_that_are_enough(change: str) -> None:
    memory = GpuMemory(find_gpu("h200"), weight_shape(GLM))
    setup = Setup(MTP, layout=EIGHT, memory=memory)
    pool = setup.pool()
    assert pool is not None
    assert change in what_fits(setup, pool.tokens + 64)
    assert change not in what_fits(setup, pool.tokens * 2)
