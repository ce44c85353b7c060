import json
from io import StringIO

import pytest
from rich.console import Console

from pdkv.cli.doctor.finding import Finding, fail, ok, warn
from pdkv.cli.doctor.report import ready, report_object, report_table, summary

WELL = ok("memory", "there is some")
UNWELL = warn("cma", "not there", "allow it")
BROKEN = fail("rdma", "RDMA is required, but\x1b[2J there is none", "a machine with one")


def printed(findings: list[Finding], width: int = 60) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(report_table(findings))
    return out.getvalue()


@pytest.mark.parametrize(
    ("findings", "well", "words"),
    [
        ([], True, "ready: 0 ok, 0 warn, 0 fail"),
        ([WELL, UNWELL], True, "ready: 1 ok, 1 warn, 0 fail"),
        ([WELL, BROKEN, UNWELL], False, "not ready: 1 ok, 1 warn, 1 fail"),
    ],
)
def test_one_failure_is_enough(findings: list[Finding], well: bool, words: str) -> None:
    assert ready(findings) is well
    assert summary(findings) == words
    assert report_object(findings)["ready"] is well


def test_the_table_has_all_of_it_and_no_commands_for_the_terminal() -> None:
    text = printed([WELL, BROKEN])
    assert "\x1b" not in text
    words = " ".join(text.split())
    assert words.startswith("ok memory there is some fail rdma RDMA is required, but\\x1b[2J there is none")
    assert words.endswith("-> a machine with one")


def test_nothing_is_cut_off_in_a_narrow_terminal() -> None:
    long = ok("memory", "word " * 40)
    assert printed([long], width=40).count("word") == 40


def test_the_object_is_json() -> None:
    made = json.loads(json.dumps(report_object([UNWELL])))
    assert made["findings"] == [{"check": "cma", "level": "warn", "found": "not there", "todo": "allow it"}]
    assert made["version"]
