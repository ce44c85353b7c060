"""What a node will need, from its configuration; held against the node itself."""

import subprocess
import sys

import pytest

from pdkv.cli.assemble import build_parts
from pdkv.cli.doctor.needs import needs_of
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig
from pdkv.errors import ConfigError

MIXED = ("full", "full", "shared", "shared", "shared", "full", "shared", "full")


@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(pool_pages=9, backend="loopback"),
        DecodeConfig(pool_bytes=20_000_000, backend="loopback", main_row="bf16"),
        PrefillConfig(pool_pages=9, backend="loopback", speculation="mtp"),
        DecodeConfig(pool_pages=9, backend="loopback", indexer_types=MIXED, engine="synthetic"),
    ],
)
def test_the_pool_is_the_nodes_own(config: NodeConfig) -> None:
    found = needs_of(config)
    parts = build_parts(config)
    try:
        assert found.pages == parts.pool.num_pages
        assert found.pool_bytes == sum(parts.pool.memory.buffer_bytes)
    finally:
        parts.close()


def test_copies_of_pages_count_only_where_they_are_made() -> None:
    plain = needs_of(DecodeConfig(pool_pages=9, offload_bytes=1 << 20))
    offloading = needs_of(DecodeConfig(pool_pages=9, offload_bytes=1 << 20, preempt="offload"))
    assert plain.offload_bytes == 0
    assert offloading.host_bytes - plain.host_bytes == offloading.offload_bytes == 1 << 20
    assert plain.host_bytes == plain.pool_bytes + 9 * 64


def test_memory_that_is_not_the_hosts_is_not_counted() -> None:
    for more in ({"device": "cuda:0", "memory": "torch"}, {"memory": "hugetlb"}):
        assert needs_of(DecodeConfig(pool_pages=9, **more)).host_bytes == 9 * 64  # type: ignore[arg-type]


def test_the_environment_wins_as_it_does_in_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    found = needs_of(DecodeConfig(ucx_tls="tcp", net_devices="eth0"))
    assert (found.ucx_tls, found.net_devices) == ("tcp", "mlx5_0:1")


def test_what_can_not_be_is_named() -> None:
    with pytest.raises(ConfigError, match="model"):
        needs_of(DecodeConfig(model="glm-9"))
    with pytest.raises(ConfigError, match="pool_bytes"):
        needs_of(DecodeConfig(pool_bytes=1000))


def test_nothing_heavy_is_imported() -> None:
    code = "import sys; from pdkv.cli.doctor import needs, system, network; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
