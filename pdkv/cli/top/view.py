"""The fleet's view: a table that is as wide as it may be, and not wider.

Guarantees: what a column says is whole or not there: where it is narrow, the least important columns go first. Why a
node doesn't serve stands below the table, in a line as long as there is room for. Words of nodes are no commands to the
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdkv.cli.status import shown_value
from pdkv.cli.top.line import DRAINING, READY, Line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

BAR = {"used": ("#", "cyan"), "locked": ("=", "blue"), "evictable": ("-", "green"), "quarantined": ("!", "red")}
"""Class of pages to its mark and colour; free is a dot."""
BAR_CELLS = 20
LEGEND = "pool: # in use, = cached and locked, - cached and evictable, ! quarantined, . free"
NONE = "-"


def bar(pages: dict[str, int], cells: int = BAR_CELLS) -> Text:
    """What a pool's pages are used for. A class that has a page has a cell, if there is one left."""
    from rich.text import Text

    made, total, said = Text(), pages.get("total", 0), 0
    for name, (mark, style) in BAR.items():
        count = pages.get(name, 0)
        share = min(max(round(count / total * cells), 1), cells - said) if total and count else 0
        made.append(mark * share, style=style)
        said += share
    return made.append("." * (cells - said) if total else "", style="dim")


def rate(per_s: float | None) -> str:
    """Bytes or others a second, by 1000s."""
    if per_s is None:
        return NONE
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:.3g}"


def _both(line: Line, way: str) -> str:
    """Of main and index-K."""
    main, index = (line.rates.get(f"{way}_{cache}_bytes_per_s") for cache in ("main", "index"))
    return NONE if main is None else f"{rate(main)}+{rate(index)}"


def _errors(line: Line) -> str:
    wrong = {"refused": line.totals.get("refusals", 0), "digests": line.totals.get("digest_failures", 0)}
    wrong["failed"] = line.totals.get("failed_requests", 0)
    return " ".join(f"{count} {name}" for name, count in wrong.items() if count) or NONE


def _peers(line: Line) -> str:
    return " ".join(f"{count} {state.lower()}" for state, count in sorted(line.peers.items()) if count) or NONE


def _state(line: Line) -> Text:
    from rich.text import Text

    return Text(line.state, style={READY: "green", DRAINING: "yellow"}.get(line.state, "bold red"))


def _name(line: Line) -> Text:
    from rich.text import Text

    return Text(shown_value(line.name.partition("#")[0] or line.address))


COLUMNS: tuple[tuple[str, int, Callable[[Line], str | Text]], ...] = (
    ("node", 0, _name),
    ("role", 3, lambda line: line.role or NONE),
    ("state", 0, _state),
    ("pool", 2, lambda line: bar(line.pages)),
    ("free", 1, lambda line: f"{line.pages['free']:,}" if line.pages else NONE),
    ("pages", 8, lambda line: f"{line.pages['total']:,}" if line.pages else NONE),
    ("run", 1, lambda line: f"{line.requests - line.queued}"),
    ("wait", 1, lambda line: f"{line.queued}"),
    ("hits", 4, lambda line: NONE if line.hit_share is None else f"{line.hit_share:.0%}"),
    ("in B/s", 2, lambda line: _both(line, "in")),
    ("out B/s", 5, lambda line: _both(line, "out")),
    ("leases", 6, lambda line: f"{line.leases}" if line.pages else NONE),
    ("peers", 6, _peers),
    ("lane", 7, lambda line: shown_value(",".join(line.lanes)) or NONE),
    ("errors", 3, _errors),
)
"""Heading, how soon it is left out (0: never; the highest first), and what stands there."""
LEFT = ("node", "role", "state", "pool", "peers", "lane", "errors")


def table(lines: Sequence[Line], columns: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown = [column for column in COLUMNS if column[0] in columns]
    for heading, _, _ in shown:
        made.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    for line in lines:
        cells = (cell(line) for _, _, cell in shown)  # words of nodes: nothing in brackets is a style
        made.add_row(*(Text(said) if isinstance(said, str) else said for said in cells))
    return made


def fitting(lines: Sequence[Line], console: Console) -> Table:
    """With as many columns as there is room for."""
    columns = [heading for heading, _, _ in COLUMNS]
    rest = sorted((order, i) for i, (_, order, _) in enumerate(COLUMNS) if order)
    wide = console.options.update(width=1000)
    made = table(lines, columns)
    while rest and console.measure(made, options=wide).maximum > console.width:
        columns.remove(COLUMNS[rest.pop()[1]][0])
        made = table(lines, columns)
    return made


def view(lines: Sequence[Line], console: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    below = [(f"{_name(line)}: {shown_value(line.why)}", "red") for line in lines if line.why]
    whole = [Text(words, style, overflow="ellipsis", no_wrap=True) for words, style in (*below, (LEGEND, "dim"))]
    return Group(fitting(lines, console), *whole)
