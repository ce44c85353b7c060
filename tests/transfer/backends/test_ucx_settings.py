"""What UCX is set to; that the live library takes it is seen in test_nixl."""

from pathlib import Path

from pdkv.machine.devices import Devices, devices
from pdkv.transfer.backends.ucx_settings import allow, missing, shown, tcp_segments, tuning
from tests.machine.trees import gpu, plant

SEGMENTS = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")


def test_each_choice_has_a_reason() -> None:
    settings = tuning(Devices(), {})
    assert {s.source for s in settings} == {"chosen"}
    assert all(s.reason and s.value == s.choice for s in settings)
    assert {"UCX_TCP_KEEPIDLE", *SEGMENTS} <= missing(settings).keys()


def test_what_the_operator_has_set_stays_and_is_told() -> None:
    environ = {"UCX_TCP_SNDBUF": "4m", "UCX_TLS": "tcp,self", "HOME": "/"}
    settings = {s.name: s for s in tuning(Devices(), environ)}
    own = settings["UCX_TCP_SNDBUF"]
    assert (own.value, own.choice, own.source) == ("4m", "512k", "operator")
    assert own.reason
    other = settings["UCX_TLS"]
    assert (other.value, other.choice, other.reason, other.source) == ("tcp,self", "", "", "operator")
    assert "HOME" not in settings
    assert missing(tuple(settings.values())).keys().isdisjoint(environ)
    line = shown(tuple(settings.values()))
    assert "TCP_SNDBUF=4m (yours)" in line
    assert "TCP_KEEPCNT=3 " in line


def test_a_nodes_own_settings_count_as_the_operators_and_yield_to_the_environment() -> None:
    environ = {"UCX_NET_DEVICES": "mlx5_0:1"}
    allow(tls="tcp,self", net_devices="eth0", environ=environ)
    assert environ == {"UCX_NET_DEVICES": "mlx5_0:1", "UCX_TLS": "tcp,self"}
    untouched: dict[str, str] = {}
    allow(tls="", net_devices="", environ=untouched)
    assert untouched == {}


def test_an_empty_value_of_the_operators_is_his_too() -> None:
    assert "UCX_TCP_SNDBUF" not in missing(tuning(Devices(), {"UCX_TCP_SNDBUF": ""}))


def test_a_machine_with_gpus_gets_what_they_need(tmp_path: Path) -> None:
    with_gpu = missing(tuning(devices(plant(tmp_path, gpu())), {}))
    without = missing(tuning(Devices(), {}))
    assert with_gpu == without | {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


def test_segments_of_both_ends_are_compared_as_they_are_in_force(tmp_path: Path) -> None:
    assert tcp_segments({}) == "UCX_TCP_TX_SEG_SIZE=1m,UCX_TCP_RX_SEG_SIZE=1m"
    assert tcp_segments({SEGMENTS[1]: "64k"}) == "UCX_TCP_TX_SEG_SIZE=1m,UCX_TCP_RX_SEG_SIZE=64k"
    for machine in (Devices(), devices(plant(tmp_path, gpu()))):
        assert all(missing(tuning(machine, {}))[name] == "1m" for name in SEGMENTS)
