"""Where a config's values come from, and who wins."""

from pathlib import Path

import pytest

from pdkv.config import DecodeConfig, PrefillConfig
from pdkv.errors import ConfigError
from pdkv.resolve import load_config_file, resolve
from tests.test_config import NODE, refused


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text, "utf-8")
    return path


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


def test_an_unknown_variable_is_refused() -> None:
    error = refused(PrefillConfig, NODE, environ={"PDKV_CHUNK_TOKEN": "64"})
    assert error.fields["field"] == "PDKV_CHUNK_TOKEN"
    assert "PDKV_CHUNK_TOKENS" in error.fields["allowed"]


@pytest.mark.parametrize("key", ["node-id", "prefill_adresses", "poolPages"])
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(tmp_path: Path, key: str) -> None:
    error = refused(DecodeConfig, {}, yaml_path=yaml_file(tmp_path, f"{key}: x\n"))
    meant = {"node-id": "node_id", "prefill_adresses": "prefill_addresses", "poolPages": "pool_pages"}[key]
    assert error.fields["allowed"].startswith(f"did you mean {meant}? one of advertise, ")


def test_a_key_like_no_other_is_refused_without_a_guess(tmp_path: Path) -> None:
    error = refused(DecodeConfig, {}, yaml_path=yaml_file(tmp_path, "zzz: 1\n"))
    assert error.fields["allowed"].startswith("one of advertise, ")


@pytest.mark.parametrize("text", ["- a", "a: [", "1: 2", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="config: "):
        load_config_file(yaml_file(tmp_path, text))


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config_file(tmp_path / "none.yaml")
    assert load_config_file(yaml_file(tmp_path, "")) == {}


@pytest.mark.parametrize("text", ["seed: null", "seed: [1]", "seed: " + "1" * 5000, "seed: 1.5", "seed: 2020-01-01"])
def test_what_a_file_says_is_refused_in_our_words(text: str, tmp_path: Path) -> None:
    error = refused(PrefillConfig, NODE, yaml_path=yaml_file(tmp_path, text))
    assert error.fields["field"] in ("seed", "config")
    assert "should" not in str(error)
