"""The contract: each field by its rule, fingerprints, and what may be paired with what."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.contract import (
    RULES,
    Contract,
    ContractFacts,
    Topology,
    build_contract,
    common_digest,
    diff,
    require_compatible,
    require_equal_shards,
    shown,
)
from pdkv.errors import ConfigError, ContractMismatch, ProtocolError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.geometry.sharding import plan_shards


def built(preset: str = "glm-5.3", *, main_row: str = "fp8_ds_mla", **facts: Any) -> Contract:
    shape = model_shape(load_config(preset))
    return build_contract(shape, page_format(shape, main_row=main_row), identity=facts_of(**facts))


def facts_of(**facts: Any) -> ContractFacts:
    return ContractFacts(**{"weights_id": "revision-1", **facts})


MTP: dict[str, Any] = {"speculation": "mtp", "eagle_rule": "bigram", "draft_tokens": 3, "draft_topk": 1}

REFUSED: dict[str, Any] = {
    "architecture": "Other",
    "weights_id": "revision-2",
    "vocab_size": 7,
    "num_layers": 7,
    "indexer_types": ("full",) * 78,
    "draft_layers": 1,
    "main_row_format": "bf16",
    "main_row_bytes": 576,
    "main_row_parts": "latent=512*e4m3 rope=64*e4m3",
    "scale_rule": "amax/448,pow2",
    "rope_dtype": "e4m3",
    "rope_order": "interleaved",
    "index_row_bytes": 136,
    "index_order": "tiled_16",
    "index_kpool": 2,
    "index_topk": 1024,
    "page_tokens": 128,
    "segments": (("main.0", 41984),),
    "hash_algorithm": "blake3",
    "bigram": True,
    "seed_rule": "none",
    "speculation": "eagle",
    "eagle_rule": "drop_page",
    "rollback_tokens": 4,
    "draft_tokens": 4,
    "draft_topk": 4,
    "index_sharing": True,
    "protocol_major": 2,
    "topology": Topology(pp=2),
    "placement": "token_major",
    "digest_algorithms": ("crc32",),
}
"""For each field, a value that a node with the default contract must not be paired with."""

ACCEPTED: dict[str, Any] = {
    "topology": Topology(tp=8, dp=4),
    "placement": "layer_major",
    "digest_algorithms": ("crc32", "xxh3_64"),
    "protocol_minor": 9,
    "version": "9.9",
    "lane": "tcp",
    "host": "elsewhere",
    "gpu": "another",
    "engine": "another",
}
"""For each field that may differ, another value that is no obstacle."""


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Contract)])
def test_each_field_behaves_by_its_rule(name: str) -> None:
    mine = built()
    rule = RULES[name]
    assert name in REFUSED or name in ACCEPTED, "a new field needs a rule and a value here"
    assert (name in ACCEPTED) == (rule in ("compatible", "informative"))
    if name in REFUSED:
        theirs = dataclasses.replace(mine, **{name: REFUSED[name]})
        (found,) = diff(mine, theirs)
        assert (found.field, found.mine, found.theirs) == (name, shown(getattr(mine, name)), shown(REFUSED[name]))
        assert found.rule.startswith(rule)
        assert [d.field for d in diff(theirs, mine)] == [name]
        assert (mine.content_fingerprint != theirs.content_fingerprint) == (rule == "content")
        assert (mine.fingerprint != theirs.fingerprint) == (rule in ("content", "pair"))
    if name in ACCEPTED:
        theirs = dataclasses.replace(mine, **{name: ACCEPTED[name]})
        assert diff(mine, theirs) == diff(theirs, mine) == []
        assert mine.fingerprint == theirs.fingerprint
        require_compatible(mine, theirs)


def test_rules_are_those_of_the_protocol() -> None:
    by_rule = {rule: [n for n, r in RULES.items() if r == rule] for rule in set(RULES.values())}
    assert {rule: len(names) for rule, names in by_rule.items()} == {
        "content": 21,
        "pair": 7,
        "compatible": 4,
        "informative": 5,
    }
    assert "index_topk" in by_rule["content"]


def test_a_mismatch_lists_every_field_with_both_values() -> None:
    mine = built()
    theirs = dataclasses.replace(mine, main_row_bytes=576, weights_id="x", draft_tokens=2, placement="rows", host="h")
    with pytest.raises(ContractMismatch) as caught:
        require_compatible(mine, theirs)
    assert [d.field for d in caught.value.differences] == ["weights_id", "main_row_bytes", "draft_tokens", "placement"]
    assert "main_row_bytes: mine 656, theirs 576" in str(caught.value)


GOLDEN = """
import pdkv.contract as c
made = c.Contract(**{n: v for n, v in zip(c.RULES, (
    "A", "w", 100, 2, ("full", "shared"), 0, "fp8_ds_mla", 656, "p", "s", "bf16", "halves", 132, "k", 1, 64, 64,
    (("main.0", 41984), ("main.1", 41984), ("index.0", 8448)), "h", False, "r",
    "none", "none", 0, 0, 0, False, 1, c.Topology(), "page_major", ("xxh3_64",), 0, "", "", "", "", ""), strict=True)})
print(made.content_fingerprint.hex(), made.fingerprint.hex())
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    """Nodes of other versions compute them too: a change here is a change of the protocol."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", GOLDEN], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1")
    }
    assert printed == {f"{GOLDEN_CONTENT} {GOLDEN_WHOLE}\n"}


GOLDEN_CONTENT = "d040dc8022164697b98bfb436316a7901d6638270870dc5266a490650b1730e8"
GOLDEN_WHOLE = "ce15d2231618194a4e1039aaf6bf272de74c1284a0ac6948367f951a30a5dc8b"


def test_equal_counts_of_full_layers_are_not_equal_lists() -> None:
    """GLM-5.3 says offset 3; the default of 2 has 21 full layers as well, other ones."""
    config = load_config("glm-5.3")
    plain = {k: v for k, v in config.items() if k not in ("indexer_types", "index_topk_pattern")}
    shapes = [model_shape({**plain, "index_topk_freq": 4, "index_skip_topk_offset": offset}) for offset in (2, 3)]
    mine, theirs = (build_contract(s, page_format(s), identity=facts_of()) for s in shapes)
    assert mine.num_layers == theirs.num_layers == 78
    assert mine.indexer_types.count("full") == theirs.indexer_types.count("full") == 21
    assert [d.field for d in diff(mine, theirs)] == ["indexer_types", "segments"]


@pytest.mark.parametrize("theirs", [Topology(tp=1, dp=8), Topology(tp=1), Topology(tp=4, dp=2, dcp=2)])
def test_replicated_rows_go_from_any_rank_to_any(theirs: Topology) -> None:
    assert diff(built(topology=Topology(tp=8)), built(topology=theirs)) == []


SHARDED = Topology(tp=4, dcp=2, main="sharded")


@pytest.mark.parametrize(
    "theirs",
    [
        SHARDED,
        Topology(tp=8),
        Topology(tp=4, dcp=4, main="sharded"),
        Topology(tp=4, dcp=2, main="sharded", interleave=64),
        Topology(tp=8, dp=2, dcp=8, main="sharded", interleave=2),
    ],
)
def test_sharded_rows_go_wherever_a_plan_can_take_them(theirs: Topology) -> None:
    for mine in (built(topology=SHARDED), built(topology=theirs)):
        assert diff(mine, built(topology=SHARDED)) == diff(built(topology=SHARDED), mine) == []
    plan_shards(page_format(model_shape(load_config("glm-5.3"))), SHARDED.sharding, theirs.sharding)


@pytest.mark.parametrize(
    ("theirs", "rule"),
    [
        (Topology(tp=4, dcp=3, main="sharded"), "dcp a divisor of tp, 4"),
        (Topology(tp=4, dcp=4, main="sharded", interleave=48), "interleave a divisor of the page's 64 tokens"),
        (Topology(tp=4, dcp=4, main="sharded", interleave=0), "interleave an integer of at least 1"),
        (Topology(tp=0), "tp an integer of at least 1"),
        (Topology(tp=4, dcp=2, index="sharded"), "index replicated on both"),
        (Topology(tp=4, dcp=2, main="striped"), "main replicated or sharded"),
        (Topology(pp=2), "equal pp"),
    ],
)
def test_what_no_plan_can_map_is_refused_by_name(theirs: Topology, rule: str) -> None:
    other = dataclasses.replace(built(), topology=theirs)
    for mine, peer in ((built(topology=SHARDED), other), (other, built(topology=SHARDED))):
        assert [(d.field, rule in d.rule) for d in diff(mine, peer)] == [("topology", True)]


def test_stages_of_a_pipeline_pair_with_their_like() -> None:
    assert diff(built(topology=Topology(pp=2)), built(topology=Topology(tp=2, pp=2))) == []


@pytest.mark.parametrize(
    ("theirs", "page_by_page"),
    [
        (SHARDED, True),
        (Topology(tp=8, dcp=2, main="sharded"), True),
        (Topology(tp=4, dcp=4, main="sharded"), False),
        (Topology(tp=4, dcp=2, main="sharded", interleave=64), False),
        (Topology(tp=4), False),
    ],
)
def test_one_rank_to_one_rank_takes_equal_shards(theirs: Topology, page_by_page: bool) -> None:
    mine, other = built(topology=SHARDED), built(topology=theirs)
    if page_by_page:
        require_equal_shards(mine, other)
        return
    with pytest.raises(ContractMismatch, match="equal dcp and interleave"):
        require_equal_shards(mine, other)


def test_both_sides_choose_the_same_digest() -> None:
    mine, theirs = built(digest_algorithms=("a", "b", "c")), built(digest_algorithms=("c", "b", "a"))
    assert common_digest(mine, theirs) == common_digest(theirs, mine) == "a"
    with pytest.raises(ContractMismatch, match="digest_algorithms"):
        common_digest(mine, built(digest_algorithms=("d",)))


@pytest.mark.parametrize("main_row", ["fp8_ds_mla", "fp8", "bf16", "nvfp4"])
def test_row_formats_are_told_apart_by_value(main_row: str) -> None:
    other = built(main_row=main_row)
    fields = {d.field for d in diff(built(), other)}
    if main_row == "fp8_ds_mla":
        assert fields == set()
        assert other.main_row_parts == "latent=512*e4m3 scale=4*f32 rope=64*bf16"
    else:
        assert fields >= {"main_row_format", "main_row_bytes", "main_row_parts", "segments"}


def test_draft_segments_are_content() -> None:
    with_draft = built("glm-5.3-mtp", **MTP)
    assert with_draft.bigram
    assert with_draft.draft_layers == 1
    assert len(with_draft.segments) == 101
    assert "draft_layers" in {d.field for d in diff(built(), with_draft)}


@pytest.mark.parametrize(
    ("preset", "facts", "field"),
    [
        ("glm-5.3-mtp", {}, "eagle_rule"),
        ("glm-5.3-mtp", {**MTP, "eagle_rule": "drop_page"}, "eagle_rule"),
        ("glm-5.3", {"eagle_rule": "bigram"}, "eagle_rule"),
        ("glm-5.3", {"eagle_rule": "other"}, "eagle_rule"),
        ("glm-5.3", {"speculation": "other"}, "speculation"),
        ("glm-5.3", {"placement": "token_major"}, "placement"),
        ("glm-5.3", {"topology": Topology(main="split")}, "topology.main"),
        ("glm-5.3", {"topology": Topology(tp=2, index="sharded")}, "topology.index"),
        ("glm-5.3", {"topology": Topology(tp=4, dcp=3, main="sharded")}, "dcp"),
        ("glm-5.3", {"topology": Topology(tp=4, dcp=4, main="sharded", interleave=5)}, "interleave"),
        ("glm-5.3", {"weights_id": ""}, "weights_id"),
        ("glm-5.3", {"digest_algorithms": ()}, "digest_algorithms"),
        ("glm-5.3", {**MTP, "index_sharing": True, "draft_topk": 4}, "index_sharing"),
    ],
)
def test_a_contract_that_cannot_be_kept_is_not_made(preset: str, facts: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        built(preset, **facts)


def test_deeper_draft_modules_are_refused() -> None:
    shape = dataclasses.replace(model_shape(load_config("glm-5.3-mtp")), draft_layers=2)
    with pytest.raises(ConfigError, match=r"^draft_layers: 2"):
        build_contract(shape, page_format(shape), identity=facts_of(**MTP))


def test_segments_must_be_those_of_the_layers_that_own_an_index() -> None:
    shape = model_shape(load_config("glm-5.3"))
    all_full = dataclasses.replace(shape, indexer_types=("full",) * shape.num_layers)
    with pytest.raises(ConfigError, match=r"^segments: "):
        build_contract(all_full, page_format(shape), identity=facts_of())


def test_it_survives_json() -> None:
    mine = built("glm-5.3-mtp", **MTP, topology=Topology(tp=8, dcp=2, main="sharded"), host="h")
    assert Contract.from_dict(json.loads(json.dumps(mine.to_dict()))) == mine


@pytest.mark.parametrize("name", list(RULES))
def test_a_missing_or_ill_typed_field_is_named(name: str) -> None:
    whole = built().to_dict()
    for wrong in ({k: v for k, v in whole.items() if k != name}, {**whole, name: 1.5}, {**whole, name: None}):
        with pytest.raises(ProtocolError, match=f"contract.{name}"):
            Contract.from_dict(wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("vocab_size", -1),
        ("vocab_size", 2**32),
        ("vocab_size", True),
        ("bigram", 1),
        ("host", "x" * 1025),
        ("indexer_types", ["full"] * 4097),
        ("indexer_types", [1]),
        ("segments", [["main.0", 1]]),
        ("segments", [{"name": "main.0"}]),
        ("topology", {"tp": 1}),
    ],
)
def test_values_of_a_peer_are_bounded(name: str, wrong: object) -> None:
    with pytest.raises(ProtocolError, match=f"contract.{name}"):
        Contract.from_dict({**built().to_dict(), name: wrong})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*RULES, "tp", "x"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(RULES)), JSON))
def test_anything_else_is_a_protocol_error(changes: dict[str, Any]) -> None:
    try:
        found = Contract.from_dict({**built().to_dict(), **changes})
    except ProtocolError:
        return
    assert Contract.from_dict(found.to_dict()) == found
    assert isinstance(diff(built(), found), list)
