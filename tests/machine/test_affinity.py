"""What is bound to which node, and the kernel's own answer."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.machine.affinity import AUTO, NONE, Affinity, affinity, allowed_cpus, prefer_node, preferred_node
from pdkv.machine.devices import Devices, devices
from pdkv.machine.resources import numa_nodes
from tests.machine.trees import net_device, plant, rdma_nic

HERE = allowed_cpus()
TWO = {0: frozenset({max(HERE) + 1}), 1: HERE}
BYTES = 4 << 20


def test_one_node_leaves_nothing_to_choose() -> None:
    found = affinity(AUTO, devices(), {0: HERE})
    assert found == Affinity(None, frozenset(), "the machine has one node")


def test_the_node_of_the_only_nic(tmp_path: Path) -> None:
    found = affinity(AUTO, devices(plant(tmp_path, rdma_nic(node=1))), TWO)
    assert found == Affinity(1, HERE, "of mlx5_0 on node 1")


def test_rdma_counts_before_ethernet_and_ethernet_where_there_is_no_other(tmp_path: Path) -> None:
    both = rdma_nic(node=1) | net_device(node=0)
    assert affinity(AUTO, devices(plant(tmp_path / "a", both)), TWO).node == 1
    assert affinity(AUTO, devices(plant(tmp_path / "b", both | rdma_nic(state="1: DOWN"))), TWO).node == 0


def test_cpus_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    found = affinity(AUTO, devices(plant(tmp_path, rdma_nic(node=0))), TWO)
    assert (found.node, found.cpus) == (0, frozenset())


def test_nics_that_do_not_agree_choose_nothing_unless_one_is_named(tmp_path: Path) -> None:
    found = devices(plant(tmp_path, rdma_nic("a", node=0) | rdma_nic("b", node=1, slot="04:00.0")))
    unsure = affinity(AUTO, found, TWO)
    assert unsure.node is None
    assert "a on node 0, b on node 1" in unsure.why
    assert affinity(AUTO, found, TWO, "b:1").node == 1
    assert affinity(AUTO, found, TWO, "^b").node == 0
    assert affinity(AUTO, found, TWO, "all").node is None


def test_a_nic_that_does_not_say_its_node_chooses_nothing(tmp_path: Path) -> None:
    found = affinity(AUTO, devices(plant(tmp_path, rdma_nic(node=-1))), TWO)
    assert (found.node, found.why) == (None, "no NIC says its node (mlx5_0 on node ?)")
    assert affinity(AUTO, Devices(), TWO).why == "no NIC says its node (none found)"


def test_a_node_that_is_named() -> None:
    assert affinity("1", Devices(), TWO) == Affinity(1, HERE, "it was named")
    assert affinity(NONE, Devices(), TWO) == Affinity(None, frozenset(), "not asked for")
    for wrong in ("2", "near", "-1"):
        with pytest.raises(ConfigError, match=r"numa_node: .* allowed: auto, none, 0, 1"):
            affinity(wrong, Devices(), TWO)


def test_the_kernel_binds_memory_to_a_node_and_refuses_one_that_is_not_there() -> None:
    region = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(region, np.uint8).ctypes.data
    assert preferred_node(address) is None
    node = max(numa_nodes())
    prefer_node(address, BYTES, node)
    assert preferred_node(address) == node
    with pytest.raises(ConfigError, match="numa_node: 900 can't be used"):
        prefer_node(address, BYTES, 900)
    assert preferred_node(address) == node
