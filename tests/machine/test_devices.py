"""Devices of machines that aren't this one, and of this one."""

from pathlib import Path

from pdkv.machine.devices import Devices, RdmaPort, devices, lets_use, shared_path
from tests.machine.trees import gpu, net_device, plant, rdma_nic, roce_gid


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert devices(tmp_path) == Devices()


def test_this_machine_has_a_way_to_itself() -> None:
    loopback = next(device for device in devices().net if device.name == "lo")
    assert loopback.up
    assert not loopback.physical
    assert loopback.numa_node is None


def test_an_rdma_device_with_its_port(tmp_path: Path) -> None:
    [device] = devices(plant(tmp_path, rdma_nic(node=1))).rdma
    assert device.ports == (RdmaPort(1, "ACTIVE", "InfiniBand", 400.0),)
    assert (device.name, device.numa_node, device.openable, device.usable) == ("mlx5_0", 1, True, True)


def test_a_port_that_is_down_makes_no_usable_device(tmp_path: Path) -> None:
    found = devices(plant(tmp_path, rdma_nic(state="1: DOWN")))
    assert len(found.rdma) == 1
    assert not found.usable_rdma


def test_a_container_without_the_verbs_device_can_not_use_it(tmp_path: Path) -> None:
    plant(tmp_path, rdma_nic())
    (tmp_path / "dev/infiniband/uverbs-mlx5_0").unlink()
    found = devices(tmp_path)
    assert not found.rdma[0].openable
    assert not found.usable_rdma


def test_a_device_without_verbs_at_all_can_not_be_used(tmp_path: Path) -> None:
    files = {name: content for name, content in rdma_nic().items() if "verbs" not in name}
    assert not devices(plant(tmp_path, files | {"dev/infiniband/rdma_cm": ""})).usable_rdma


def test_only_routable_roce_v2_gids_count(tmp_path: Path) -> None:
    gids = {
        **roce_gid("mlx5_0", 0, "fe80:0000:0000:0000:0ac0:ebff:fe11:2233"),
        **roce_gid("mlx5_0", 1, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
        **roce_gid("mlx5_0", 2, "0000:0000:0000:0000:0000:0000:0000:0000"),
        **roce_gid("mlx5_0", 3, "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    }
    [device] = devices(plant(tmp_path, rdma_nic(link="Ethernet") | gids)).rdma
    assert device.ports[0].roce_gids == (3,)


def test_network_interfaces(tmp_path: Path) -> None:
    lo = {"sys/class/net/lo/operstate": "unknown"}
    found = devices(plant(tmp_path, net_device(node=1) | net_device("eth1", state="down") | lo)).net
    assert [(d.name, d.up, d.physical, d.gbit_per_s) for d in found] == [
        ("eth0", True, True, 100.0),
        ("eth1", False, True, 100.0),
        ("lo", True, False, None),
    ]


def test_the_nearest_nic_of_a_gpu_shares_most_of_its_path(tmp_path: Path) -> None:
    near, far = "10:00.0/11:00.0/12:00.0", "20:00.0/21:00.0"
    files = rdma_nic("near", slot=near) | rdma_nic("far", slot=far) | gpu("10:00.0/11:00.0/13:00.0", node=1)
    plant(tmp_path, {**files, "sys/bus/pci/devices/0000:40:00.0/vendor": "0x8086"})
    found = devices(tmp_path)
    assert [card.numa_node for card in found.gpus] == [1]
    distances = {device.name: shared_path(device.pci, found.gpus[0].pci) for device in found.rdma}
    assert distances["near"] > distances["far"]
    assert shared_path("", found.gpus[0].pci) == 0


def test_devices_as_ucx_names_them() -> None:
    for everything in ("", "all"):
        assert lets_use(everything, "mlx5_0")
    assert lets_use("mlx5_0:1, eth0", "mlx5_0")
    assert lets_use("mlx5_0:1, eth0", "eth0")
    assert not lets_use("mlx5_0:1", "mlx5_1")
    assert lets_use("^lo,mlx5_0:1", "mlx5_1")
    assert not lets_use("^lo,mlx5_0:1", "mlx5_0")
