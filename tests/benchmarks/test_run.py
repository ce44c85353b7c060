"""The suite's runner: what a script doesn't hand in is a check that is not ok."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.run import EXPECTED, SUITE, Script, run
from pdkv.cli.bench.report import Check, Report

HANDS_IN = """
import json, sys
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({"checks": json.loads(sys.argv[1])}))
raise SystemExit(CODE)
"""


def script(folder: Path, body: str, *, checks: tuple[str, ...] = ("fast",), limit_s: float = 30.0) -> Script:
    (folder / "some.py").write_text(body)
    given = {name: {"value": 2.0, "target": ">= 1", "ok": True, "command": "c", "note": ""} for name in checks}
    return Script("some", ("fast", "small"), limit_s, (json.dumps(given),), folder)


@pytest.mark.parametrize(
    ("body", "checks", "bad", "why"),
    [
        (HANDS_IN.replace("CODE", "0"), ("fast", "small"), [], ""),
        (HANDS_IN.replace("CODE", "1"), ("fast", "small"), [], ""),
        (HANDS_IN.replace("CODE", "0"), ("fast",), ["small"], "not in its report"),
        (HANDS_IN.replace("CODE", "2"), ("fast",), ["small"], "exit code 2"),
        ("raise SystemExit(3)", (), ["fast", "small"], "exit code 3"),
    ],
)
def test_what_is_not_handed_in_is_not_ok(
    tmp_path: Path, body: str, checks: tuple[str, ...], bad: list[str], why: str
) -> None:
    report = run(script(tmp_path, body, checks=checks), tmp_path)

    assert sorted(report["checks"]) == ["fast", "small"]
    assert [name for name, check in sorted(report["checks"].items()) if not check["ok"]] == bad
    assert {report["checks"][name]["note"] for name in bad} <= {why}


def test_an_old_report_counts_for_nothing(tmp_path: Path) -> None:
    Report("some", "c", [Check("fast", 2.0, ">=", 1.0, "c")]).write(tmp_path / "some.json")
    report = run(script(tmp_path, "raise SystemExit(0)"), tmp_path)
    assert not report["checks"]["fast"]["ok"]


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    report = run(script(tmp_path, "import threading; threading.Event().wait()", limit_s=0.3), tmp_path)
    assert time.monotonic() - began_s < 20
    assert report["checks"]["fast"]["note"] == "not within 0.3 s"


def test_each_check_has_one_script() -> None:
    assert len(set(EXPECTED)) == len(EXPECTED) == 19
    assert len({script.name for script in SUITE}) == len(SUITE)
