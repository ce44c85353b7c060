"""The image is made of what the package needs, and agrees with manifests and pages; `make image-test` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdkv import __version__
from pdkv.adapters.vllm.facts import SUPPORTED
from tests.deploy.cluster import K8S, ROOT, Cluster
from tests.deploy.engine import limits

DOCKER = ROOT / "deploy" / "docker"
LOCK = DOCKER / "requirements.lock"
LOCKS = sorted(DOCKER.glob("*.lock"))
FILES = sorted(DOCKER.glob("*Dockerfile"))
ELSEWHERE = {"torch"}
"""Chosen by the build: for CPUs or for CUDA."""
HADOLINT = str(Path(sys.executable).with_name("hadolint"))


def locked(text: str) -> dict[str, str]:
    """Versions of the packages that have hashes."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))


def lacking(project: str, lock: str) -> list[str]:
    """What the package wants of the image and the lock hasn't."""
    wanted = tomllib.loads(project)["project"]
    extras = wanted["optional-dependencies"]
    found = locked(lock)
    complaints = []
    of_image = [words for extra in ("reference", "events", "http", "tracing") for words in extras[extra]]
    for words in [*wanted["dependencies"], *of_image]:
        requirement = Requirement(words)
        name = canonicalize_name(requirement.name)
        if name not in ELSEWHERE and not requirement.specifier.contains(found.get(name, "0")):
            complaints.append(f"{words}: the lock has {found.get(name)}")
    return complaints


def test_the_lock_has_what_the_package_wants() -> None:
    assert lacking((ROOT / "pyproject.toml").read_text("utf-8"), LOCK.read_text("utf-8")) == []


def test_every_package_of_the_locks_has_hashes() -> None:
    assert {path.stem for path in LOCKS} == {"build", "requirements", "kubernetes"}
    for path in LOCKS:
        text = path.read_text("utf-8")
        assert len(locked(text)) == len(re.findall(r"^[^#\s]", text, re.MULTILINE)) > 0


def test_the_lock_beside_it_has_the_client_of_kubernetes_and_agrees_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    found, common = locked((DOCKER / "kubernetes.lock").read_text("utf-8")), locked(LOCK.read_text("utf-8"))
    (client,) = map(Requirement, project["kubernetes"])
    assert client.specifier.contains(found[client.name])
    assert f"{client.name}=={found[client.name]}" in project["dev"], "what tests run with"
    assert {name: common[name] for name in found.keys() & common} == {
        name: found[name] for name in found.keys() & common
    }
    needs = [Requirement(words) for words in metadata.requires(client.name) or ()]
    needs = [need for need in needs if need.marker is None or need.marker.evaluate()]
    everything = {**common, **found}
    assert [str(n) for n in needs if not n.specifier.contains(everything.get(canonicalize_name(n.name), "0"))] == []


def test_a_package_that_the_lock_lacks_is_found() -> None:
    project = '[project]\ndependencies = ["numpy>=2.4", "rich>=15.0"]\n[project.optional-dependencies]\n'
    project += "reference = []\nevents = []\nhttp = []\ntracing = []\n"
    lock = "numpy==2.3.9 \\\n    --hash=sha256:" + "0" * 64 + "\n"
    assert lacking(project, lock) == ["numpy>=2.4: the lock has 2.3.9", "rich>=15.0: the lock has None"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_of_vllm_is_named_as_the_overlay_names_it_and_of_a_version_that_is_supported() -> None:
    text = (DOCKER / "vllm.Dockerfile").read_text("utf-8")
    image = Cluster.of(K8S / "overlays" / "vllm").workload("decode").container["image"]
    (base,) = re.findall(r"^ARG BASE=vllm/vllm-openai:v(\S+)$", text, re.MULTILINE)
    assert image == f"vllm-pdkv:{base}-{__version__}"
    assert base.rpartition(".")[0] in SUPPORTED
    assert f"-t {image} ." in text
    assert f"-t {image} ." in (ROOT / "docs" / "deploy.md").read_text("utf-8")


def test_hadolint_would_say_something() -> None:
    bad = (DOCKER / "Dockerfile").read_text("utf-8").replace("USER 10001:10001", "USER root\nRUN sudo true")
    done = subprocess.run([HADOLINT, "-"], input=bad, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "DL3004" in done.stdout


def test_user_version_and_torch_are_those_of_the_rest() -> None:
    text = (DOCKER / "Dockerfile").read_text("utf-8")
    security = Cluster.of(K8S / "base").workload("decode").pod["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in text
    assert f"pdkv:x:{security['runAsUser']}:{security['runAsGroup']}:" in text
    assert f'image.version="{__version__}"' in text
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert f'ARG TORCH="{torch} ' in text
    assert f"-t pdkv:{__version__}" in (ROOT / "Makefile").read_text("utf-8")
    assert f"-t pdkv:{__version__}" in (ROOT / "docs" / "deploy.md").read_text("utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_what_the_image_copies_is_not_ignored(file: Path) -> None:
    kept = file.with_name(f"{file.name}.dockerignore").read_text("utf-8").splitlines()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text("utf-8"), re.MULTILINE)
    assert copied
    for path in " ".join(copied).split():
        assert (ROOT / path).exists()
        assert f"!{path}" in kept or f"!{Path(path).parent}/*{Path(path).suffix}" in kept, path


def test_limits_are_never_above_what_this_process_may_set() -> None:
    assert limits(memlock=1)[-1] == "memlock=1:1"
    assert all(0 < int(limit.partition("=")[2].partition(":")[0]) <= 32_768 for limit in limits())


@pytest.mark.parametrize("command", ["image", "alerts", "e2e"])
def test_the_scripts_say_what_they_lack(command: str) -> None:
    """No root, no tools, no cluster: a line that says so, and no silence."""
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.deploy.{command}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout + done.stderr) == {
        "image": (2, done.stderr if "image-test can't run here: no podman, buildah" in done.stderr else ""),
        "alerts": (2, done.stderr if "alerts-test can't run here: no promtool" in done.stderr else ""),
        "e2e": (0, done.stdout if done.stdout.startswith("SKIP deploy-test: KUBECONFIG isn't set") else ""),
    }[command]
