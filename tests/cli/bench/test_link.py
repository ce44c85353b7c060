"""What the system says of its network, and nothing that it doesn't say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkv.cli.bench.link import Port, link_gbit_per_s, ports


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, speed, state in (
        ("eth0", "25000", "up"),
        ("eth1", "100000", "down"),
        ("eth2", "-1", "up"),
        ("veth0", "10000", "up"),
    ):
        write(tmp_path / "net" / name / "speed", speed)
        write(tmp_path / "net" / name / "operstate", state)
        if not name.startswith("veth"):
            (tmp_path / "net" / name / "device").mkdir()
    (tmp_path / "net" / "lo").mkdir()
    for port, rate, state in (("1", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("2", "400 Gb/sec (4X NDR)", "1: DOWN")):
        write(tmp_path / "infiniband" / "mlx5_0" / "ports" / port / "rate", rate)
        write(tmp_path / "infiniband" / "mlx5_0" / "ports" / port / "state", state)
    return tmp_path


def test_only_ports_of_devices_that_are_up_and_say_a_rate(root: Path) -> None:
    assert ports(root) == [Port("mlx5_0:1", 400.0), Port("eth0", 25.0)]
    assert link_gbit_per_s(root=root) == 400.0


def test_devices_that_are_named_count_together(root: Path) -> None:
    assert link_gbit_per_s(["eth0", "mlx5_0:1"], root) == 425.0
    assert link_gbit_per_s(["eth1"], root) == 0.0


def test_a_machine_that_says_nothing_is_not_guessed(tmp_path: Path) -> None:
    assert ports(tmp_path) == []
    assert link_gbit_per_s(root=tmp_path) == 0.0
