"""A class of settings as a command: flags, variables and file mean the same, and every field is there."""

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from pdkv.cli.app import run
from pdkv.cli.options import ServeOptions, config_command
from pdkv.config import DecodeConfig, PrefillConfig, RouterConfig, ServiceConfig
from pdkv.errors import ConfigError, LaneRefused
from pdkv.machine.devices import Devices, RdmaDevice, RdmaPort

ROLES = {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}


@pytest.fixture(autouse=True)
def no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDKV_")]:
        monkeypatch.delenv(name)


class Command:
    """`pdkv decode` without a node behind it."""

    def __init__(self) -> None:
        self.seen: list[tuple[DecodeConfig, ServeOptions]] = []
        self.app = typer.Typer()
        self.app.command()(config_command(DecodeConfig, lambda *given: self.seen.append(given), doc="Nothing."))

    def __call__(self, *args: str) -> tuple[DecodeConfig, ServeOptions]:
        self.app(("--insecure", *args), standalone_mode=False)
        return self.seen.pop()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        run(args)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_flag_over_variable_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command()
    file = tmp_path / "decode.yaml"
    file.write_text("node_id: of-file\nseed: 1\ndigest: none\n", "utf-8")
    assert command()[0].seed == 0
    assert command("--config", str(file))[0].seed == 1
    monkeypatch.setenv("PDKV_SEED", "2")
    monkeypatch.setenv("PDKV_NODE_ID", "of-environment")
    config, _ = command("--config", str(file), "--seed", "3")
    assert (config.seed, config.node_id, config.digest) == (3, "of-environment", "none")


def test_a_value_means_the_same_in_all_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "insecure": True,
        "pool_bytes": "64MiB",
        "indexer_types": "full,shared",
        "prefill_addresses": "a:1,b:2",
        "read_deadline_s": "1.5",
    }
    command = Command()
    switches = [flag(name) for name, value in values.items() if value is True]
    by_flag, _ = command(*switches, *(f"{flag(n)}={v}" for n, v in values.items() if v is not True))
    file = tmp_path / "decode.yaml"
    file.write_text(json.dumps(values), "utf-8")
    assert command("--config", str(file))[0] == by_flag
    for name, value in values.items():
        monkeypatch.setenv(f"PDKV_{name.upper()}", str(value))
    assert command()[0] == by_flag
    assert (by_flag.pool_bytes, by_flag.indexer_types) == (64 << 20, ("full", "shared"))
    assert by_flag.prefill_addresses == ("a:1", "b:2")


def test_a_switch_can_be_turned_off_again(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("index_sharing: true\n", "utf-8")
    command = Command()
    assert command("--config", str(file))[0].index_sharing
    assert not command("--config", str(file), "--no-index-sharing")[0].index_sharing


def test_what_can_be_known_is_said_before_anything_is_built() -> None:
    command = Command()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"bind: '{address}' .* free here"):
            command("--bind", address)
    with pytest.raises(ConfigError, match="insecure"):
        command("--no-insecure")
    with pytest.raises(ConfigError, match="tls_certificate"):
        command("--no-insecure", "--tls-ca", "ca.pem")
    assert command.seen == []


def test_a_node_that_must_have_rdma_and_cannot_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer as the doctor's, before anything is built."""
    command = Command()
    monkeypatch.setattr("pdkv.machine.devices.devices", Devices)
    with pytest.raises(LaneRefused, match=r"RDMA is required, but there is no RDMA device .*: a machine with one"):
        command("--require-rdma")
    assert command.seen == []
    assert command("--require-rdma", "--backend", "loopback")[0].require_rdma
    port = RdmaPort(1, "ACTIVE", "InfiniBand", 400.0)
    nic = RdmaDevice("mlx5_0", (port,), numa_node=0, openable=True, pci="")
    monkeypatch.setattr("pdkv.machine.devices.devices", lambda: Devices(rdma=(nic,)))
    assert command("--require-rdma")[0].require_rdma
    with pytest.raises(LaneRefused, match="UCX_TLS=tcp leaves it out"):
        command("--require-rdma", "--ucx-tls", "tcp")


def test_how_it_is_run_stands_beside_the_config() -> None:
    command = Command()
    assert command()[1] == ServeOptions(json=False, exit_with=None)
    assert command("--json", "--exit-with", "7")[1] == ServeOptions(json=True, exit_with=7)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("prefill", "--chunk-tokens", "100"), "chunk_tokens"),
        (("prefill", "--chunk-tokens", "many"), "chunk_tokens"),
        (("prefill", "--memory", "paper"), "memory"),
        (("decode", "--pool-bytes", "lots"), "pool_bytes"),
        (("decode", "--bind", "nowhere"), "bind"),
        (("decode", "--bind", "0.0.0.0:7000"), "bind"),
        (("decode", "--indexer-types", "full,half"), "indexer_types.1"),
        (("decode", "--prefill-addresses", "a"), "prefill_addresses.0"),
        (("router", "--prefill-addresses", "a:1"), "decode_addresses"),
        (("router", "--config", "nowhere.yaml"), "config"),
    ],
)
def test_what_cannot_be_used_is_named(args: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *args).startswith(f"pdkv: ConfigError: {field}: ")


def test_an_unknown_name_is_refused_wherever_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("pool_pagse: 3\n", "utf-8")
    assert "pool_pagse" in refused(capsys, "decode", "--config", str(file))
    monkeypatch.setenv("PDKV_POOL_PAGSE", "3")
    assert "PDKV_POOL_PAGSE" in refused(capsys, "decode")
    with pytest.raises(SystemExit) as ended:
        run(["decode", "--pool-pagse", "3"])
    assert ended.value.code == 2
    assert "--pool-pagse" in capsys.readouterr().err


@pytest.mark.parametrize(("role", "cls"), ROLES.items())
def test_every_field_has_a_flag_and_words(role: str, cls: type[ServiceConfig]) -> None:
    command = config_command(cls, lambda config, options: None, doc="Nothing.")
    parameters = inspect.signature(command).parameters
    assert set(parameters) == {*cls.model_fields, "config", "json", "exit_with"}
    for name, parameter in parameters.items():
        words = parameter.annotation.__metadata__[0].help
        assert len(words) > 20, f"{role} {name}: {words!r}"
        if name in cls.model_fields:
            assert cls.model_fields[name].description in words


def test_help_shows_every_flag_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from pdkv.cli.app import run\n"
        "for role in ('prefill', 'decode', 'router', 'generate', 'demo'):\n"
        "    try:\n        run([role, '--help'])\n"
        "    except SystemExit as e:\n        assert e.code == 0, e.code\n"
        "print(sorted({'torch', 'nixl', 'transformers', 'grpc', 'google.protobuf'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"COLUMNS": "200", "PATH": ""},
    )
    *shown, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    words = "\n".join(shown).split()
    for cls in ROLES.values():
        for name in cls.model_fields:
            assert flag(name) in {word.rstrip(",") for word in words}
    assert "`" not in "".join(shown)
    assert words.count("PDKV_NODE_ID)") == len(ROLES)  # the rule is said once a command
