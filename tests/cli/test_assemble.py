"""A node's parts from its configuration: what follows from the model, what from the settings, what is refused."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdkv.adapters.reference.model import load_model
from pdkv.adapters.reference.mtp import MtpDrafter
from pdkv.cli.assemble import build_parts, contract_of, described_contract
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig
from pdkv.contract import Contract, diff, require_compatible
from pdkv.errors import ConfigError, ContractMismatch, InjectedFault
from pdkv.geometry.diagnose.step import DENSE_ENGINES
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import RequestId
from pdkv.kvcache.eviction import ORDERS
from pdkv.kvcache.memory import PoolMemory
from pdkv.machine.affinity import preferred_node
from pdkv.machine.resources import numa_nodes
from pdkv.node.base import NodeParts
from pdkv.node.oracle import Oracle
from pdkv.node.stages import Stage, no_hook

OTHER_LIST = ("full", "full", "shared", "shared", "shared", "full", "shared", "full")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No UCX settings, and none left behind."""
    for variable in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return monkeypatch


@contextmanager
def parts_of(cls: type[NodeConfig] = DecodeConfig, **settings: Any) -> Iterator[NodeParts]:
    pool = {} if "pool_bytes" in settings else {"pool_pages": 4}
    parts = build_parts(cls(**{"backend": "loopback", "node_id": "n0", "threads": 1, **pool, **settings}))
    try:
        yield parts
    finally:
        parts.close()


def index_layers(parts: NodeParts) -> list[int]:
    return [segment.layer for segment in parts.pool.fmt.segments if segment.group is Group.INDEX]


def test_layer_lists_come_from_the_layers_that_the_engine_built() -> None:
    for listed in (None, OTHER_LIST):
        model = load_model("tiny", indexer_types=listed)
        built = tuple("full" if layer.self_attn.indexer else "shared" for layer in model.module.model.layers)
        with parts_of(indexer_types=listed) as parts:
            assert parts.contract.indexer_types == built == (listed or built)
            assert index_layers(parts) == [layer for layer, kind in enumerate(built) if kind == "full"]
            assert [name for name, _ in parts.contract.segments] == [s.name for s in parts.pool.fmt.segments]


@pytest.mark.parametrize("touch", [True, False])
def test_memory_is_committed_where_that_is_asked_for(touch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    committed: list[PoolMemory] = []
    monkeypatch.setattr(PoolMemory, "commit", lambda memory: committed.append(memory))
    with parts_of(touch_pool=touch) as parts:
        assert committed == ([parts.pool.memory] if touch else [])


def test_a_pool_is_bound_where_a_node_is_named_and_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    node = max(numa_nodes())
    done: list[str] = []
    commit = PoolMemory.commit
    monkeypatch.setattr(PoolMemory, "commit", lambda m: (done.append(str(preferred_node(m.addresses[0]))), commit(m)))
    with parts_of(numa_node=str(node)) as parts:
        assert preferred_node(parts.pool.memory.addresses[0]) == node
    with parts_of(numa_node="none") as parts:
        assert preferred_node(parts.pool.memory.addresses[0]) is None
    assert done == [str(node), "None"]
    with pytest.raises(ConfigError, match="numa_node: '900'"), parts_of(numa_node="900"):
        pass


def test_the_engine_is_named_in_the_contract_as_diagnoses_know_it() -> None:
    with parts_of() as parts:
        assert parts.contract.engine in DENSE_ENGINES


def test_an_engine_that_built_other_layers_than_asked_for_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the contract follows the engine, not the configuration."""
    monkeypatch.setattr("pdkv.cli.assemble.load_model", lambda *_, **__: load_model("tiny", indexer_types=OTHER_LIST))
    with parts_of() as parts:
        assert parts.contract.indexer_types == OTHER_LIST
        assert index_layers(parts) == [0, 1, 5, 7]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"seed": 3, "indexer_types": OTHER_LIST, "digest": "none"},
        {"speculation": "mtp", "draft_tokens": 2},
        {"engine": "synthetic"},
    ],
)
def test_a_contract_can_be_had_without_the_model(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with parts_of(**settings) as parts:
        made = parts.contract
    monkeypatch.setattr("pdkv.cli.assemble.load_model", lambda *_, **__: pytest.fail("nothing is to be loaded"))
    assert described_contract(DecodeConfig(**settings)) == made


@pytest.mark.parametrize("name", ORDERS)
def test_the_tree_evicts_in_the_order_that_was_named(name: str) -> None:
    with parts_of(eviction=name) as parts:
        assert type(parts.manager.tree.order) is ORDERS[name]


def test_the_pool_takes_pages_or_whole_pages_of_bytes() -> None:
    page_bytes = page_format(load_model("tiny").shape).page_bytes
    with parts_of(pool_pages=9) as parts:
        assert parts.pool.num_pages == 9
        assert parts.manager.census()["free"] == parts.manager.census()["total"] == 8
    # besides the write sink
    with parts_of(pool_bytes=10 * page_bytes + 1) as parts:
        assert parts.pool.num_pages == NodeConfig(pool_bytes=10 * page_bytes + 1).total_pages(page_bytes)
        assert 10 * page_bytes <= parts.pool.num_pages * page_bytes <= 11 * page_bytes
    with (
        pytest.raises(ConfigError, match="pool_bytes: 1000 can't be used; allowed: at least"),
        parts_of(pool_bytes=1000),
    ):
        pass


def test_rows_and_placement_reach_the_pool() -> None:
    with parts_of(main_row="bf16", placement="layer_major", memory="torch") as parts:
        assert parts.pool.fmt.main_row.name == parts.contract.main_row_format == "bf16"
        assert parts.pool.placement.kind == parts.contract.placement == "layer_major"
        assert parts.pool.memory.kind == "torch"


def test_a_node_has_a_name_of_its_own_each_life() -> None:
    with parts_of(node_id="n7") as first, parts_of(node_id="n7") as second:
        assert first.name.node == second.name.node == "n7"
        assert first.name != second.name
        assert first.intro().name == first.name
        assert first.contract.fingerprint == second.contract.fingerprint


def test_a_node_without_digests() -> None:
    """One that checks none reads from one that makes them; one that makes none is found out by one that checks."""
    model = load_model("tiny")
    fmt = page_format(model.shape)

    def contract(cls: type[NodeConfig], **settings: Any) -> Contract:
        return contract_of(cls(**settings), model, fmt)

    checking, unchecked = contract(DecodeConfig), contract(DecodeConfig, digest="none")
    making, silent = contract(PrefillConfig), contract(PrefillConfig, digest="none")
    for mine, theirs in ((checking, making), (unchecked, making), (unchecked, silent)):
        require_compatible(mine, theirs)
    with pytest.raises(ContractMismatch) as refused:
        require_compatible(checking, silent)
    assert [d.field for d in refused.value.differences] == ["digest_algorithms"]
    with parts_of(digest="none") as parts, parts_of() as others:
        assert (parts.verifier.checks_digests, others.verifier.checks_digests) == (False, True)


def test_what_both_must_share_comes_from_the_settings() -> None:
    with parts_of(eagle_rule="drop_page", rollback_tokens=3) as parts:
        assert (parts.contract.eagle_rule, parts.contract.speculation) == ("drop_page", "eagle")
        assert parts.contract.rollback_tokens == 3
    with parts_of(seed=0) as one, parts_of(seed=1) as other:
        assert one.contract.weights_id != other.contract.weights_id


def test_a_draft_layer_is_built_in_the_pages_and_in_the_contract() -> None:
    with parts_of(speculation="mtp", draft_tokens=2, draft_layers=1, eagle_rule="bigram") as parts, parts_of() as plain:
        contract = parts.contract
        assert (contract.speculation, contract.eagle_rule, contract.bigram) == ("mtp", "bigram", True)
        assert (contract.draft_layers, contract.draft_tokens, contract.rollback_tokens) == (1, 2, 2)
        assert (contract.draft_topk, contract.index_sharing) == (1, False)
        extra = {s.name for s in parts.pool.fmt.segments} - {s.name for s in plain.pool.fmt.segments}
        assert extra == {"draft_main.8", "draft_index.8"}
        assert isinstance(parts.drafter, MtpDrafter)
        assert plain.drafter is None
        assert {d.field for d in diff(contract, plain.contract)} >= {
            "draft_layers",
            "weights_id",
            "speculation",
            "bigram",
        }


def test_an_oracle_needs_no_pages() -> None:
    with parts_of(speculation="oracle", draft_tokens=4) as parts, parts_of() as plain:
        assert isinstance(parts.drafter, Oracle)
        assert (parts.contract.speculation, parts.contract.rollback_tokens) == ("oracle", 4)
        fields = {d.field for d in diff(parts.contract, plain.contract)}
        assert fields == {"speculation", "rollback_tokens", "draft_tokens"}


@pytest.mark.parametrize(("topk", "effective"), [(1, True), (2, False)])
def test_the_contract_has_the_effective_sharing_not_the_one_asked_for(topk: int, effective: bool) -> None:
    with parts_of(speculation="mtp", index_sharing=True, draft_topk=topk) as parts:
        assert (parts.contract.draft_topk, parts.contract.index_sharing) == (topk, effective)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model": "glm-9"}, "model"),
        ({"model": "glm-5.3"}, "preset with seeded weights"),
        ({"main_row": "int8"}, "main_row"),
        ({"main_row": "nvfp4"}, "main row format"),
        ({"indexer_types": ("full",)}, "indexer_types, entries"),
        ({"indexer_types": ("shared",) * 8}, "indexer_types[0]"),
        ({"device": "cuda"}, "memory"),
        ({"rails": ("eth0", "eth1", "eth0")}, "rails"),
        ({"rails": ("eth0",), "net_devices": "eth0"}, "rails"),
        ({"memory": "file", "memory_path": "/nowhere/pool"}, "pool bytes"),
    ],
)
def test_what_cannot_be_built_is_named_and_leaves_no_thread(settings: dict[str, Any], field: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError) as refused, parts_of(**settings):
        pass
    assert refused.value.fields["field"] == field
    assert threading.active_count() == before


def test_ucx_settings_reach_its_environment_unless_the_operator_set_them(environment: pytest.MonkeyPatch) -> None:
    with parts_of():
        assert "UCX_TLS" not in os.environ
    environment.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    with parts_of(ucx_tls="tcp,self", net_devices="eth0"):
        assert os.environ["UCX_TLS"] == "tcp,self"
        assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_each_device_is_a_rail(environment: pytest.MonkeyPatch) -> None:
    with parts_of(rails=("eth0", "eth1")) as parts:
        assert [rail.device for rail in parts.transfer.status().rails] == ["eth0", "eth1"]
        assert "UCX_NET_DEVICES" not in os.environ, "all agents would use both"
    environment.setenv("UCX_NET_DEVICES", "eth0,eth1")
    with pytest.raises(ConfigError, match="neither net_devices nor UCX_NET_DEVICES"), parts_of(rails=("eth0", "eth1")):
        pass
    environment.delenv("UCX_NET_DEVICES")
    with parts_of() as parts:
        assert [rail.device for rail in parts.transfer.status().rails] == [""]


def test_other_weights_are_another_contract() -> None:
    model = load_model("tiny")
    fmt = page_format(model.shape)
    mine, theirs = (contract_of(PrefillConfig(), m, fmt) for m in (model, replace(model, weights_id="sha256:other")))
    with pytest.raises(ContractMismatch, match=r"weights_id: mine sha256:.*, theirs sha256:other"):
        require_compatible(mine, theirs)


def test_a_synthetic_engine_takes_a_model_of_any_size() -> None:
    parts = build_parts(DecodeConfig(engine="synthetic", model="glm-5.3", pool_pages=3, backend="loopback"))
    try:
        assert parts.contract.engine == "synthetic"
        assert parts.contract.weights_id == "synthetic/0"
        assert len(parts.contract.indexer_types) == 78
    finally:
        parts.close()


def test_a_synthetic_engine_has_no_draft_layer() -> None:
    with pytest.raises(ConfigError, match="speculation"):
        build_parts(DecodeConfig(engine="synthetic", speculation="mtp", pool_pages=3, backend="loopback"))


def test_a_fault_plan_is_in_the_stages_and_in_the_backend() -> None:
    with parts_of(allow_fault_injection=True, fault_plan="fail@decode.queued:nth=1,corrupt:p=0.5;seed=1") as parts:
        with pytest.raises(InjectedFault):
            parts.at(Stage.QUEUED, RequestId("r"))
        parts.at(Stage.QUEUED, RequestId("r"))
        assert parts.transfer.backend_name == "faulty loopback"
    with pytest.raises(ConfigError, match="explode"), parts_of(allow_fault_injection=True, fault_plan="explode@x:p=1"):
        pass
    with parts_of() as parts:
        assert (parts.at, parts.transfer.backend_name) == (no_hook, "loopback")
