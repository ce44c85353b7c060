"""A soak is good only if something was tried and nothing was lost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from pdkv.cli.soak.report import MUST_BE_ZERO, SoakReport, coverage_table, figures_table
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


@pytest.mark.parametrize(("name", "value"), [("finished", 0), ("kills", 0)])
def test_a_soak_that_tried_nothing_is_not_good(name: str, value: int) -> None:
    report = tried()
    setattr(report, name, value)
    assert not report.ok


def test_every_stage_stands_in_the_table() -> None:
    report = tried()
    words = shown(coverage_table(report))
    assert all(stage.value in words for stage in Stage)
    assert "any time" not in words
    report.faults["stop", "any time"] += 1
    assert "any time" in shown(coverage_table(report))


def test_figures_name_the_longest_recovery() -> None:
    report = tried()
    report.recoveries_s += [0.5, 2.25]
    report.notes += ["what went wrong", "[/tmp/it] and [it]"]
    words = shown(figures_table(report))
    assert "2.25" in words
    assert "what went wrong" in words
    assert "[/tmp/it] and [it]" in words
