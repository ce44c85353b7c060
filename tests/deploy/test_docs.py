"""docs/deploy.md and docs/operations.md: every command is run by somebody or says why not; each `pdkv` there is one."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from typer.main import get_command

from pdkv.cli.app import app
from tests.deploy.cluster import K8S, ROOT, Cluster
from tests.deploy.pages import PAGES, Block, blocks, run_by

USAGE_ERROR = typer.BadParameter.__bases__[0]
ALL = [block for page in PAGES for block in blocks(page)]


def unaccounted(block: Block) -> str:
    """Why nobody knows whether the block works; empty if somebody does."""
    how, _, what = block.note.partition(": ")
    if how == "run by":
        target = what.removeprefix("make ")
        return "" if f"\n{target}:" in (ROOT / "Makefile").read_text("utf-8") else f"no target {target}"
    if how == "tested by":
        return "" if (ROOT / what).exists() else f"no file {what}"
    return "" if how == "not run" and what else "not said who runs it"


def refused(command: str) -> str:
    """What the command line says against `pdkv …`; empty: nothing."""
    name, *rest = shlex.split(command)[1:]
    known = get_command(app).commands  # type: ignore[attr-defined]
    if name not in known:
        return "" if name == "--version" else f"no command {name}"
    try:
        known[name].make_context(name, rest)
    except USAGE_ERROR as error:
        return str(error)
    return ""


def commands(text: str) -> list[str]:
    """Each `pdkv …` that a block runs: by itself, or in a container."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return re.findall(r"^(?:docker exec \S+ |kubectl .* -- |)(pdkv .*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("block", ALL, ids=lambda block: f"{block.page}-{block.text.splitlines()[0][:40]}")
def test_every_block_says_who_runs_it(block: Block) -> None:
    assert unaccounted(block) == ""


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "bash"], ids=lambda block: block.note)
def test_every_pdkv_is_a_command(block: Block) -> None:
    assert [(c, why) for c in commands(block.text) if (why := refused(c))] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page: str) -> None:
    """As one in another language, or in none, would be."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert text.count("```") == 2 * len(list(blocks(page))) > 0


def test_somebody_runs_something() -> None:
    assert len(run_by("make image-test")) >= 2
    assert len(run_by("make deploy-test")) >= 4
    assert sum(len(commands(block.text)) for block in ALL) >= 8


@pytest.mark.parametrize(
    ("note", "words"),
    [("", "not said"), ("not run: ", "not said"), ("run by: make nothing", "no target"), ("tested by: no", "no file")],
)
def test_a_block_that_nobody_runs_is_found(note: str, words: str) -> None:
    assert words in unaccounted(Block("deploy.md", "bash", "true\n", note))


@pytest.mark.parametrize("command", ["pdkv statuss a:1", "pdkv drain a:1 --waits 3", "pdkv generate", "pdkv status"])
def test_a_command_that_is_none_is_found(command: str) -> None:
    assert commands(f"kubectl -n pdkv exec decode-0 -- {command}\n") == [command]
    assert refused(command)


def test_the_kustomization_of_ones_own_builds(tmp_path: Path) -> None:
    """With a checkout named pdkv beside it."""
    (block,) = [block for block in ALL if block.language == "yaml"]
    mine = tmp_path / "mine"
    mine.mkdir()
    to = os.path.relpath(ROOT, mine.resolve())
    assert "../pdkv/" in block.text
    (mine / "kustomization.yaml").write_text(block.text.replace("../pdkv/", f"{to}/"), "utf-8")
    (mine / "decode.yaml").write_text("model: tiny\n", "utf-8")
    cluster = Cluster.of(mine)
    assert {w.container["image"].partition(":")[0] for w in cluster.workloads} == {"registry.example/pdkv"}
    assert cluster.workload("decode").file_at("/etc/pdkv/config.yaml") == "model: tiny\n"
    assert "PrometheusRule" in {o["kind"] for o in cluster.objects}


def test_numbers_on_the_pages_are_those_of_the_manifests() -> None:
    words = " ".join((ROOT / "docs" / page).read_text("utf-8") for page in PAGES)
    cluster = Cluster.of(K8S / "overlays" / "cpu-demo")
    for workload, _, config in cluster.configs():
        more = workload.pod["terminationGracePeriodSeconds"] - config.drain_grace_s
        assert f"`drain_grace_s` ({config.drain_grace_s:g} s)" in words
        assert f"{more:g} s" in words, workload.name
    pages = Cluster.of(K8S / "overlays" / "rdma").workload("decode").container["resources"]["limits"]["hugepages-2Mi"]
    kept = re.search(r"vm\.nr_hugepages=(\d+)` for (\d+) GiB", words)
    assert kept
    assert int(kept[1]) * 2 == int(kept[2]) * 1024 >= int(pages.removesuffix("Gi")) * 1024


def test_it_knows_yaml_from_text() -> None:
    assert all(isinstance(yaml.safe_load(block.text), dict) for block in ALL if block.language == "yaml")
