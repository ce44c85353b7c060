"""Findings as a table or as one JSON object.

Guarantees: both hold all of them, in the order in which they were found; nothing is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdkv import __version__
from pdkv.cli.doctor.finding import Finding, Level

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def ready(findings: Sequence[Finding]) -> bool:
    """None of them is a failure."""
    return all(finding.level is not Level.FAIL for finding in findings)


def report_object(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"version": __version__, "ready": ready(findings), "findings": [asdict(finding) for finding in findings]}


def report_table(findings: Sequence[Finding]) -> RenderableType:
    """A row a finding; what to do stands below what was found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        # words of other machines: a terminal must not take them for commands
        words = "".join(c if c.isprintable() else repr(c)[1:-1] for c in finding.found)
        said = Text(words)
        if finding.todo:
            said.append(f"\n-> {finding.todo}", style="italic")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.check), said)
    return table


def summary(findings: Sequence[Finding]) -> str:
    count = Counter(finding.level for finding in findings)
    words = ", ".join(f"{count[level]} {level}" for level in Level)
    return f"{'ready' if ready(findings) else 'not ready'}: {words}"
