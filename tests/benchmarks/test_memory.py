"""The benchmark of copies beside digests: every way does what it says, and a wrong copy ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory


def test_each_way_has_its_figures(tmp_path: Path) -> None:
    report = tmp_path / "memory.json"
    assert memory.main(["--pages", "33", "--turns", "1", "--json", str(report)]) == 0
    ways = json.loads(report.read_text())["figures"]["ways"]
    assert [row["way"] for row in ways][:2] == ["copy alone", "digest alone"]
    assert len(ways) == 4 + len(memory.BEHIND)
    for row in ways:
        assert all(row[name] > 0 for name in row if name != "way"), row
    assert ways[0]["of_copy_alone"] == 1.0


def test_a_page_that_was_copied_wrong_ends_it() -> None:
    ground = memory.Ground(1)
    ground.copy(0)
    ground.digest(0)
    ground.sink[0, -1] ^= 1
    with pytest.raises(SystemExit, match="copied wrong"):
        ground.digest(0)
