"""Lanes of machines that aren't this one."""

from __future__ import annotations

from typing import Any

import pytest

from pdkv.cli.doctor import network
from pdkv.cli.doctor.finding import Level
from pdkv.errors import LaneRefused
from pdkv.machine.devices import Devices
from pdkv.transfer.backends.ucx_probe import UcxFacts
from pdkv.transfer.backends.ucx_settings import tuning
from tests.cli.doctor.cases import NO_RDMA, WITH_RDMA, needs, nic, process

OK, WARN, FAIL = Level
DOWN = Devices(rdma=(nic(state="DOWN"),))
SHUT = Devices(rdma=(nic(openable=False),))
ROCE = Devices(rdma=(nic(link_layer="Ethernet", roce_gids=(3,)),))
WITHOUT_ADDRESS = Devices(rdma=(nic(link_layer="Ethernet"),))
CASES: list[tuple[Devices, dict[str, Any], Level, Level, str]] = [
    # machine, settings, level, level where RDMA is required, words
    (NO_RDMA, {}, OK, FAIL, "there is no RDMA device"),
    (DOWN, {}, WARN, FAIL, "mlx5_0: port 1 is DOWN"),
    (SHUT, {}, WARN, FAIL, "/dev/infiniband/uverbs of it can not be opened here"),
    (WITH_RDMA, {}, OK, OK, "mlx5_0: port 1 InfiniBand at 400 Gbit/s"),
    (WITH_RDMA, {"ucx_tls": "tcp,self"}, WARN, FAIL, "UCX_TLS=tcp,self leaves it out"),
    (WITH_RDMA, {"ucx_tls": "rc,self"}, OK, OK, "mlx5_0"),
    (WITH_RDMA, {"ucx_tls": "^ib"}, WARN, FAIL, "UCX_TLS=^ib leaves it out"),
    (WITH_RDMA, {"ucx_tls": "^cma"}, OK, OK, "mlx5_0"),
    (WITH_RDMA, {"net_devices": "eth0"}, WARN, FAIL, "UCX_NET_DEVICES=eth0 leaves it out"),
    (WITH_RDMA, {"net_devices": "mlx5_0:1"}, OK, OK, "mlx5_0"),
    (ROCE, {}, OK, OK, "port 1 Ethernet"),
    (WITHOUT_ADDRESS, {}, WARN, WARN, "no RoCE v2 GID of an address on mlx5_0"),
]


@pytest.mark.parametrize(("machine", "more", "plain", "required", "words"), CASES)
def test_rdma(machine: Devices, more: dict[str, Any], plain: Level, required: Level, words: str) -> None:
    for level, must in ((plain, False), (required, True)):
        asked = needs(**more, require_rdma=must)
        found = network.rdma(asked, machine)
        assert (found.level, words in found.found) == (level, True), found
        assert found.found.startswith("RDMA is required, but ") == (level is FAIL)
        if level is FAIL:
            with pytest.raises(LaneRefused, match="RDMA is required, but") as refused:
                network.require_rdma(asked, machine)
            assert found.todo in str(refused.value)
        else:
            network.require_rdma(asked, machine)


def test_a_port_that_is_down_and_one_that_may_not_be_opened_want_different_things() -> None:
    assert "bring a port up" in network.rdma(needs(), DOWN).todo
    assert "/dev/infiniband" in network.rdma(needs(), SHUT).todo


FACTS = UcxFacts("1.23.0", "libucp.so", (("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1")))
WITHOUT = UcxFacts("1.23.0", "libucp.so", (("tcp", "eth0"), ("cma", "memory")))


@pytest.mark.parametrize(
    ("facts", "more", "level", "words"),
    [
        (FACTS, {}, OK, "1.23.0: tcp/eth0, rc_mlx5/mlx5_0:1"),
        (WITHOUT, {}, WARN, "it doesn't use mlx5_0"),
        (WITHOUT, {"require_rdma": True}, FAIL, "it doesn't use mlx5_0"),
        (WITHOUT, {"ucx_tls": "tcp"}, OK, "1.23.0"),
        (WITHOUT, {"net_devices": "eth0"}, OK, "1.23.0"),
        ("UCX ended its process by SIGSEGV", {}, FAIL, "SIGSEGV"),
    ],
)
def test_ucx(facts: UcxFacts | str, more: dict[str, Any], level: Level, words: str) -> None:
    found = network.ucx(facts, needs(**more), WITH_RDMA)
    assert (found.level, words in found.found) == (level, True), found


def test_settings_with_their_reasons() -> None:
    found = {f.check: f for f in network.settings(tuning(Devices(), {"UCX_TLS": "tcp"}), process())}
    assert {f.level for f in found.values()} == {OK}
    assert found["UCX_TCP_RX_SEG_SIZE"].found.startswith("1m: ")
    assert found["UCX_TLS"].found == "tcp: set by you"
    assert "socket buffers" in found


def test_a_setting_of_yours_that_is_not_ours_is_told_with_the_reason() -> None:
    environ = {"UCX_TCP_RX_SEG_SIZE": "64k", "UCX_TCP_SNDBUF": "512k"}
    found = {f.check: f for f in network.settings(tuning(Devices(), environ), process())}
    own = found["UCX_TCP_RX_SEG_SIZE"]
    assert own.level is WARN
    assert own.found.startswith("64k, yours; ours would be 1m: UCX's 8 KiB")
    assert "both ends must be equal" in own.todo
    # what is as we would have it is well, whoever set it
    assert found["UCX_TCP_SNDBUF"].level is OK


def test_a_socket_buffer_that_the_kernel_does_not_grant() -> None:
    small = process(socket_buffer_bytes=212_992)
    found = {f.check: f for f in network.settings(tuning(Devices(), {}), small)}
    assert found["socket buffers"].level is WARN
    auto = {f.check: f for f in network.settings(tuning(Devices(), {"UCX_TCP_SNDBUF": "auto"}), small)}
    assert "socket buffers" not in auto


@pytest.mark.parametrize(
    ("tls", "level"),
    [("", OK), ("all", OK), ("rc,cuda_copy", OK), ("rc,cuda", OK), ("rc,tcp", FAIL), ("^cuda", FAIL), ("^cma", OK)],
)
def test_a_pool_on_a_gpu_needs_a_cuda_transport(tls: str, level: Level) -> None:
    assert network.gpu_transports(needs(ucx_tls=tls)).level is level
