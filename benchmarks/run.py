"""Runs the suite and puts all checks into one file: `make bench`.

    python benchmarks/run.py [--only NAME,NAME] [--results DIR]

Guarantees: scripts run one after the other, each in a process of its own; a script that fails, runs over its time or
leaves one of its checks out shows as checks that are not ok, with the reason; `latest.json` has every check of
`EXPECTED` or the reason why not. Exit code 0 only if each target is met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pdkv.cli.bench.report import Check, as_map, stamp  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Script:
    name: str
    expected: tuple[str, ...]
    """Checks that its report must hold."""
    limit_s: float
    arguments: tuple[str, ...] = ()
    folder: Path = ROOT / "benchmarks"

    @property
    def command(self) -> str:
        return " ".join(("python", f"benchmarks/{self.name}.py", *self.arguments))


SUITE = (
    Script(
        "transfer",
        (
            "pull_vs_raw_nixl",
            "pull_vs_nixl_defaults",
            "pull_vs_memcpy",
            "digest_cost",
            "page_vs_layer_major",
            "vs_grpc_stream",
            "idle_cpu",
            "small_read_ms",
        ),
        300.0,
    ),
    Script("control", ("control_1m_cpu_ms", "control_1m_exposed_ms", "cost_per_page_growth"), 180.0),
    Script(
        "link",
        (
            "line_rate_1g",
            "line_rate_2g",
            "line_rate_4g",
            "line_cpu_2g",
            "two_rails",
            "short_beside_long",
            "incast",
        ),
        300.0,
    ),
    Script("streaming", ("exposed_fraction",), 150.0),
)
EXPECTED = tuple(name for script in SUITE for name in script.expected)


def run(script: Script, results: Path) -> dict[str, Any]:
    """Its report; where there is none, one that says why."""
    path = results / f"{script.name}.json"
    path.unlink(missing_ok=True)
    line = [sys.executable, str(script.folder / f"{script.name}.py"), *script.arguments, "--json", str(path)]
    began = time.monotonic()
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    trouble = ""
    try:
        code = process.wait(script.limit_s)
        if code not in (0, 1):
            trouble = f"exit code {code}"
    except subprocess.TimeoutExpired:
        trouble = f"not within {script.limit_s:g} s"
    finally:
        end(process)
    report: dict[str, Any] = {"name": script.name, "command": script.command, "checks": {}}
    if path.exists():
        report = json.loads(path.read_text())
    absent = set(script.expected) - set(report["checks"])
    missing = [Check(n, math.nan, ">=", 0.0, script.command, trouble or "not in its report") for n in sorted(absent)]
    report["checks"] |= as_map(missing)
    report |= {"elapsed_s": round(time.monotonic() - began, 1), "trouble": trouble}
    return report


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it left of itself: first the chance to clean up."""
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        process.send_signal(how)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            continue


def table(checks: dict[str, dict[str, Any]]) -> Table:
    shown = Table("check", "value", "target", "", "against", box=SIMPLE_HEAD)
    for name, check in checks.items():
        value = "-" if check["value"] is None else f"{check['value']:.4g}"
        shown.add_row(name, value, check["target"], "ok" if check["ok"] else "MISSED", check["note"])
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of scripts, with commas between; then latest.json stays")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    if unknown := only - {script.name for script in SUITE}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not of {', '.join(s.name for s in SUITE)}")
    options.results.mkdir(parents=True, exist_ok=True)
    console, began, reports = Console(), time.monotonic(), []
    for script in SUITE:
        if not only or script.name in only:
            console.rule(script.command)
            reports.append(run(script, options.results))
    checks = {name: check for report in reports for name, check in report["checks"].items()}
    console.print(table(checks))
    elapsed_s = round(time.monotonic() - began, 1)
    ok = all(check["ok"] for check in checks.values())
    console.print(
        f"{sum(c['ok'] for c in checks.values())} of {len(checks)} met, {elapsed_s:g} s, {os.cpu_count()} CPUs"
    )
    if not only:
        latest = {"machine": stamp(), "elapsed_s": elapsed_s, "ok": ok, "checks": checks, "reports": reports}
        (options.results / "latest.json").write_text(json.dumps(latest, indent=2) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
