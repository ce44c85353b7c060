from pathlib import Path

import pytest

from pdkv.machine.resources import IPC_LOCK, SYS_PTRACE, HugePages, memory, numa_nodes, process
from tests.machine import trees

GIB = 1 << 30


def test_this_machine() -> None:
    found = memory()
    assert 0 < found.available_bytes <= found.total_bytes
    assert process().capabilities >= 0
    assert all(cpus for cpus in numa_nodes().values())


def test_memory_without_a_cgroup(tmp_path: Path) -> None:
    found = memory(trees.plant(tmp_path, trees.memory(64, reserved=12)))
    assert (found.total_bytes, found.available_bytes, found.cgroup_bytes) == (128 * GIB, 64 * GIB, None)
    assert (found.anonymous_huge, found.shared_huge) == ("madvise", "never")
    assert found.reserved_huge == (HugePages(2 << 20, 12, 12),)


def test_promised_huge_pages_are_not_free(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.memory(64, reserved=12))
    trees.plant(tmp_path, {"sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "5"})
    assert memory(tmp_path).reserved_huge[0].free == 7


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/hugetlb.2MB.max": str(16 << 20), "sys/fs/cgroup/hugetlb.2MB.current": str(6 << 20)},
        {
            "proc/self/cgroup": "7:hugetlb:/pod",
            "sys/fs/cgroup/hugetlb/pod/hugetlb.2MB.limit_in_bytes": str(16 << 20),
            "sys/fs/cgroup/hugetlb/pod/hugetlb.2MB.usage_in_bytes": str(6 << 20),
        },
    ],
)
def test_huge_pages_that_the_cgroup_does_not_let_have_are_not_free(tmp_path: Path, files: dict[str, str]) -> None:
    plain = trees.plant(tmp_path, trees.memory(64, reserved=12) | files)
    assert memory(plain).reserved_huge == (HugePages(2 << 20, 12, 5),)


def test_a_cgroup_without_a_limit_of_huge_pages_lets_have_all(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/hugetlb.2MB.max": "max", "sys/fs/cgroup/hugetlb.2MB.current": "0"}
    assert memory(trees.plant(tmp_path, trees.memory(64, reserved=12) | files)).reserved_huge[0].free == 12


VERSION_2 = {
    "proc/self/cgroup": "0::/pod",
    "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
    "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
    "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/pod\n0::/",
    # within the container its own group is mounted at the top
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1])
def test_the_cgroup_leaves_less_than_the_machine_has(tmp_path: Path, files: dict[str, str]) -> None:
    found = memory(trees.plant(tmp_path, trees.memory(64) | files))
    assert found.cgroup_bytes == 8 * GIB
    # cached files make room
    assert found.available_bytes == 6 * GIB


@pytest.mark.parametrize(
    "files",
    [
        VERSION_2 | {"sys/fs/cgroup/pod/memory.max": "max"},
        VERSION_1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
    ],
)
def test_a_cgroup_without_a_limit_limits_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    found = memory(trees.plant(tmp_path, trees.memory(64) | files))
    assert (found.cgroup_bytes, found.available_bytes) == (None, 64 * GIB)


def test_what_may_be_pinned_is_the_limit_unless_there_is_the_right(tmp_path: Path) -> None:
    found = process(trees.plant(tmp_path / "a", trees.process(capabilities=1 << SYS_PTRACE, ptrace_scope=1)))
    assert (found.memlock_bytes, found.memlock_hard_bytes, found.may_pin_bytes) == (8 << 20, 8 << 20, 8 << 20)
    assert (found.has(SYS_PTRACE), found.has(IPC_LOCK), found.ptrace_scope) == (True, False, 1)
    found = process(trees.plant(tmp_path / "b", trees.process(capabilities=1 << IPC_LOCK)))
    assert found.may_pin_bytes is None
    assert process(trees.plant(tmp_path / "c", trees.process(memlock="unlimited"))).may_pin_bytes is None


def test_nodes_with_memory_and_their_cpus(tmp_path: Path) -> None:
    plain = trees.plant(tmp_path, trees.numa({0: "0-1,8", 1: "2-3"}))
    assert numa_nodes(plain) == {0: frozenset({0, 1, 8}), 1: frozenset({2, 3})}
    assert numa_nodes(tmp_path / "none") == {}
