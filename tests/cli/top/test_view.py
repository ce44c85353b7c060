"""What the view shows, at every width: whole columns, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from pdkv.cli.top.line import Line, line_of
from pdkv.cli.top.look import Seen
from pdkv.cli.top.view import COLUMNS, LEGEND, bar, rate, view
from tests.cli.top.test_line import LATER, NODE

LINE = line_of(Seen("d0:1", 14.0, replace(NODE, totals=LATER)), Seen("d0:1", 10.0, NODE))
SILENT = Line("p9:1", "prefill", why="PeerLost: nobody listens there")


def shown(width: int, *lines: Line) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(view(lines, console))
    return captured.get().rstrip("\n").split("\n")


def test_all_is_there_where_there_is_room() -> None:
    head, first, second, why, legend = shown(300, LINE, SILENT)
    assert [heading for heading, _, _ in COLUMNS if heading not in head] == []
    for word in ("prefill-0", "decode", "ready", "1k+50", "0+0", "80%", "1 suspect", "cma"):
        assert word in first, (word, first)
    assert second.split()[:4] == ["p9:1", "prefill", "no", "answer"]
    assert why == "p9:1: PeerLost: nobody listens there"
    assert legend == LEGEND


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160])
def test_where_it_is_narrow_columns_are_left_out_and_nothing_wraps(width: int) -> None:
    lines = shown(width, LINE, SILENT)
    head = lines[0]
    headings = [heading for heading, _, _ in COLUMNS if heading in head]
    assert headings[0] == "node"
    assert len(lines) >= 5
    assert "prefill-0" in lines[1]
    assert all(len(line) <= max(width, 40) for line in lines)
    wide = shown(width + 60, LINE, SILENT)[0]
    assert all(heading in wide for heading in headings)


def test_a_bar_shows_each_class_that_has_a_page() -> None:
    pages = {"total": 1000, "used": 500, "locked": 1, "evictable": 248, "quarantined": 1, "free": 250}
    made = bar(pages, 20).plain
    assert made == "##########=-----!..."
    assert len(made) == 20
    assert bar({"total": 10, "used": 10, "locked": 0, "evictable": 0, "quarantined": 0, "free": 0}, 8).plain == "#" * 8
    assert bar({}, 8).plain == ""


@pytest.mark.parametrize(
    ("per_s", "words"), [(None, "-"), (0.0, "0"), (999.0, "999"), (1500.0, "1.5k"), (2.5e9, "2.5G"), (3e13, "30T")]
)
def test_rates_are_short(per_s: float | None, words: str) -> None:
    assert rate(per_s) == words


def test_words_of_a_node_are_no_commands_to_the_terminal() -> None:
    said = replace(SILENT, name="\x1b[2Jp9", why="\x1b]0;gone\x07 [bold]", lanes=("[/tcp]",), peers={"[RED]": 1})
    made = "\n".join(shown(300, said))
    assert "\x1b" not in made
    assert "[/tcp]" in made
    assert "1 [red]" in made
    assert r"\x1b]0;gone\x07 [bold]" in made
