"""`pdkv demo`: shows, and proves, the main job on this machine.

Guarantees: exit code 0 only if every check held; one JSON object on stdout with `--json`, everything else on stderr.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli import signals
from pdkv.errors import MissingDependency

if TYPE_CHECKING:
    from pdkv.cli.demo.report import Report, RequestRow

FAILED = 1
NEEDED = ("torch", "nixl", "transformers")


def demo(
    requests: Annotated[
        int, typer.Option(min=6, max=200, metavar="N", help="Requests that are compared with one process.")
    ] = 9,
    json_wanted: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Start a prefill and a decode process and prove that together they equal one.

    Prompts of 1,000 to 4,000 tokens cross from one process to the other over NIXL/UCX: cold, with a shared prefix, and
    four at a time. Then faults are put into the destination's memory, nodes that must not be paired are paired, the
    prefill process is killed, two more pairs decode speculatively, and two decode nodes that are too small let one
    request give way to another and ship a prefix again. Exit code 0 only if everything held; 1 otherwise.
    """
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "the demo", extra="reference")
    report = signals.run(_shown(requests, to_stderr=json_wanted))
    if json_wanted:
        print(json.dumps(report.as_dict()))
    if not report.ok:
        raise SystemExit(FAILED)


async def _shown(requests: int, *, to_stderr: bool) -> Report:
    """Run it with a live table on a terminal, or a line a step elsewhere."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner

    from pdkv.cli.demo.report import check_table, control_table, pressed_table, request_table, speculative_table
    from pdkv.cli.demo.run import Demo

    console = Console(stderr=to_stderr)
    rows: list[RequestRow] = []
    spinner = Spinner("dots", "starting")
    live = Live(console=console, get_renderable=lambda: Group(request_table(rows), spinner), transient=True)

    def say(text: str) -> None:
        spinner.update(text=text)
        if not console.is_terminal:
            console.print(text)

    run = Demo(requests, say, rows.append)
    if console.is_terminal:
        with live:
            report = await run.run()
    else:
        report = await run.run()
    console.print(request_table(report.requests), speculative_table(report), pressed_table(report))
    console.print(control_table(report), check_table(report))
    verdict = "[bold green]everything held[/]" if report.ok else "[bold red]not everything held[/]"
    console.print(f"{verdict}: {report.backend} over {report.lane}, {report.elapsed_s:.0f} s")
    return report
