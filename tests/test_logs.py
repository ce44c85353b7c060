"""Lines for people and for machines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.logs import OWN, JsonLines, TextLines, say, to_stderr

LOG = logging.getLogger("tests.logs")


class Kept(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def written(formatter: logging.Formatter, words: str, facts: dict[str, Any], **more: Any) -> str:
    kept = Kept(formatter)
    LOG.addHandler(kept)
    LOG.setLevel("INFO")
    try:
        LOG.info(words, extra={"facts": facts}, **more) if more else say(LOG, logging.INFO, words, facts)
    finally:
        LOG.removeHandler(kept)
    (line,) = kept.lines
    return line


def test_a_text_line_has_its_facts_behind_it() -> None:
    facts = {"request": "r 1", "pages": 3, "total_s": 0.123456789, "why": 'a "b"', "empty": ""}
    line = written(TextLines("d0"), "request ended", facts)
    assert line.endswith(
        'INFO d0 tests.logs: request ended request="r 1" pages=3 total_s=0.123457 why="a \\"b\\"" empty=""'
    )


def test_a_json_line_is_an_object_and_numbers_are_numbers() -> None:
    line = json.loads(written(JsonLines("d0"), "request ended", {"pages": 3, "total_s": 0.25, "rate": float("inf")}))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "node": "d0",
        "logger": "tests.logs",
        "message": "request ended",
        "pages": 3,
        "total_s": 0.25,
        "rate": "inf",
    }


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = written(JsonLines("d0"), "failed", {}, exc_info=error)
    assert "two\nlines" in json.loads(line)["trace"]
    assert "\n" not in line


def test_no_fact_takes_the_place_of_what_every_line_has() -> None:
    line = json.loads(written(JsonLines("d0"), "request ended", dict.fromkeys(OWN, "forged")))
    assert "forged" not in line.values()


@given(st.text(), st.text())
def test_whatever_stands_in_it_a_line_is_one_line(words: str, value: str) -> None:
    for formatter in (TextLines("d0"), JsonLines("d0")):
        line = written(formatter, words.replace("%", "%%"), {"value": value})
        assert len(line.splitlines()) == 1


CODE = "import logging; from pdkv.logs import to_stderr; now = to_stderr('p0', 'warning', {0!r}); now.__enter__(); {1}"
BEFORE = "import io, logging; kept = logging.StreamHandler(io.StringIO()); logging.basicConfig(handlers={0}); "
SAYS = "logging.getLogger('a').info('too little'); logging.getLogger('a').warning('enough')"


@pytest.mark.parametrize(("form", "due"), [("text", "WARNING p0 a: enough"), ("json", '"message": "enough"')])
def test_a_process_writes_to_stderr_what_is_severe_enough(form: str, due: str) -> None:
    code = CODE.format(form, SAYS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert due in done.stderr
    assert "too little" not in done.stderr


@pytest.mark.parametrize("others", ["[logging.StreamHandler()]", "[logging.StreamHandler(sys.stdout), kept]"])
def test_what_others_have_put_on_the_console_is_replaced_and_what_goes_elsewhere_stays(others: str) -> None:
    """A library's handler would else keep ours out, or say each line twice."""
    code = f"import sys; {BEFORE.format(others)}{CODE.format('json', SAYS)}; print(kept.stream.getvalue(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "enough"
    assert done.stdout == ("WARNING:a:enough\n" if "kept" in others else "")


def test_afterwards_everything_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    with to_stderr("p0", "error", "text"), to_stderr("p1", "info", "text"):
        LOG.info("once")
    assert (root.handlers, root.level) == (before, level)
    LOG.error("not there any more")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO p1 tests.logs: once")


def test_pdkv_alone_sets_up_nothing() -> None:
    """Whoever embeds it has the handlers that they had."""
    code = "import logging, pdkv.cli.app, pdkv.logs; print(logging.getLogger().handlers, logging.getLogger().level)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] 30\n"
