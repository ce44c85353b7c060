"""The suite's plots: drawn from what is committed, and an error where there is nothing to draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plots import PLOTS, RESULTS, main


def test_every_plot_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(PLOTS)


def test_one_script_gives_its_own_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = {report["name"]: report for report in json.loads(RESULTS.read_text())["reports"]}
    (tmp_path / "control.json").write_text(json.dumps(reports["control"]))
    assert main(["--results", str(tmp_path / "control.json"), "--to", str(tmp_path / "to")]) == 0
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["control.svg"]
    assert "exposed: no rows of streaming.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    "held",
    [None, {"name": "control"}, {"reports": []}, {"reports": [{"name": "link", "figures": {}}]}],
)
def test_nothing_to_draw_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: dict[str, object] | None
) -> None:
    results = tmp_path / "latest.json"
    if held is not None:
        results.write_text(json.dumps(held))
    assert main(["--results", str(results), "--to", str(tmp_path / "to")]) == 1
    assert capsys.readouterr().err.startswith("NothingToDraw: ")
    assert not (tmp_path / "to").exists()
