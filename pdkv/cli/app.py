"""Puts the commands together.

Guarantees: importing a command's module is cheap (torch, nixl, grpc and transformers come in only when it runs); every
`PdkvError` becomes one line on stderr and exit code 2, anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pdkv import __version__
from pdkv.cli.admin import compact, drain
from pdkv.cli.bench.control import control
from pdkv.cli.bench.transfer import transfer
from pdkv.cli.demo import demo
from pdkv.cli.doctor import doctor
from pdkv.cli.generate import generate
from pdkv.cli.health import health
from pdkv.cli.help import Command, Group
from pdkv.cli.nodes import decode, prefill, router
from pdkv.cli.plan import plan
from pdkv.cli.rank import rank
from pdkv.cli.replay import replay
from pdkv.cli.soak import soak
from pdkv.cli.status import status
from pdkv.cli.top import top
from pdkv.errors import PdkvError

BAD_INPUT = 2
"""Exit code for a named error; typer uses the same for a wrong option."""

app = typer.Typer(
    name="pdkv",
    cls=Group,
    help="Moves the KV of a prompt from a prefill to a decode node, and proves that what arrived is what was meant.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: Annotated[bool, typer.Option()]) -> None:
    if wanted:
        typer.echo(f"pdkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("demo", cls=Command)(demo)
app.command("plan", cls=Command)(plan)
app.command("prefill", cls=Command)(prefill)
app.command("decode", cls=Command)(decode)
app.command("rank", cls=Command)(rank)
app.command("router", cls=Command)(router)
app.command("generate", cls=Command)(generate)
app.command("status", cls=Command)(status)
app.command("top", cls=Command)(top)
app.command("doctor", cls=Command)(doctor)
app.command("health", cls=Command)(health)
app.command("drain", cls=Command)(drain)
app.command("compact", cls=Command)(compact)
app.command("replay", cls=Command)(replay)
app.command("soak", cls=Command)(soak)
bench = typer.Typer(
    name="bench",
    cls=Group,
    help="Measure what moves pages, between two processes or two hosts.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
bench.command("transfer", cls=Command)(transfer)
bench.command("control", cls=Command)(control)
app.add_typer(bench)


def run(args: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv` unless given) and leave by `SystemExit`."""
    try:
        app(args, prog_name="pdkv")
    except PdkvError as error:
        # a cause (YAML's, say) may be worded over several lines
        print(f"pdkv: {error.kind}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from error
