"""A machine on which packages are missing: what can work works, and the rest says what to install."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Python imports this by itself at its start. PathFinder finds everything that is installed.
BLOCKER = """
from importlib.machinery import PathFinder

missing = {missing!r}
find = PathFinder.find_spec

def find_spec(name, *rest):
    return None if name.partition(".")[0] in missing else find(name, *rest)

PathFinder.find_spec = find_spec
"""
FOUND = ("--prefill-addresses", "k8s:prefill", "--decode-addresses", "127.0.0.1:1", "--insecure")
ROUTER = (
    "--prefill-addresses",
    "127.0.0.1:1",
    "--decode-addresses",
    "127.0.0.1:2",
    "--bind",
    "127.0.0.1:0",
    "--insecure",
)
NODE = ("--node-id", "n0", "--insecure", "--pool-pages", "4")


def without(folder: Path, missing: tuple[str, ...]) -> dict[str, str]:
    """The environment of a Python that lacks those packages."""
    (folder / "sitecustomize.py").write_text(BLOCKER.format(missing=set(missing)), "utf-8")
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(folder: Path, missing: tuple[str, ...], *command: str) -> subprocess.CompletedProcess[str]:
    """Python with `command`, without those packages."""
    environ = without(folder, missing)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=environ)


def test_they_are_really_missing(tmp_path: Path) -> None:
    assert run(tmp_path, (), "-c", "import numpy").returncode == 0
    done = run(tmp_path, ("numpy",), "-c", "import numpy")
    assert "ModuleNotFoundError: No module named 'numpy'" in done.stderr


def test_the_package_and_plan_need_none_of_the_heavy_ones(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "nixl", "safetensors", "huggingface_hub", "grpc", "google")
    assert run(tmp_path, heavy, "-c", "import pdkv; print(pdkv.__version__)").returncode == 0
    done = run(tmp_path, heavy, "-m", "pdkv.cli", "plan", "--model", "glm-5.3")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_router_serves_without_tensors(tmp_path: Path) -> None:
    """They would be most of its start and of its memory."""
    line = [sys.executable, "-m", "pdkv.cli", "router", "--json", *ROUTER]
    environ = without(tmp_path, ("torch", "transformers", "nixl", "safetensors"))
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as router:
        assert router.stdout is not None
        said = router.stdout.readline()
        router.terminate()
        _, errors = router.communicate(timeout=60)
    assert json.loads(said)["address"].startswith("127.0.0.1:"), errors
    assert router.returncode == 0, errors


@pytest.mark.parametrize(
    ("package", "command", "install"),
    [
        ("transformers", ("demo",), "pip install '.[reference]'"),
        ("torch", ("demo",), "pip install"),
        ("nixl", ("demo",), "pip install"),
        ("transformers", ("prefill", *NODE), "pip install '.[reference]'"),
        ("kubernetes", ("router", *FOUND), "pip install '.[kubernetes]'"),
    ],
)
def test_what_to_install_is_said_in_one_line(
    package: str, command: tuple[str, ...], install: str, tmp_path: Path
) -> None:
    done = run(tmp_path, (package,), "-m", "pdkv.cli", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("pdkv: MissingDependency: ")
    assert package in done.stderr
    assert install in done.stderr
