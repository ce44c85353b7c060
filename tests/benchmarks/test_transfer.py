"""The benchmark hands in what the suite expects of it, and a missed target fails it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import transfer
from benchmarks.run import SUITE
from benchmarks.transfer import Sizes, _Rates, main
from pdkv.cli.bench.report import Check, Report

SMALL = Sizes(
    model="tiny",
    pages=8,
    chunk_pages=4,
    layer_pages=4,
    grpc_pages=4,
    turns=2,
    short_turns=1,
    small_reads=32,
    idle_s=0.2,
)


def test_every_check_of_the_suite_is_handed_in(tmp_path: Path) -> None:
    code = main(["--json", str(tmp_path / "transfer.json")], SMALL)
    found = json.loads((tmp_path / "transfer.json").read_text())
    expected = next(script.expected for script in SUITE if script.name == "transfer")
    assert set(found["checks"]) == set(expected)
    assert code == (0 if found["ok"] else 1)
    # raw NIXL may not count here; everything else was measured
    assert all(check["value"] or name == "pull_vs_raw_nixl" for name, check in found["checks"].items())
    ways = [row["way"] for row in found["figures"]["one_host"]]
    assert {transfer.PLAIN, transfer.PROVED, "nixl_pages", "memcpy", "grpc_stream"} <= set(ways)
    assert all(row["turns"] == SMALL.turns and row["gb_per_s"] > 0 for row in found["figures"]["one_host"])


def test_a_ratio_is_the_median_of_those_of_the_turns() -> None:
    rates = _Rates()
    for mine, theirs in ((2.0, 1.0), (9.0, 3.0), (1.0, 1.0)):
        rates.add("mine", mine, 0.1, 0.2)
        rates.add("theirs", theirs, 0.0, 0.0)
    assert rates.ratio("mine", "theirs") == 2.0
    assert math.isnan(rates.ratio("mine", "nobody's"))
    assert rates.table(against="theirs")[0]["sink_cpu_s_per_gb"] == 0.2


@pytest.mark.parametrize(("value", "code"), [(0.98, 0), (0.96, 1), (math.nan, 1)])
def test_the_exit_code_tells_a_missed_target(value: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(sizes: Sizes, report: Report, console: Any) -> None:
        report.checks.append(Check("pull_vs_raw_nixl", value, ">=", 0.97, report.command))

    monkeypatch.setattr(transfer, "measure", measured)
    assert main([]) == code
