"""`pdkv bench transfer` as it is typed: what it prints, how it exits, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdkv.cli.bench import transfer as module
from pdkv.cli.bench.cases import Case
from pdkv.cli.bench.rows import Row
from pdkv.cli.bench.sweep import Sweep
from pdkv.cli.bench.transfer import _fitting, run_transfer, settings_of
from pdkv.cli.bench.transfer_options import TransferOptions
from pdkv.errors import ConfigError

PDKV = (sys.executable, "-m", "pdkv.cli", "bench", "transfer")
SMALL = ("--model", "tiny", "--mode", "warm", "--order", "scattered", "--placement", "page_major", "--hit", "0")
LIMIT_S = 120.0


def run(*options: str) -> subprocess.CompletedProcess[str]:
    line = [*PDKV, *SMALL, "--digests", "off", "--repetitions", "1", *options]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)


def test_rows_as_json_and_csv(tmp_path: Path) -> None:
    done = run("--pages", "8,1", "--json", "--csv", str(tmp_path / "rows.csv"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert [row["pages"] for row in found["rows"]] == [8, 1]
    assert all(row["gb_per_s"] > 0 and row["of_ceiling"] > 0 and row["wrong"] == 0 for row in found["rows"])
    assert "every byte was right" in done.stderr
    with (tmp_path / "rows.csv").open() as file:
        assert [int(row["pages"]) for row in csv.DictReader(file)] == [8, 1]


def test_wrong_bytes_are_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def shown(options: TransferOptions, *_: object) -> Sweep:
        sweep = Sweep(settings_of(options), {}, [], lambda text: None)
        sweep.rows += [Row(Case(1), 3, 1), Row(Case(2), 3, 1, failure="DigestMismatch: bytes of 1 page")]
        return sweep

    monkeypatch.setattr(module, "_shown", shown)
    with pytest.raises(SystemExit) as ended:
        run_transfer(TransferOptions(model="tiny", pages="1", json_=True))
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["ok"] is False
    assert "2 pages: DigestMismatch" in told.err


def test_ctrl_c_ends_every_process() -> None:
    line = [*PDKV, *SMALL, "--pages", "8", "--repetitions", "100000"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("2 of"):
            assert process.poll() is None
        children = descendants(process.pid)
        assert len(children) >= 4  # source and sink, raw source and raw sink
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    finally:
        process.kill()
        process.communicate()
    until = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < until, "processes are left behind"
        os.sched_yield()


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            children += [child, *descendants(child)]
    return children


def test_a_case_that_does_not_fit_is_said_beforehand() -> None:
    fitted = _fitting(TransferOptions(model="tiny", pages="8,100", memory="20MB"))
    assert {case.pages for case in fitted.cases} == {8}
    assert "100 pages" in fitted.left_out[0]
    with pytest.raises(ConfigError, match="memory"):
        _fitting(TransferOptions(model="tiny", pages="100", memory="20MB"))


def test_there_is_a_ceiling_where_there_is_a_raw_source() -> None:
    assert settings_of(TransferOptions()).ceiling
    assert not settings_of(TransferOptions(role="sink", connect="a:1")).ceiling
    far = settings_of(TransferOptions(role="sink", connect="a:1", raw_source="a:2", link_gbit=400.0))
    assert (far.ceiling, far.raw_source, far.link_gbit_per_s) == (True, "a:2", 400.0)
    assert settings_of(TransferOptions()).link_gbit_per_s == 0.0
