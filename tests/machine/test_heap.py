"""A block that is freed and asked for again costs no page faults, once the process keeps its memory."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from pdkv.machine import heap

FAULTS = """
import resource, sys
from pdkv.machine.heap import keep_freed
if sys.argv[1] == "kept":
    assert keep_freed()
for _ in range(3):
    first, second = bytes(4 << 20), bytes(4 << 20)
    del first, second
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    first, second = b"x" * (4 << 20), b"y" * (4 << 20)
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_freed_memory_is_kept():
    # 20 blocks of 1,024 pages
    assert faults("kept") < 100
    assert faults("as it comes") > 5_000


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert heap.keep_freed() is False
