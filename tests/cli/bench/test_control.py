"""`pdkv bench control`: the table, the object, and the options that reach the measurement."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from pdkv.cli.app import run
from pdkv.cli.bench import control
from pdkv.cli.bench.control_run import Case, Cost, PartCost, SideCost


def cost(case: Case = Case(640)) -> Cost:  # noqa: B008
    def side(ms: float) -> SideCost:
        return SideCost(ms, 7.0, 3.0, {"match": PartCost(1.25, 0.5, 33.0)}, {"MainThread": ms, "others": 10.0})

    return Cost(case, 30.0, 4.5, 2.5, {"prefill": side(8.0), "decode": side(9.0)})


def test_the_table_has_each_part_what_is_left_and_what_was_taken_off():
    out = StringIO()
    Console(file=out, width=120).print(control.table(cost()))
    shown = out.getvalue()
    for words in (
        "640 tokens, 10 pages",
        "match",
        "1.25",
        "33",
        "rest",
        "6.75",
        "7.75",
        "8.00",
        "9.00",
        "engine",
        "idle",
    ):
        assert words in shown, words
    assert "900.00 µs a page; exposed 4.50 ms, 2.50 of them after" in shown


def test_the_object_has_what_follows_too():
    found = json.loads(json.dumps(control.as_dict(cost())))
    assert (found["pages"], found["cpu_ms"], found["us_per_page"]) == (10, 9.0, 900.0)
    assert found["case"] == {"tokens": 640, "in_flight": 1}
    assert found["sides"]["prefill"]["rest_ms"] == 6.75
    assert found["sides"]["decode"]["parts"]["match"] == {"cpu_ms": 1.25, "exposed_ms": 0.5, "calls": 33.0}


def test_options_reach_the_measurement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked: list[object] = []

    async def measured(cases, *rest, scattered):
        asked.append((cases, *rest, scattered))
        return [cost(case) for case in cases]

    monkeypatch.setattr(control, "measured", measured)
    with pytest.raises(SystemExit) as ended:
        run(
            [
                "bench",
                "control",
                "--tokens",
                "640",
                "--in-flight",
                "2",
                "--chunk-tokens",
                "128",
                "--scattered",
                "--json",
            ]
        )
    assert ended.value.code == 0
    assert asked == [([Case(640, 2)], 128, 0.25, 5, True)]
    assert json.loads(capsys.readouterr().out)["case"] == {"tokens": 640, "in_flight": 2}
