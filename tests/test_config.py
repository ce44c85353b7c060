"""Configuration: who wins, what is refused and by which name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.config import (
    DecodeConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
    ServiceConfig,
    load_config_file,
    parse_bytes,
    resolve,
)
from pdkv.errors import ConfigError
from pdkv.kvcache.eviction import ORDERS

NODE = {"node_id": "p0"}


def refused(cls: type[ServiceConfig], values: dict[str, Any], **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        resolve(cls, values, **{"environ": {}, **more})
    return error.value


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text, "utf-8")
    return path


def test_defaults() -> None:
    config = resolve(PrefillConfig, NODE, environ={})
    assert (config.bind, config.lease_ttl_s, config.chunk_tokens) == ("127.0.0.1:0", 30.0, 32_768)
    assert (config.read_max_bytes, config.digest, config.placement) == (64 << 20, "xxh3_64", "page_major")
    assert not resolve(DecodeConfig, NODE, environ={}).allow_fault_injection


def test_a_node_is_called_as_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, name in (("pod-7", "pod-7"), ("a b.c", "a-b.c"), ("--", "node"), ("x" * 80, "x" * 63), ("", "node")):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        made = resolve(DecodeConfig, {}, environ={}).node_id
        assert made == name
        assert resolve(DecodeConfig, {"node_id": made}, environ={}).node_id == name


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "node_id: file\nseed: 1\nthreads: 1\nlog_level: debug\n")
    environ = {"PDKV_SEED": "2", "PDKV_THREADS": "2", "HOME": "/"}
    config = resolve(DecodeConfig, {"threads": 3, "seed": None}, file, environ)
    assert (config.node_id, config.threads, config.seed, config.log_level) == ("file", 3, 2, "debug")
    assert config.rollback_tokens == 0


def test_environment_writes_lists_and_sizes_as_text() -> None:
    environ = {"PDKV_PREFILL_ADDRESSES": "a:1, b:2", "PDKV_POOL_BYTES": "2GiB", "PDKV_REQUIRE_RDMA": "true"}
    config = resolve(DecodeConfig, NODE, environ=environ)
    assert config.prefill_addresses == ("a:1", "b:2")
    assert (config.pool_bytes, config.require_rdma) == (2 << 30, True)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKV_NODE_ID", "from-env")
    assert resolve(PrefillConfig, {}).node_id == "from-env"


def test_an_environment_may_be_shared_between_roles() -> None:
    environ = {"PDKV_CHUNK_TOKENS": "64", "PDKV_ALLOW_FAULT_INJECTION": "1"}
    assert resolve(PrefillConfig, NODE, environ=environ).chunk_tokens == 64
    assert resolve(DecodeConfig, NODE, environ=environ).allow_fault_injection


@pytest.mark.parametrize("cls", [PrefillConfig, DecodeConfig, RouterConfig])
def test_every_field_says_what_it_is(cls: type[ServiceConfig]) -> None:
    assert [name for name, field in cls.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("cls", "values", "field", "allowed"),
    [
        (PrefillConfig, {"node_id": "a#b"}, "node_id", "pattern"),
        (PrefillConfig, {"chunk_token": 64}, "chunk_token", "chunk_tokens"),
        (DecodeConfig, {"chunk_tokens": 64}, "chunk_tokens", "prefill_addresses"),
        (PrefillConfig, {"chunk_tokens": 100}, "chunk_tokens", "multiple of 64"),
        (PrefillConfig, {"chunk_tokens": 0}, "chunk_tokens", "greater than 0"),
        (PrefillConfig, {"lease_ttl_s": -1}, "lease_ttl_s", "greater than 0"),
        (PrefillConfig, {"lease_ttl_s": float("nan")}, "lease_ttl_s", ""),
        (PrefillConfig, {"digest": "crc"}, "digest", "'xxh3_64' or 'none'"),
        (PrefillConfig, {"placement": "row_major"}, "placement", "page_major"),
        (PrefillConfig, {"eagle_rule": "two"}, "eagle_rule", "drop_page"),
        (PrefillConfig, {"bind": "localhost"}, "bind", "host:port"),
        (PrefillConfig, {"bind": "localhost:70000"}, "bind", "host:port"),
        (PrefillConfig, {"bind": "0.0.0.0:0"}, "bind", "advertise"),
        (PrefillConfig, {"bind": "0.0.0.0:0", "advertise": "[::]:1"}, "advertise", "advertise"),
        (PrefillConfig, {"pool_bytes": "1 potato"}, "pool_bytes", "64MiB"),
        (PrefillConfig, {"pool_bytes": 0}, "pool_bytes", "greater than 0"),
        (PrefillConfig, {"pool_pages": 1}, "pool_pages", "greater than or equal to 2"),
        (PrefillConfig, {"pool_pages": 9, "pool_bytes": 9}, "pool_pages", "not both"),
        (PrefillConfig, {"memory": "file"}, "memory_path", "only then"),
        (PrefillConfig, {"memory_path": "a"}, "memory_path", "only then"),
        (PrefillConfig, {"draft_layers": 1}, "draft_layers", "mtp"),
        (PrefillConfig, {"draft_layers": 2, "speculation": "mtp"}, "draft_layers", "mtp"),
        (DecodeConfig, {"speculation": "mtp", "eagle_rule": "drop_page"}, "eagle_rule", "bigram"),
        (DecodeConfig, {"speculation": "oracle", "rollback_tokens": 3}, "rollback_tokens", "draft_tokens"),
        (DecodeConfig, {"speculation": "eagle"}, "speculation", "'oracle'"),
        (DecodeConfig, {"draft_tokens": 0}, "draft_tokens", "greater than or equal to 1"),
        (PrefillConfig, {"indexer_types": "full,half"}, "indexer_types.1", "'full' or 'shared'"),
        (DecodeConfig, {"prefill_addresses": "a:1,b"}, "prefill_addresses.1", "host:port"),
        (RouterConfig, {"decode_addresses": "a:1"}, "prefill_addresses", "no default"),
        (RouterConfig, {"decode_addresses": "", "prefill_addresses": "a:1"}, "decode_addresses", "at least 1"),
    ],
)
def test_refusals_name_the_field(cls: type[ServiceConfig], values: dict[str, Any], field: str, allowed: str) -> None:
    error = refused(cls, {**NODE, **values})
    assert error.fields["field"] == field
    assert allowed in error.fields["allowed"]
    if field in values:
        assert str(values[field]) in error.fields["have"]


def test_an_unknown_variable_is_refused() -> None:
    error = refused(PrefillConfig, NODE, environ={"PDKV_CHUNK_TOKEN": "64"})
    assert error.fields["field"] == "PDKV_CHUNK_TOKEN"
    assert "PDKV_CHUNK_TOKENS" in error.fields["allowed"]


@pytest.mark.parametrize("text", ["- a", "a: [", "1: 2", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="config: "):
        load_config_file(yaml_file(tmp_path, text))


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config_file(tmp_path / "none.yaml")
    assert load_config_file(yaml_file(tmp_path, "")) == {}


def test_every_eviction_order_can_be_named_and_no_other() -> None:
    for name in ORDERS:
        assert resolve(NodeConfig, {**NODE, "eviction": name}, environ={}).eviction == name
    assert "'lru', 'lfu', 'fifo' or 'priority'" in str(refused(NodeConfig, {**NODE, "eviction": "mru"}))


def test_total_pages() -> None:
    def total(**values: object) -> int:
        return resolve(NodeConfig, {**NODE, **values}, environ={}).total_pages(1000)

    assert total(pool_pages=7) == 7
    assert total(pool_bytes=2000) == 2
    assert total(pool_bytes="5.5kB") == 5
    with pytest.raises(ConfigError, match=r"pool_bytes: 1999 .*2000"):
        total(pool_bytes=1999)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("55GB", 55 * 10**9),
        ("56 GiB", 56 << 30),
        ("1.5kib", 1536),
        ("0.1TB", 10**11),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.5", "1.5B", "1e9", "1 GB x", "5 PB", "0x10", "१"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_bytes(text, "memory")
    assert (error.value.fields["field"], error.value.fields["have"]) == ("memory", text)


@given(st.integers(0, 2**70))
def test_no_byte_is_lost(count: int) -> None:
    assert parse_bytes(f"{count}MiB") == count << 20
