"""Figures of a row, in every form that they are told in."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pdkv.cli.bench.cases import Case
from pdkv.cli.bench.pulls import Pulled
from pdkv.cli.bench.rows import Plot, Row, Sample, baseline_table, table, write_csv
from pdkv.errors import ConfigError, MissingDependency
from pdkv.node.messages import Shipment

MAIN, INDEX = 225_000, 25_000
PAGES = 40


def pulled(began_s: float, committed_s: float, *, pages: int = PAGES, each_s: tuple[float, ...] = ()) -> Pulled:
    shipped = Shipment(descriptors=pages + 1, bytes_backend=(pages + 1) * (MAIN + INDEX), digests_verified=pages + 1)
    ids = np.arange(1, pages + 1, dtype=np.int32)
    return Pulled(
        began_s=began_s,
        committed_s=committed_s,
        admitted_s=committed_s + 0.001,
        each_s=each_s or (committed_s - began_s,),
        stages_s={"accepted": 0.001},
        pages=pages,
        hit_pages=0,
        shipped=shipped,
        descriptors_before=3 * (pages + 1),
        post_s=0.002,
        cpu_s=0.004,
        local=ids,
        remote=ids,
    )


def sample(ms: float, ceiling: float | None = 2.0, wrong: int = 0) -> Sample:
    return Sample([pulled(100.0, 100.0 + ms / 1e3)], 0.001, wrong, ceiling_gb_per_s=ceiling)


def row(*samples: Sample, pages: int = PAGES) -> Row:
    return Row(Case(pages), MAIN, INDEX, "cma", list(samples))


def test_figures_are_medians_and_measured_values() -> None:
    facts = row(sample(10), sample(20), sample(40)).facts()
    assert facts["gb_per_s"] == pytest.approx(0.5)
    assert facts["of_ceiling"] == pytest.approx(0.25)
    assert [round(facts[f"latency_p{p}_ms"], 6) for p in (50, 90, 99)] == [20, 40, 40]
    assert facts["admitted_p50_ms"] == pytest.approx(21)
    assert (facts["bytes_main"], facts["bytes_index"]) == (PAGES * MAIN, PAGES * INDEX)
    assert (facts["descriptors_before"], facts["descriptors_after"]) == (123, 41)
    assert facts["source_cpu_s_per_gb"] == pytest.approx(0.1)
    assert facts["sink_cpu_s_per_gb"] == pytest.approx(0.4)
    assert facts["wrong"] == 0


def test_ratios_are_to_the_ceiling_of_the_same_turn() -> None:
    """Both got twice as slow together: the ratio didn't move."""
    facts = row(sample(10, 4.0), sample(20, 2.0), sample(40, 1.0)).facts()
    assert facts["of_ceiling"] == pytest.approx(0.25)


def test_what_was_not_measured_is_none() -> None:
    assert row().facts()["gb_per_s"] is None
    assert row(sample(10, None)).facts()["of_ceiling"] is None
    nothing = Sample([pulled(1.0, 1.1, pages=0)], 0.0, 0)
    facts = row(nothing).facts()
    assert facts["gb_per_s"] is facts["sink_cpu_s_per_gb"] is facts["of_link"] is None
    assert facts["latency_p50_ms"] == pytest.approx(100)


def test_pulls_at_once_take_from_the_first_to_the_last() -> None:
    both = Sample([pulled(1.0, 1.01), pulled(1.005, 1.03, each_s=(0.025, 0.01))], 0.0, 0)
    facts = row(both).facts()
    assert facts["latency_p50_ms"] == pytest.approx(30)
    assert facts["gb_per_s"] == pytest.approx(2 * PAGES * 0.25e6 / 0.03 / 1e9)
    assert facts["slowest_of_fastest"] == pytest.approx(2.5)


def test_of_prompts_one_after_another_each_counts() -> None:
    """Eight of four pages, one of which was late: 1 ms each is what it takes."""
    series = Sample([pulled(1.0, 1.016, pages=32, each_s=(0.001,) * 7 + (0.009,))], 0.0, 0, series=True)
    facts = row(series, pages=4).facts()
    assert (facts["latency_p50_ms"], facts["latency_p99_ms"]) == pytest.approx((1, 9))
    assert facts["gb_per_s"] == pytest.approx(32 * 0.25e6 / 0.008 / 1e9)
    assert (facts["pages_pulled"], facts["bytes_main"]) == (4, 4 * MAIN)
    assert facts["admitted_p50_ms"] == pytest.approx(17 / 8)


def test_a_link_that_is_known_is_a_share() -> None:
    made = row(sample(10))
    made.link_gbit_per_s = 16.0
    assert made.facts()["of_link"] == pytest.approx(0.5)
    assert "of link" in shown(table([made]))
    assert "of link" not in shown(table([row(sample(10))]))


@pytest.mark.parametrize("bad", [row(sample(10), sample(10, wrong=2)), row()])
def test_wrong_bytes_make_a_row_wrong(bad: Row) -> None:
    if not bad.samples:
        bad.failure = "DigestMismatch: bytes of 1 of 40 pages"
    assert bad.facts()["wrong"] == bad.wrong > 0
    assert f"{bad.wrong} WRONG" in shown(table([bad]))


def test_a_table_has_a_line_a_row() -> None:
    text = shown(table([row(sample(10)), row(sample(20))]))
    assert text.count("40 pages") == 2
    assert "123 > 41" in text
    assert text.count("right") == 2


def test_baselines_stand_beside_and_the_absent_ones_are_named() -> None:
    made = row(sample(10))
    made.baselines = {"memcpy": 4.0}
    text = shown(baseline_table([made, row()], {"mooncake": "sink: No module named mooncake"}))
    assert "4.00 (0.25)" in text
    assert "mooncake: not here" in text


def test_csv_has_the_same_figures(tmp_path: Path) -> None:
    rows = [row(sample(10)), row(sample(20, None))]
    rows[0].baselines = {"memcpy": 4.0}
    write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(each["gb_per_s"]) for each in read] == [row.gb_per_s for row in rows]
    assert [each["memcpy_gb_per_s"] for each in read] == ["4.0", ""]
    assert read[1]["of_ceiling"] == ""
    with pytest.raises(ConfigError, match="csv"):
        write_csv(rows, tmp_path / "no" / "folder.csv")


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    Plot(tmp_path / "rows.svg").draw([row(sample(10)), row()], "tiny")
    assert "<svg" in (tmp_path / "rows.svg").read_text()
    with pytest.raises(ConfigError, match="plot"):
        Plot(tmp_path / "rows.txt")


def test_without_matplotlib_it_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match="matplotlib"):
        Plot(tmp_path / "rows.svg")


def shown(what: object) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()
