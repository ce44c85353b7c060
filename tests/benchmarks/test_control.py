"""The benchmark of the control path: checks that can fail, and a report with all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import control
from benchmarks.control import Found, Sizes, checks, main, memory
from pdkv.cli.bench.control_memory import Growth
from pdkv.cli.bench.control_run import Case, Cost, PartCost, SideCost

MEMORY = {"prefill": Growth(3_000_000, 300), "decode": Growth(2_000_000, 500)}
WHOLE = {"prefill": Growth(18_360_000, 300), "decode": Growth(32_720_000, 15_860)}
SIZES = Sizes(tokens=(1 << 10, 1 << 16, 1 << 20))


def cost(tokens: int, prefill_ms: float, decode_ms: float, *, in_flight: int = 1, exposed_ms: float = 4.0) -> Cost:
    sides = {
        role: SideCost(ms, 1.0, 1.0, {"match": PartCost(0.5, 0.1, 1.0)}, {"MainThread": ms})
        for role, ms in (("prefill", prefill_ms), ("decode", decode_ms))
    }
    return Cost(Case(tokens, in_flight), 100.0, exposed_ms, exposed_ms - 1, sides)


def found(whole: Cost, short_ms: float = 80.0) -> Found:
    base = [cost(1 << 10, 1.0, 1.0), cost(1 << 16, 5.0, 6.0)]
    short = [cost(1 << 16, 5.0, 6.0), cost(1 << 20, 80.0, short_ms)]
    many = [cost(1 << 16, 5.0, 6.0, in_flight=n) for n in (1, 64)]
    return Found([*base, whole], [whole], short, many, (MEMORY, WHOLE))


@pytest.mark.parametrize(
    ("whole", "missed"),
    [
        (cost(1 << 20, 80.0, 96.0), set()),
        (cost(1 << 20, 80.0, 101.0), {"control_1m_cpu_ms"}),
        (cost(1 << 20, 97.0, 90.0), {"cost_per_page_growth"}),
        (cost(1 << 20, 80.0, 96.0, exposed_ms=5.1), {"control_1m_exposed_ms"}),
        (cost(1 << 20, 80.0, 96.0, exposed_ms=float("nan")), {"control_1m_exposed_ms"}),
    ],
)
def test_targets_are_met_or_missed(whole, missed):
    given = checks(found(whole), SIZES)
    assert {check.name for check in given} == {"control_1m_cpu_ms", "control_1m_exposed_ms", "cost_per_page_growth"}
    assert {check.name for check in given if not check.ok} == missed


def test_growth_is_that_of_the_side_that_grows_more():
    grown = checks(found(cost(1 << 20, 16 * 5.0, 16 * 6.6)), SIZES)[2]
    assert grown.value == pytest.approx(1.1)
    assert "16,384 pages / 1,024: prefill 1.00, decode 1.10; short chunks: prefill 1.00, decode 0.83" in grown.note
    assert checks(found(cost(1 << 20, 16 * 5.0, 16 * 6.6), short_ms=16 * 9.0), SIZES)[2].value == pytest.approx(1.5)


def test_a_page_costs_what_the_longer_request_takes_more() -> None:
    """15,360 pages more: 1,000 bytes each and nothing in Python, 2,000 and an object each."""
    rows = memory(found(cost(1 << 20, 80.0, 96.0)), SIZES)
    assert [(row["bytes_a_page"], row["objects_a_page"]) for row in rows.values()] == [(1000.0, 0.0), (2000.0, 1.0)]


def test_the_report_holds_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[object] = []

    async def measured(cases, chunk_tokens, token_us, repetitions, *, scattered=False):
        asked.append((cases, chunk_tokens, scattered))
        return [cost(c.tokens, c.tokens / 2e4, c.tokens / 2e4, in_flight=c.in_flight) for c in cases]

    async def grown(cases, chunk_tokens, token_us):
        return [{1 << 16: MEMORY, 1 << 20: WHOLE}[case.tokens] for case in cases]

    monkeypatch.setattr(control, "measured", measured)
    monkeypatch.setattr(control, "grown", grown)
    path = tmp_path / "control.json"
    assert main(["--json", str(path)], SIZES) == 0
    report = json.loads(path.read_text())
    assert set(report["checks"]) == {"control_1m_cpu_ms", "control_1m_exposed_ms", "cost_per_page_growth"}
    assert [row["case"]["tokens"] for row in report["figures"]["sizes"]] == list(SIZES.tokens)
    assert [row["case"]["in_flight"] for row in report["figures"]["in_flight"]] == list(SIZES.in_flight)
    assert [(chunk, scattered) for _, chunk, scattered in asked] == [
        (32_768, False),
        (32_768, True),
        (4_096, False),
        (32_768, False),
    ]
    assert report["figures"]["memory"]["decode"]["bytes_a_page"] == 2000.0
    shown = capsys.readouterr().out
    assert "scattered" in shown
    assert "bytes a page" in shown
