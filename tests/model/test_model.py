"""The runner of the model's checks, on what spin and pan printed once; and, where spin is installed, on spin itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model import check
from tests.model.check import HOLDS, WEAKENINGS, Answer, Found

SAMPLES = Path(__file__).with_name("samples")
MODEL = check.SOURCE.read_text("utf-8")


def _sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text("utf-8")


def test_a_search_that_ended_is_read_as_complete() -> None:
    assert check.parsed(_sample("holds")) == Found(states=3_952_408, error="", complete=True, unreached=())
    assert check.parsed(_sample("bitstate")) == Found(states=21_325, error="", complete=True, unreached=())


@pytest.mark.parametrize("name", ["depth", "memory"])
def test_a_search_that_met_a_limit_is_no_proof(name: str) -> None:
    found = check.parsed(_sample(name))
    assert not found.complete
    assert not found.error


def test_nothing_printed_is_no_proof() -> None:
    assert not check.parsed("").complete
    assert not check.parsed("Interrupted").complete


@pytest.mark.parametrize(
    ("name", "error"),
    [("breaks", "assertion violated"), ("endless", "non-progress cycle"), ("wedged", "invalid end state")],
)
def test_errors_are_told_apart(name: str, error: str) -> None:
    found = check.parsed(_sample(name))
    assert found.error.startswith(error)
    assert not found.complete
    assert found.states > 0


def test_statements_that_no_run_reaches_are_named() -> None:
    unreached = check.parsed(_sample("unreached")).unreached
    assert any(re.fullmatch(r"\d+: free\[d\] = \(free\[d\]-1\)", each) for each in unreached)
    # a law that holds never gets to its assertion, and a loop never to its end
    assert not any("assert" in each or "-end-" in each for each in unreached)


def test_a_trail_names_the_law_that_it_broke() -> None:
    line = 1 + next(i for i, text in enumerate(MODEL.splitlines()) if "assert(LAW_2)" in text)
    assert check.law_of(f"spin: core.pml:{line}, Error: assertion violated", MODEL) == "law 2"
    assert check.law_of("spin: core.pml:1, Error: assertion violated", MODEL) == "the assertion in line 1"
    assert check.law_of("spin: trail ends after 3 steps", MODEL) == "nothing that spin names"


def test_a_trail_is_told_without_the_variables() -> None:
    story = check.story(_sample("replay"))
    assert story[0] == "D0: request 1 reserves page 1"
    assert story[-1] == "D0: page 1 is committed for request 1"
    assert not any("=" in step or "proc" in step for step in story)


def test_weakenings_are_those_of_the_source() -> None:
    assert sorted(w.macro for w in WEAKENINGS) == check.macros_of(MODEL)
    source = (
        "#ifndef PAGES\n#define PAGES 2\n#endif\n#ifdef A\n#elif defined(B) && !defined(C)\n#endif\n#ifndef D\n#endif\n"
    )
    assert check.macros_of(source) == ["A", "B", "C", "D"]


def test_every_law_has_a_weakening_that_breaks_it() -> None:
    laws = set(re.findall(r"assert\(.*\);\s+/\* (.+?) \*/", MODEL))
    assert laws == {w.breaks for w in WEAKENINGS} - {check.ENDLESS}


def test_the_table_marks_what_is_not_as_expected() -> None:
    good = Answer("1+1", "", HOLDS, HOLDS, 1_234, 0.5)
    bad = Answer("1+1", "ROW_FIRST", "breaks law 5", HOLDS, 5, 1.0)
    lines = check.table([good, bad]).splitlines()
    assert [line.endswith("WRONG") for line in lines] == [False, False, True]
    assert "1,234" in lines[1]
    assert not json.loads(check.report([good, bad], as_json=True, seconds=1.5))["ok"]
    assert json.loads(check.report([good], as_json=True, seconds=1.5))["checks"][0]["states"] == 1_234


def test_missing_tools_are_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert check.main([]) == 2
    assert "not found: spin and gcc" in (said := capsys.readouterr().err)
    assert "apt-get install" in said


@pytest.mark.parametrize(("result", "code"), [(HOLDS, 0), ("breaks law 2", 1), ("not finished", 1)])
def test_the_exit_code_says_whether_all_was_as_expected(
    monkeypatch: pytest.MonkeyPatch, result: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "missing_tools", lambda: [])
    monkeypatch.setattr(check, "answers", lambda wanted, jobs: [Answer("1+1", "", HOLDS, result, 1, 0.1)])
    assert check.main([]) == code
    assert ("NOT as expected" in capsys.readouterr().out) is bool(code)


def test_an_unknown_variant_is_refused_by_name() -> None:
    with pytest.raises(check.ModelError, match="no variant NOPE; there are FREED_ON_RELEASE"):
        check.trail("NOPE")


def test_with_spin_the_model_holds_and_two_weakenings_fail() -> None:
    """Where spin is missing, the command has to say so."""
    if check.missing_tools():
        assert check.main([]) == 2
        return
    small = replace(
        check.checks()[1], macros=("REQUESTS=1",), build=("-O0", "-DSAFETY", "-DNOREDUCE"), all_reached=False
    )
    weak = [check.weakened(w) for w in WEAKENINGS if w.macro in ("STEP_ABANDONED", "NO_QUARANTINE")]
    answers = check.answers([small, *weak], jobs=2)
    assert [a.result for a in answers] == [HOLDS, "breaks law 2", "breaks law 2"]
    assert answers[0].states > 50_000
