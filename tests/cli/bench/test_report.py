"""Checks, and how they are told."""

import json
import math
from pathlib import Path

import pytest

from pdkv.cli.bench.report import Check, Report, as_map, stamp


@pytest.mark.parametrize(
    ("value", "op", "target", "ok"),
    [(0.98, ">=", 0.97, True), (0.96, ">=", 0.97, False), (5.0, "<=", 5.0, True), (5.1, "<=", 5.0, False)],
)
def test_a_target_is_met_or_missed_by_the_value_alone(value, op, target, ok):
    assert Check("name", value, op, target, "command").ok is ok


@pytest.mark.parametrize("op", ["<=", ">="])
def test_what_could_not_be_measured_is_not_ok_and_is_null(op):
    check = Check("name", math.nan, op, 1.0, "command", "no iperf3")

    assert not check.ok
    assert as_map([check])["name"]["value"] is None


def test_a_report_is_ok_if_each_of_its_checks_is(tmp_path: Path):
    good, bad = Check("good", 2.0, ">=", 1.0, "c"), Check("bad", 2.0, "<=", 1.0, "c")
    report = Report("speed", "python speed.py", [good], {"spread": [0.1, math.inf]})

    report.write(tmp_path / "results" / "speed.json")
    read = json.loads((tmp_path / "results" / "speed.json").read_text())

    assert read["ok"] is True
    assert read["figures"]["spread"] == [0.1, None]
    report.checks.append(bad)
    assert not report.ok


def test_the_stamp_names_machine_and_versions():
    assert {"cpu", "cores", "load_1m", "kernel", "nixl", "torch", "ucx_settings"} <= set(stamp())
