"""Rows of a timeline from marks, and what is wrapped."""

from __future__ import annotations

import asyncio
import importlib
from functools import reduce

import pytest

from benchmarks.timeline import FIRST, LAST, SINK, SOURCE, Marks, _timed, lined_up


def pull(at_s: float, late_s: float = 0.0) -> Marks:
    return [
        ("of the pull before", at_s - 0.5, at_s - 0.4),
        (FIRST, at_s, at_s + 0.001),
        ("read", at_s + 0.002 + late_s, at_s + 0.004 + late_s),
        ("read", at_s + 0.006, at_s + 0.007),
        (LAST, at_s + 0.008, at_s + 0.009),
        ("afterwards", at_s + 0.010, at_s + 0.011),
    ]


def test_rows_are_medians_from_the_request_to_the_commit_each_step_as_often_as_it_came() -> None:
    marks = [mark for n, late_s in enumerate((0.0, 0.001, 0.003)) for mark in pull(10.0 * (n + 1), late_s)]
    rows = lined_up([*marks, ("now and then", 10.003, 10.004)])
    assert [words for words, _, _ in rows] == [FIRST, "read", "read", LAST]
    assert [at_ms for _, at_ms, _ in rows] == pytest.approx([0.0, 3.0, 6.0, 8.0])
    assert [took_ms for _, _, took_ms in rows] == pytest.approx([1.0, 2.0, 1.0, 1.0])


def test_a_wrapped_step_does_what_it_did_and_is_marked_however_it_ends() -> None:
    marks: Marks = []

    def fails() -> None:
        raise ValueError("of its own")

    async def later(value: int) -> int:
        return value + 1

    assert asyncio.run(_timed(later, "later", marks)(1)) == 2
    with pytest.raises(ValueError, match="of its own"):
        _timed(fails, "fails", marks)()
    assert [(words, ended_s >= began_s) for words, began_s, ended_s in marks] == [("later", True), ("fails", True)]


def test_everything_that_is_to_be_wrapped_is_there() -> None:
    for module, path, _ in SINK + SOURCE:
        assert callable(reduce(getattr, path.split("."), importlib.import_module(module))), (module, path)
