"""The command as a whole: version, help, and how errors leave it."""

import subprocess
import sys
from pathlib import Path

import pytest

from pdkv import __version__
from pdkv.cli.app import run


def exit_code(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(args)
    return ended.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"pdkv {__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    assert "plan" in capsys.readouterr().out


def test_an_error_of_ours_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["Llama\\nForCausalLM"],\n "num_hidden_layers": 1}', "utf-8")
    assert exit_code("plan", "--model", str(file)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("pdkv: ConfigError: architectures: ")


def test_a_wrong_option_is_bad_input_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "--modle", "tiny") == 2
    assert "--modle" in capsys.readouterr().err


def test_heavy_packages_stay_out() -> None:
    code = (
        "import sys\n"
        "from pdkv.cli.app import run\n"
        "try:\n    run(['plan', '--model', 'glm-5.3', '--json'])\n"
        "except SystemExit as e:\n    assert e.code == 0, e.code\n"
        "print(sorted({'torch', 'nixl', 'transformers', 'grpc', 'google.protobuf'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdkv.cli", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"pdkv {__version__}\n"
