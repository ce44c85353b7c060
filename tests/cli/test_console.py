"""Tables in a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from pdkv.cli.console import PIPE_WIDTH, table_console
from pdkv.cli.doctor.finding import Finding, Level
from pdkv.cli.doctor.report import report_table


@pytest.mark.parametrize(("variables", "width"), [({}, PIPE_WIDTH), ({"COLUMNS": "60", "FORCE_COLOR": "1"}, 60)])
def test_a_terminal_has_its_width_and_a_pipe_none(
    variables: dict[str, str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    console = table_console()
    assert console.width == width
    console.file = io.StringIO()
    words = "transparent ones " * 20
    console.print(report_table([Finding("huge pages", Level.OK, words)]))
    lines = console.file.getvalue().splitlines()
    assert (len(lines) == 1) is (width == PIPE_WIDTH)
    assert (words.strip() in lines[0]) is (width == PIPE_WIDTH)
