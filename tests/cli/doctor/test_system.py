"""Memory, limits and rights of machines that aren't this one: each check well, and each way it can be unwell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.doctor import system
from pdkv.cli.doctor.finding import Level
from pdkv.machine.affinity import allowed_cpus
from pdkv.machine.devices import Devices
from pdkv.machine.resources import IPC_LOCK, SYS_PTRACE, HugePages
from tests.cli.doctor.cases import GIB, MIB, NO_RDMA, WITH_RDMA, memory, needs, nic, process
from tests.machine import trees

OK, WARN, FAIL = Level


@pytest.mark.parametrize(
    ("limits", "more", "devices", "level", "words"),
    [
        ({}, {}, WITH_RDMA, OK, "no limit"),
        ({"memlock_bytes": 8 * MIB, "capabilities": 1 << IPC_LOCK}, {}, WITH_RDMA, OK, "CAP_IPC_LOCK is effective"),
        ({"memlock_bytes": 8 * MIB}, {}, NO_RDMA, OK, "8 MiB may be pinned; nothing is: no RDMA device"),
        ({"memlock_bytes": 8 * MIB}, {"device": "cuda:0"}, WITH_RDMA, OK, "the pool is on a GPU"),
        (
            {"memlock_bytes": 8 * MIB},
            {},
            WITH_RDMA,
            FAIL,
            "8 MiB may be pinned; two agents pin a pool of 1 GiB each, 2 GiB",
        ),
        ({"memlock_bytes": 2 * GIB}, {}, WITH_RDMA, WARN, "a fence makes a third: 3 GiB"),
        ({"memlock_bytes": 3 * GIB}, {}, WITH_RDMA, OK, "3 GiB are needed at most"),
    ],
)
def test_memlock(limits: dict[str, Any], more: dict[str, Any], devices: Devices, level: Level, words: str) -> None:
    found = system.memlock(needs(**more), process(**limits), devices)
    assert (found.level, words in found.found) == (level, True), found


@pytest.mark.parametrize(
    ("rights", "transports", "tls", "level", "words"),
    [
        ({}, {"cma", "tcp"}, "", OK, "UCX has it"),
        ({}, {"tcp"}, "tcp,self", OK, "left out by UCX_TLS=tcp,self"),
        ({}, None, "", OK, "allowed (ptrace_scope 0, CAP_SYS_PTRACE isn't)"),
        ({"ptrace_scope": 2}, {"tcp"}, "", WARN, "over TCP: ptrace_scope 2, CAP_SYS_PTRACE isn't"),
        ({"ptrace_scope": 2}, None, "", WARN, "ptrace_scope 2"),
        ({"ptrace_scope": 2, "capabilities": 1 << SYS_PTRACE}, None, "", OK, "CAP_SYS_PTRACE is effective"),
        ({"ptrace_scope": 3, "capabilities": 1 << SYS_PTRACE}, None, "", WARN, "ptrace_scope 3"),
        ({}, {"tcp"}, "", WARN, "process_vm_readv is kept from it"),
    ],
)
def test_copying(rights: dict[str, Any], transports: set[str] | None, tls: str, level: Level, words: str) -> None:
    known = None if transports is None else frozenset(transports)
    found = system.copying(process(**rights), known, tls)
    assert (found.level, words in found.found) == (level, True), found


@pytest.mark.parametrize(
    ("more", "of_machine", "level", "words"),
    [
        ({}, {}, OK, "transparent ones (enabled: madvise)"),
        ({}, {"anonymous_huge": "never"}, WARN, "none (enabled: never)"),
        ({}, {"anonymous_huge": ""}, WARN, "none (enabled: not there)"),
        ({"memory": "shared"}, {}, WARN, "none (shmem_enabled: never)"),
        ({"memory": "shared"}, {"shared_huge": "advise"}, OK, "shmem_enabled: advise"),
        ({"memory": "torch"}, {"anonymous_huge": "never"}, OK, "not asked for"),
        ({"memory": "hugetlb"}, {}, FAIL, "0 of 0 reserved ones of 2 MiB are free, 513 are needed"),
        ({"memory": "hugetlb"}, {"reserved_huge": (HugePages(2 * MIB, 600, 600),)}, OK, "600 of 600"),
        ({"memory": "hugetlb"}, {"reserved_huge": (HugePages(1024 * MIB, 600, 600),)}, FAIL, "0 of 0"),
    ],
)
def test_huge_pages(more: dict[str, Any], of_machine: dict[str, Any], level: Level, words: str) -> None:
    found = system.huge_pages(needs(**more), memory(**of_machine))
    assert (found.level, words in found.found) == (level, True), found


def test_how_many_huge_pages_to_reserve() -> None:
    found = system.huge_pages(needs(memory="hugetlb"), memory(reserved_huge=(HugePages(2 * MIB, 600, 100),)))
    # what others use stays theirs
    assert found.todo.startswith(f"sysctl vm.nr_hugepages={600 - 100 + 513},")


@pytest.mark.parametrize(
    ("more", "of_machine", "level", "words"),
    [
        ({}, {}, OK, "1,024 pages of 1,048,576 B, 1 GiB; there are 64 GiB"),
        ({}, {"available_bytes": GIB}, FAIL, "64 KiB short"),
        ({}, {"available_bytes": GIB + MIB}, WARN, "next to nothing is left"),
        ({}, {"available_bytes": GIB // 2, "cgroup_bytes": GIB}, FAIL, "the cgroup leaves 512 MiB"),
        ({"offload_bytes": 64 * GIB}, {}, FAIL, "and 64 GiB for offloaded pages"),
        ({"device": "cuda:0", "memory": "torch"}, {"available_bytes": GIB // 2}, OK, ""),
    ],
)
def test_pool_against_memory(more: dict[str, Any], of_machine: dict[str, Any], level: Level, words: str) -> None:
    found = system.pool(needs(**more), memory(**of_machine))
    assert (found.level, words in found.found) == (level, True), found


def test_how_many_pages_would_fit() -> None:
    found = system.pool(needs(offload_bytes=GIB), memory(available_bytes=GIB + 100 * MIB))
    assert found.todo.startswith("at most 100 pages")
    assert system.pool(needs(offload_bytes=2 * GIB), memory(available_bytes=GIB)).todo.startswith("at most 0 pages")


def test_a_file_needs_its_file_system(tmp_path: Path) -> None:
    inside = str(tmp_path / "pool")
    assert system.pool(needs(memory="file", memory_path=inside), memory()).level is OK
    found = system.pool(needs(memory="file", memory_path=inside, pages=1 << 40), memory())
    assert (found.level, "its file system has" in found.found) == (FAIL, True)
    found = system.pool(needs(memory="file", memory_path="/nowhere/at/all"), memory())
    assert (found.level, "/nowhere/at/all can't be had: No such file" in found.found) == (FAIL, True)


def test_where_things_are_bound(tmp_path: Path) -> None:
    here = min(allowed_cpus())
    two = trees.plant(tmp_path / "two", trees.numa({0: str(here), 1: "4096"}))
    one = trees.plant(tmp_path / "one", trees.numa({0: "0-1"}))
    assert "nothing is bound: the machine has one node" in system.numa(needs(), WITH_RDMA, one).found
    found = system.numa(needs(), WITH_RDMA, two)
    assert (found.level, found.found) == (OK, "node 0: of mlx5_0 on node 0; the transfer thread on its 1 CPUs")
    found = system.numa(needs(numa_node="1"), WITH_RDMA, two)
    assert (found.level, "may use none of its CPUs" in found.found) == (WARN, True)
    apart = Devices(rdma=(nic("a"), nic("b", number=2)), net=())
    assert system.numa(needs(numa_node="none"), apart, two).level is OK
    unsure = system.numa(needs(), Devices(), two)
    assert (unsure.level, "no NIC says its node" in unsure.found) == (WARN, True)
    wrong = system.numa(needs(numa_node="7"), WITH_RDMA, two)
    assert (wrong.level, "numa_node: '7'" in wrong.found) == (FAIL, True)


def test_socket_buffers() -> None:
    assert system.socket_buffers(process(), 512 << 10).level is OK
    assert system.socket_buffers(process(socket_buffer_bytes=None), 512 << 10).level is OK
    found = system.socket_buffers(process(socket_buffer_bytes=212_992), 512 << 10)
    assert (found.level, found.todo) == (WARN, "sysctl net.core.wmem_max=524288")
