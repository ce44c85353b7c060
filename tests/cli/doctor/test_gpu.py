"""Cards that aren't there; a real one is looked at in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdkv.cli.doctor import gpu
from pdkv.cli.doctor.finding import Level
from pdkv.cli.doctor.gpu import Card
from pdkv.kvcache.gpudirect import Flush
from tests.cli.doctor.cases import GIB, NO_RDMA, WITH_GPU, needs
from tests.machine.trees import plant

OK, WARN, FAIL = Level
CARD = Card("H200", "0000:03:00.0", 100 * GIB, Flush.ORDERED)
ON_GPU = {"device": "cuda:0", "memory": "torch"}


def test_a_card_that_is_not_there_is_said_so() -> None:
    """With CUDA, one that no machine has."""
    found = gpu.look("cuda:77")
    assert isinstance(found, str)
    finding = gpu.gpu(needs(**ON_GPU), found)
    assert (finding.level, "can't be used" in finding.found) == (FAIL, True)
    if not torch.cuda.is_available():
        assert "finds no CUDA device" in found


def test_the_pool_against_the_cards_memory() -> None:
    assert gpu.gpu(needs(**ON_GPU), CARD).level is OK
    found = gpu.gpu(needs(**ON_GPU), Card("H200", "0000:03:00.0", GIB // 2, Flush.ORDERED))
    assert (found.level, found.todo) == (FAIL, "at most 512 pages (pool_pages)")


@pytest.mark.parametrize(
    ("named", "level", "words"),
    [
        ("", OK, "nearest to 0000:03:00.0: near; UCX chooses by distance"),
        ("near:1", OK, "nearest to 0000:03:00.0: near"),
        ("far:1", WARN, "net_devices names far"),
        ("^far", OK, "near"),
    ],
)
def test_the_nearest_nic(named: str, level: Level, words: str) -> None:
    found = gpu.nearest_nic(needs(**ON_GPU, net_devices=named), CARD, WITH_GPU)
    assert (found.level, words in found.found) == (level, True), found


def test_nothing_to_compare() -> None:
    assert gpu.nearest_nic(needs(**ON_GPU), CARD, NO_RDMA).level is OK
    other = Card("H200", "0000:99:00.0", GIB, Flush.ORDERED)
    assert "isn't shown in /sys" in gpu.nearest_nic(needs(**ON_GPU), other, WITH_GPU).found


OPEN = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65"}
CLOSED = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65"}


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        ({"sys/module/nvidia_peermem/refcnt": "0", **CLOSED}, OK, "nvidia_peermem is loaded"),
        ({"proc/sys/kernel/osrelease": "6.8.0-40-generic", **OPEN}, OK, "by dmabuf (open kernel module, Linux 6.8)"),
        ({"proc/sys/kernel/osrelease": "6.8.0-40-generic", **CLOSED}, WARN, "staged in host memory"),
        ({"proc/sys/kernel/osrelease": "5.4.0", **OPEN}, WARN, "staged in host memory"),
        ({}, WARN, "staged in host memory"),
    ],
)
def test_how_a_nic_reaches_the_memory(tmp_path: Path, files: dict[str, str], level: Level, words: str) -> None:
    path, flush = gpu.gpudirect(CARD, WITH_GPU, plant(tmp_path, files))
    assert (path.level, words in path.found) == (level, True), path
    assert (flush.level, flush.found) == (OK, "ordered by the platform before each digest")


def test_without_an_rdma_device_nobody_reaches_it() -> None:
    assert [f.check for f in gpu.gpudirect(CARD, NO_RDMA)] == ["gpudirect flush"]


@pytest.mark.parametrize(("flush", "level"), [(Flush.CALLED, OK), (Flush.MISSING, WARN)])
def test_what_stands_before_a_digest(flush: Flush, level: Any) -> None:
    [found] = gpu.gpudirect(Card("H200", "0000:03:00.0", GIB, flush), NO_RDMA)
    assert found.level is level
