"""A soak is good only if something was tried and nothing was lost."""

from __future__ import annotations

import inspect
import io

import pytest
from rich.console import Console, RenderableType

from pdkv.cli.soak import soak
from pdkv.cli.soak.aims import DUE
from pdkv.cli.soak.report import (
    MUST_BE_ZERO,
    PACE_S,
    PAIRS_DUE_S,
    RECOVERY_DUE_KILLS,
    RECOVERY_S,
    SoakReport,
    coverage_table,
    elsewhere_table,
    figures_table,
)
from pdkv.node.stages import Stage


def shown(table: RenderableType) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def tried() -> SoakReport:
    report = SoakReport(seed=1, requests=3, finished=2, kills=1)
    report.failures["PeerLost"] = 1
    report.faults["kill", Stage.READING.value] = 1
    return report


def test_good() -> None:
    assert tried().ok
    assert tried().as_dict()["failed_named"] == 1


@pytest.mark.parametrize("name", MUST_BE_ZERO)
def test_anything_lost_is_not_good(name: str) -> None:
    report = tried()
    setattr(report, name, 1)
    assert not report.ok
    assert report.as_dict()[name] == 1


@pytest.mark.parametrize(("longest_s", "ok"), [(2.9, True), (3.0, False), (30.0, False)])
def test_a_recovery_that_took_too_long_is_not_good(longest_s: float, *, ok: bool) -> None:
    report = tried()
    report.recoveries_s += [0.5, longest_s, 1.0]
    assert report.ok is report.as_dict()["ok"] is ok
    assert report.as_dict()["max_recovery_s"] == longest_s


@pytest.mark.parametrize(("lasted_s", "ok"), [(0.0, True), (2.9, True), (3.0, False), (30.0, False)])
def test_one_that_was_cut_off_counts_if_it_had_lasted_too_long(lasted_s: float, *, ok: bool) -> None:
    report = tried()
    report.recoveries_s.append(0.5)
    report.cut_off(lasted_s)
    assert report.ok is ok
    assert report.as_dict()["recoveries_cut"] == int(ok)
    assert report.max_recovery_s == (0.5 if ok else lasted_s)


@pytest.mark.parametrize(
    ("kills", "gap_s", "ok"),
    [
        (RECOVERY_DUE_KILLS - 1, PACE_S, True),
        (RECOVERY_DUE_KILLS, PACE_S, False),
        (RECOVERY_DUE_KILLS, RECOVERY_S, False),
        (RECOVERY_DUE_KILLS, RECOVERY_S - 0.1, True),
    ],
)
def test_without_one_measured_recovery_a_long_soak_is_not_good(kills: int, gap_s: float, *, ok: bool) -> None:
    report = tried()
    report.kills, report.gap_s = kills, gap_s
    report.cut_off(1.0)
    assert report.ok is ok
    assert report.failings == ([] if ok else ["no recovery was measured, cut off: 1"])
    report.recoveries_s.append(RECOVERY_S / 2)
    assert report.ok


@pytest.mark.parametrize("pair", [("kill", Stage.LENT.value), ("drop", "renew_lease"), ("stop", "any time")])
def test_ten_minutes_hit_every_pair(pair: tuple[str, str]) -> None:
    report = tried()
    report.asked_s = PAIRS_DUE_S
    report.faults.update(DUE)
    assert report.ok
    assert report.as_dict()["missing"] == []
    assert "missing" not in shown(coverage_table(report)) + shown(elsewhere_table(report))
    del report.faults[pair]
    assert report.failings == ["faults never injected: 1"]
    assert report.as_dict()["missing"] == [f"{pair[0]}@{pair[1]}"]
    assert (shown(coverage_table(report)) + shown(elsewhere_table(report))).count("missing") == 1
    assert f"{pair[0]}@{pair[1]}" in shown(figures_table(report))
    report.gap_s = PACE_S + 1
    assert report.ok, "one with fewer faults says what is missing, and may be good"
    report.asked_s, report.gap_s = PAIRS_DUE_S - 1, PACE_S
    assert report.ok, "so does a shorter one"


def test_ten_minutes_as_they_are_asked_for_by_default_have_enough_faults() -> None:
    assert inspect.signature(soak).parameters["kill_every_s"].default == PACE_S


@pytest.mark.parametrize(("name", "value"), [("finished", 0), ("kills", 0)])
def test_a_soak_that_tried_nothing_is_not_good(name: str, value: int) -> None:
    report = tried()
    setattr(report, name, value)
    assert not report.ok


def test_every_stage_stands_in_the_table() -> None:
    report = tried()
    words = shown(coverage_table(report))
    assert all(stage.value in words for stage in Stage)
    assert "any time" in words


def test_a_pair_that_nobody_counted_on_stands_in_the_table_too() -> None:
    report = tried()
    assert "garble@read.peers" not in shown(elsewhere_table(report))
    report.faults["garble", "read.peers"] += 1
    assert "garble@read.peers" in shown(elsewhere_table(report))


def test_figures_name_the_longest_recovery() -> None:
    report = tried()
    report.recoveries_s += [0.5, 2.25]
    report.notes += ["what went wrong", "[/tmp/it] and [it]"]
    words = shown(figures_table(report))
    assert "2.25" in words
    assert "what went wrong" in words
    assert "[/tmp/it] and [it]" in words
