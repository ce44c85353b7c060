"""Where buffers come from, how they are aligned, and that no tensor outlives its memory."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdkv.errors import BoundsError, ConfigError
from pdkv.kvcache import memory as memory_module
from pdkv.kvcache.memory import HUGE_PAGE_BYTES, MemoryKind, PoolMemory, allocate
from pdkv.machine import resources
from pdkv.machine.affinity import preferred_node

SIZES = (5000, 0, HUGE_PAGE_BYTES + 1)


def make(kind: MemoryKind, tmp_path: Path) -> PoolMemory:
    return allocate(SIZES, kind=kind, path=tmp_path / "pool" if kind == "file" else None)


def mapped(address: int) -> bool:
    spans = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


@pytest.mark.parametrize("kind", ["anonymous", "shared", "file", "torch"])
def test_buffers_are_what_was_asked_for(kind: MemoryKind, tmp_path: Path) -> None:
    memory = make(kind, tmp_path)
    assert [b.numel() for b in memory.buffers] == list(SIZES)
    assert memory.buffer_bytes == SIZES
    assert all(b.dtype is torch.uint8 and b.dim() == 1 and b.is_contiguous() for b in memory.buffers)
    assert [b.data_ptr() for b in memory.buffers if b.numel()] == [memory.addresses[0], memory.addresses[2]]
    assert (memory.kind, memory.memory, memory.device_index) == (kind, "DRAM", 0)
    memory.buffers[0][-1] = 7
    assert memory.buffers[2][0] != 7 or kind == "torch"


@pytest.mark.parametrize("kind", ["anonymous", "shared", "file"])
def test_mapped_buffers_are_zero_and_start_on_huge_page_edges(kind: MemoryKind, tmp_path: Path) -> None:
    memory = make(kind, tmp_path)
    first = memory.addresses[0]
    assert all((address - first) % HUGE_PAGE_BYTES == 0 for address in memory.addresses)
    assert kind != "anonymous" or first % HUGE_PAGE_BYTES == 0
    assert not any(bool(b.any()) for b in memory.buffers)


def test_a_mapping_that_starts_off_a_huge_page_edge_is_skewed_onto_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = memory_module._map("anonymous", 4 * HUGE_PAGE_BYTES, None)[0]
    start = 4096 if mapping.ctypes.data % HUGE_PAGE_BYTES == 0 else 0
    monkeypatch.setattr(memory_module, "_map", lambda kind, length, path: (mapping[start : start + length], ""))
    memory = allocate([10, 20])
    assert [address % HUGE_PAGE_BYTES for address in memory.addresses] == [0, 0]
    assert memory.buffers[1].data_ptr() == memory.addresses[1]


TOUCHES_NOTHING = """
import os
from pathlib import Path
from pdkv.kvcache.memory import allocate

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
memory = allocate([256 << 20])
print(resident() - before, memory.huge_page_bytes())
"""


def test_allocation_touches_nothing() -> None:
    """In a process of its own: the kernel joins neighbouring mappings, and other tests leave touched ones behind."""
    said = subprocess.run([sys.executable, "-c", TOUCHES_NOTHING], capture_output=True, text=True, check=True).stdout
    grown, huge = map(int, said.split())
    assert grown < 32 << 20
    assert huge == 0


COMMITS = """
from pathlib import Path
from pdkv.kvcache import memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

by_the_kernel, kept = memory._populated, []
for populated in (by_the_kernel, lambda address, length: False):
    memory._populated = populated
    for kind in ("anonymous", "shared", "torch"):
        made = memory.allocate([48 << 20, 0, 5000], kind=kind)
        kept.append(made)
        if kind != "torch":
            made.buffers[0][12345] = 7
        before = resident()
        made.commit()
        assert kind == "torch" or made.buffers[0].count_nonzero() == 1 and made.buffers[0][12345] == 7
        print(kind, (resident() - before) >> 20)
        made.commit()
"""


def test_memory_that_is_committed_is_there_and_as_it_was() -> None:
    """By the kernel, and where it can't, by hand."""
    done = subprocess.run([sys.executable, "-c", COMMITS], capture_output=True, text=True, timeout=60, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, _ in found] == ["anonymous", "shared", "torch"] * 2
    assert all(int(mib) >= 40 for _, mib in found), found


def test_a_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_populated", lambda *_: pytest.fail("nothing is to be committed"))
    make("file", tmp_path).commit()


def test_memory_that_is_not_there_is_said_so() -> None:
    gone = allocate([HUGE_PAGE_BYTES])
    address = gone.addresses[0]
    gone.close()
    gc.collect()
    with pytest.raises(ConfigError, match=f"pool bytes: {HUGE_PAGE_BYTES} .*what the system has now"):
        memory_module._populated(address, HUGE_PAGE_BYTES)


def test_huge_pages_are_reported_as_the_system_has_them() -> None:
    memory = allocate([4 * HUGE_PAGE_BYTES])
    memory.buffers[0].fill_(1)
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = setting.read_text().split("[")[1].split("]")[0] if setting.exists() else ""
    if mode:
        assert mode in memory.huge_pages
    else:
        assert memory.huge_pages.startswith(("refused", "asked for"))
    if not memory.huge_pages.startswith("granted"):
        assert memory.huge_page_bytes() == 0
    assert 0 <= memory.huge_page_bytes() <= 4 * HUGE_PAGE_BYTES


def test_torch_memory_claims_no_huge_pages() -> None:
    assert "torch" in allocate([10], kind="torch").huge_pages


@pytest.mark.parametrize("kind", ["anonymous", "shared", "file"])
def test_memory_goes_with_the_last_tensor_and_not_before(kind: MemoryKind, tmp_path: Path) -> None:
    memory = make(kind, tmp_path)
    address = memory.addresses[0]
    kept = memory.buffers[0].as_strided((10, 2), (100, 1))
    kept[3, 1] = 9
    memory.close()
    memory.close()
    assert memory.closed
    with pytest.raises(BoundsError, match="closed"):
        _ = memory.buffers
    gc.collect()
    assert mapped(address)
    assert kept[3, 1] == 9
    del kept
    gc.collect()
    assert not mapped(address)


def test_a_file_stays_and_is_found_again(tmp_path: Path) -> None:
    first = make("file", tmp_path)
    first.buffers[0][10] = 77
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o600
    first.close()
    again = allocate(SIZES, kind="file", path=tmp_path / "pool")
    assert (tmp_path / "pool").exists()
    assert again.buffers[0][10] == 77
    assert int(again.buffers[0].sum()) == 77


def test_bad_requests_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory: 'swap'"):
        allocate([1], kind="swap")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="memory path"):
        allocate([1], kind="file")
    with pytest.raises(ConfigError, match="memory path"):
        allocate([1], path=tmp_path / "pool")
    with pytest.raises(ConfigError, match="buffer bytes"):
        allocate([-1])
    with pytest.raises(ConfigError, match="torch, for device cuda"):
        allocate([1], device="cuda:0")
    with pytest.raises(ConfigError, match="what the system grants"):
        allocate([1], kind="file", path=tmp_path / "no such folder" / "pool")
    with pytest.raises(ConfigError, match="what the system grants"):
        allocate([1 << 60])


def free_reserved() -> int:
    """Huge pages of 2 MiB that a mapping can still have."""
    reserved = next((h for h in resources.memory().reserved_huge if h.page_bytes == HUGE_PAGE_BYTES), None)
    return reserved.free if reserved else 0


def test_reserved_huge_pages_are_taken_or_missed_at_once() -> None:
    """Also where none are reserved: then nothing may be handed out."""
    free = free_reserved()
    with pytest.raises(ConfigError, match="what the system grants"):
        allocate([(free + 1) * HUGE_PAGE_BYTES], kind="hugetlb")
    if free:
        memory = allocate([5000], kind="hugetlb")
        memory.commit()
        assert memory.addresses[0] % HUGE_PAGE_BYTES == 0
        assert memory.huge_page_bytes() == 5000
        assert free_reserved() == free - 1
        memory.close()


@pytest.mark.parametrize("kind", ["anonymous", "shared", "torch"])
def test_memory_comes_from_the_node_that_it_was_bound_to(kind: MemoryKind) -> None:
    node = max(resources.numa_nodes())
    memory = allocate([3 * HUGE_PAGE_BYTES, 0, 5000], kind=kind)
    memory.bind(node)
    memory.commit(threads=2)
    assert [preferred_node(a) for a in (memory.addresses[0], memory.addresses[2])] == [node, node]
    assert memory.node_bytes().keys() <= resources.numa_nodes().keys()
    if kind == "anonymous":
        assert memory.node_bytes()[node] >= 3 * HUGE_PAGE_BYTES
    with pytest.raises(ConfigError, match="numa_node: 900"):
        memory.bind(900)


def test_a_file_is_bound_to_nothing(tmp_path: Path) -> None:
    memory = make("file", tmp_path)
    memory.bind(900)
    assert preferred_node(memory.addresses[0]) is None


def test_what_became_of_the_memory_is_told_in_words(tmp_path: Path) -> None:
    memory, node = allocate(SIZES), max(resources.numa_nodes())
    assert memory.facts() == {
        "kind": f"{sum(SIZES):,} B, anonymous",
        "huge pages": memory.huge_pages,
        "numa": "not bound",
        "committed": "when it is touched",
    }
    memory.bind(node)
    memory.commit()
    assert memory.facts()["numa"] == f"node {node}"
    assert memory.facts()["committed"].startswith("in 0")
    with pytest.raises(ConfigError):
        memory.bind(900)
    assert memory.facts()["numa"] == f"node {node}"
    file = make("file", tmp_path)
    file.commit()
    assert file.facts()["committed"] == "when it is touched"
