"""`pdkv bench control`: what a request costs beside its bytes and its model.

Guarantees: two processes, gRPC and NIXL as in serving; exit code 0 once it was measured, whatever the figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.cli.signals import run

if TYPE_CHECKING:
    from rich.table import Table

    from pdkv.cli.bench.control_memory import Growth
    from pdkv.cli.bench.control_node import Role
    from pdkv.cli.bench.control_run import Case, Cost, Pair


def control(
    tokens: Annotated[int, typer.Option(min=64, max=1 << 22, metavar="N", help="Of each prompt.")] = 1 << 20,
    chunk_tokens: Annotated[
        int, typer.Option(min=64, metavar="N", help="Tokens that prefill computes before it announces pages.")
    ] = 32_768,
    in_flight: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Requests at once.")] = 1,
    repetitions: Annotated[int, typer.Option(min=1, metavar="N", help="Medians of so many.")] = 5,
    token_us: Annotated[
        float, typer.Option(min=0.0, metavar="US", help="Microseconds a token that the engine's steps take.")
    ] = 0.25,
    scattered: Annotated[bool, typer.Option("--scattered", help="No two free pages are neighbours.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure the **control path** between two node processes: all of a request but its model and its bytes.

    Pages are tiny and the engine only writes marks, so what is left is hashing, match, reservation, planning of reads,
    messages, posting, proof and account, commit and release. Shown are CPU time of each side by part, and how much of
    each part lies between the last chunk and admission. The engine's steps and the idle polling of both nodes are taken
    off, and shown.

    Example:

    `pdkv bench control --tokens 1048576 --repetitions 9`
    """
    from rich.console import Console

    from pdkv.cli.bench.control_run import Case

    case = Case(tokens, in_flight)
    costs = run(measured([case], chunk_tokens, token_us, repetitions, scattered=scattered))
    if json_wanted:
        print(json.dumps(as_dict(costs[0])))
    else:
        Console().print(*(table(cost) for cost in costs))


async def measured(
    cases: Sequence[Case], chunk_tokens: int, token_us: float, repetitions: int, *, scattered: bool = False
) -> list[Cost]:
    """The median of each case; cases take turns, on one pair of nodes, after each was run once.

    The pool holds the largest case and nothing beside it: from the second request on, pages are those of earlier
    requests, evicted.
    """
    from pdkv.cli.bench.control_run import middle, pair

    async with pair(_pages(cases), chunk_tokens, token_us, scattered=scattered) as nodes:
        for case in cases:
            await nodes.measure(case)
        found = [[await _beside_idle(nodes, case) for case in cases] for _ in range(repetitions)]
    return [middle(column) for column in zip(*found, strict=True)]


async def grown(cases: Sequence[Case], chunk_tokens: int, token_us: float) -> list[dict[Role, Growth]]:
    """What each case makes the memory of two nodes grow by, with room in the pool for the largest.

    Each has nodes of its own, which have touched their pools and served one page: memory once taken is used again.
    """
    from pdkv.cli.bench.control_node import PAGE_TOKENS
    from pdkv.cli.bench.control_run import Case, pair

    found = []
    for case in cases:
        async with pair(_pages(cases), chunk_tokens, token_us, memory=True) as nodes:
            await nodes.grown(Case(PAGE_TOKENS))
            found.append(await nodes.grown(case))
    return found


def _pages(cases: Iterable[Case]) -> int:
    """That the largest needs, with one for what comes after its prompt."""
    return max((case.pages + 1) * case.in_flight for case in cases)


async def _beside_idle(nodes: Pair, case: Case) -> Cost:
    """The nodes are idle for a while first, to know what that takes just now."""
    await nodes.settle()
    return await nodes.measure(case)


def table(cost: Cost) -> Table:
    """A row a part."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    case = cost.case
    title = f"{case.tokens:,} tokens, {case.pages:,} pages, {case.in_flight} in flight"
    shown = Table(title=title, box=SIMPLE_HEAD)
    shown.add_column("CPU ms of a request")
    for role in cost.sides:
        for heading in (role, "calls", "exposed"):
            shown.add_column(heading, justify="right")
    sides = list(cost.sides.values())
    for part in sides[0].parts:
        costs = [side.parts[part] for side in sides]
        shown.add_row(part, *(t for c in costs for t in (f"{c.cpu_ms:.2f}", f"{c.calls:.0f}", f"{c.exposed_ms:.2f}")))
    for name, figure in (("rest: event loop, gRPC, polling", "rest_ms"), ("together", "cpu_ms")):
        shown.add_row(name, *(t for side in sides for t in (f"{getattr(side, figure):.2f}", "", "")))
    for name, figure in (("taken off: engine", "engine_ms"), ("taken off: idle", "idle_ms")):
        shown.add_row(name, *(t for side in sides for t in (f"{getattr(side, figure):.2f}", "", "")), style="dim")
    shown.caption = (
        f"{cost.us_per_page:.2f} µs a page; exposed {cost.exposed_ms:.2f} ms,"
        f" {cost.after_sealing_ms:.2f} of them after the last pages were sealed"
    )
    return shown


def as_dict(cost: Cost) -> dict[str, Any]:
    """All of it, with the figures that follow."""
    found = asdict(cost) | {"pages": cost.case.pages, "cpu_ms": cost.cpu_ms, "us_per_page": cost.us_per_page}
    for role, side in cost.sides.items():
        found["sides"][role]["rest_ms"] = side.rest_ms
    return found
