"""Whole runs: every law holds, the same seed does the same, and what is counted and printed is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from pdkv.node.stages import Stage
from tests.simulation.__main__ import main, table
from tests.simulation.faults import KINDS, draw
from tests.simulation.run import Result
from tests.simulation.runs import Sum, many, one, several


@pytest.mark.parametrize("first", [0, 60, 120, 180])
def test_every_law_holds(first: int) -> None:
    """A few; `make sim` runs thousands."""
    total = several(range(first, first + 60))
    assert total.failed == {}
    assert total.ends["done"] > total.seeds * 8
    assert sum(total.hits.values()) > total.seeds * 3


def test_a_seed_does_the_same_again_whatever_else_the_process_did() -> None:
    before = [one(seed).digest for seed in (3, 5, 8)]
    several(range(200, 204))
    assert [one(seed).digest for seed in (8, 5, 3)] == before[::-1]
    assert len(set(before)) == 3


def test_and_in_another_process_with_another_hash_seed() -> None:
    code = "from tests.simulation.runs import one; print(*(one(seed).digest for seed in (3, 5, 8)))"
    env = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said == " ".join(one(seed).digest for seed in (3, 5, 8)) + "\n"


def test_a_log_is_what_happened_and_its_keeping_changes_nothing() -> None:
    told, silent = one(11, keep_log=True), one(11)
    assert told.digest == silent.digest
    assert not silent.log
    assert any("decode.admitted" in line for line in told.log)
    assert any("client r0 " in line for line in told.log)


def test_a_plan_is_drawn_alike_and_hits_every_pair_of_fault_and_stage_in_the_long_run() -> None:
    from random import Random

    assert draw(Random(1), 5) == draw(Random(1), 5) != draw(Random(2), 5)
    pairs = {(fault.kind, fault.stage) for seed in range(4000) for fault in draw(Random(seed), 5)}
    assert pairs == {(kind, stage) for kind in KINDS for stage in Stage}


def _result(seed: int, broken: str = "") -> Result:
    return Result(seed, broken, "", Counter(done=12), {("kill", "decode.reading"): 2}, 3600.0, [])


def test_sums_are_the_same_however_seeds_are_spread() -> None:
    whole, parts = Sum(), [Sum(), Sum()]
    for seed in range(4):
        result = _result(seed, "a law" if seed == 2 else "")
        whole.add(result)
        parts[seed % 2].add(result)
    joined = Sum()
    for part in parts:
        joined.join(part)
    assert joined == whole
    assert (whole.seeds, whole.failed, whole.ends["done"]) == (4, {2: "a law"}, 48)
    assert whole.least() == 0
    row = next(line for line in table(whole).splitlines() if line.startswith("kill "))
    assert row.split()[1:] == ["8" if stage is Stage.READING else "0" for stage in Stage]


def test_many_seeds_on_processes_come_to_the_same_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr("tests.simulation.runs.BATCH", 4)
    spread = many(range(300, 310), 2, told=lambda total, seconds: told.append(total.seeds))
    alone = several(range(300, 310))
    assert spread.virtual_s == pytest.approx(alone.virtual_s)
    spread.virtual_s = alone.virtual_s
    assert spread == alone
    assert told == sorted(told)
    assert told[-1] == 10
    assert len(told) == 3


def test_a_failing_seed_is_printed_with_its_replay_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, total in ((["--seeds", "2"], Sum()), (["--seeds", "2", "--json"], Sum())):
        total.add(_result(0))
        total.add(_result(1, "a law is broken"))
        monkeypatch.setattr("tests.simulation.__main__.many", lambda *_, total=total, **__: total)
        monkeypatch.setattr("sys.argv", ["simulation", *words])
        assert main() == 1
        out = capsys.readouterr().out
        if "--json" in words:
            said = json.loads(out)
            assert said["failed"] == {"1": "a law is broken"}
            assert said["hits"]["kill"]["decode.reading"] == 4
        else:
            assert "FAILED seed 1: a law is broken" in out
            assert "python -m tests.simulation --replay 1 --verbose" in out


def test_faults_that_met_a_stage_too_seldom_fail_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for seeds, hits, code in ((20_000, 50, 0), (20_000, 49, 1), (1_000, 0, 0)):
        total = Sum(seeds=seeds, hits=Counter({(kind, stage.value): hits for kind in KINDS for stage in Stage}))
        monkeypatch.setattr("tests.simulation.__main__.many", lambda *_, total=total, **__: total)
        monkeypatch.setattr("sys.argv", ["simulation", "--json"])
        assert main() == code


def test_a_replay_prints_the_log_and_a_mutation_that_is_caught_is_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulation", "--replay", "11", "--verbose"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "every law held" in out
    assert one(11).digest in out
    monkeypatch.setattr("sys.argv", ["simulation", "--seeds", "200", "--mutation", "account-skipped"])
    caught = several(range(200), mutation="account-skipped", stop_at=".")
    monkeypatch.setattr("tests.simulation.__main__.many", lambda *_, **__: caught)
    assert main() == 0
    assert "--mutation account-skipped" in capsys.readouterr().out
