"""`pdkv soak`: a fleet under faults, and whether anything was lost or wrong.

Guarantees: exit code 0 only if no answer was wrong, none hung, no page leaked, no recovery took too long and, where it
had time, recoveries were measured and every fault was injected everywhere (`report.py` says when); one JSON object on
stdout with `--json`, everything else on stderr; no process is left behind, also after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pdkv.cli import signals
from pdkv.errors import MissingDependency

if TYPE_CHECKING:
    from pdkv.cli.soak.report import SoakReport
    from pdkv.cli.soak.run import SoakSettings

FAILED = 1
NEEDED = ("torch", "nixl", "transformers")


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, metavar="MINUTES", help="How long requests are sent.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of prompts, faults and their order.")] = 0,
    clients: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Requests that run at once.")] = 4,
    pool_pages: Annotated[
        int, typer.Option(min=48, metavar="N", help="Pages of each node: few, so that they evict.")
    ] = 80,
    kill_every_s: Annotated[
        float, typer.Option(min=0.5, metavar="S", help="Mean seconds between two faults from outside.")
    ] = 5.0,
    json_wanted: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run two prefill nodes, two decode nodes and a router, break them, and check every answer.

    Prompts share prefixes and pools are small. Nodes are killed, stopped and restarted at stages of a request's life
    and at random times; each answer that ends is compared, token by token, with one process's; each that doesn't must
    have ended with a named error. Exit code 0: no answer was wrong, none hung, no page is held by anybody at the end,
    and each time that one of two prefill nodes died, somebody was answered again within 3 s: a recovery that another
    fault cuts off counts if it had lasted that long. After 40 kills at least one must have been measured, if faults
    leave time for it (3 s between them). A soak of 10 minutes or more, with a fault every 5 s or more often, must have
    hit each fault at each stage, call and read; another one says which it missed.

    Example:

    `pdkv soak --minutes 10 --seed 7 --json`
    """
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "the soak", extra="reference")
    from pdkv.cli.soak.run import SoakSettings

    settings = SoakSettings(60 * minutes, seed, clients, pool_pages, kill_every_s)
    report = signals.run(_shown(settings, to_stderr=json_wanted))
    if json_wanted:
        print(json.dumps(report.as_dict()))
    if not report.ok:
        raise SystemExit(FAILED)


async def _shown(settings: SoakSettings, *, to_stderr: bool) -> SoakReport:
    """One line of figures that moves on a terminal, and a line a fault elsewhere; the tables at the end."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    from pdkv.cli.soak.report import SoakReport, coverage_table, elsewhere_table, figures_table
    from pdkv.cli.soak.run import Soak

    console = Console(stderr=to_stderr)
    report = SoakReport(seed=settings.seed)
    spinner = Spinner("dots", "starting")

    def say(text: str) -> None:
        spinner.update(text=f"{report.line()}  {text}")
        if not console.is_terminal:
            console.print(f"{report.line()}  {text}", highlight=False)

    soak_ = Soak(settings, report, say)
    if console.is_terminal:
        with Live(spinner, console=console, transient=True):
            await soak_.run()
    else:
        await soak_.run()
    console.print(coverage_table(report), elsewhere_table(report), figures_table(report))
    if report.ok:
        answered = f"{report.finished} of {report.requests} answered, all right; each of the others ended by name"
        console.print(f"[bold green]nothing lost, nothing wrong[/]: {answered}", highlight=False)
    else:
        console.print(f"[bold red]not everything held[/]: {'; '.join(report.failings)}", highlight=False)
    return report
