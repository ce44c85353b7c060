"""`--help` of every command.

Guarantees: each option says what it takes (a metavar, or its choices), its bounds and its default; nothing is cut off,
and no line is longer than the terminal is wide, from 80 columns on.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
"""Columns that are used of a wide terminal: longer lines are hard to read."""
INDENT = 26
"""Where an option's words begin."""
_METAVARS = {"int": "N", "float": "X", "str": "TEXT"}
_HIDDEN = {"help", "version"}
"""Options whose panel says nothing: they stand at the end."""


class Command(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = _console()
        _head(console, ctx, self.help)
        _options(console, ctx, self)


class Group(TyperGroup):
    """The root, with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = _console()
        _head(console, ctx, self.help)
        console.print("[bold]Commands[/]")
        for name, command in self.commands.items():
            # the first paragraph, without its markup
            first = inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("*", "").replace("`", "")
            _entry(console, name, first)
        console.print()
        _options(console, ctx, self)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDEST)
    return console


def _head(console: Console, ctx: Any, words: str | None) -> None:
    from rich.markdown import Markdown
    from rich.padding import Padding

    usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])
    console.print(f"[bold]Usage:[/] {usage}".replace("[OPTIONS]", r"\[OPTIONS]"))
    console.print()
    console.print(Padding(Markdown(inspect.cleandoc(words or "")), (0, 2)))
    console.print()


def _options(console: Console, ctx: Any, command: TyperCommand | TyperGroup) -> None:
    panels: defaultdict[str, list[Any]] = defaultdict(list)
    last: list[Any] = []
    for param in command.get_params(ctx):
        if param.name in _HIDDEN:
            last.append(param)
        elif not getattr(param, "hidden", False):
            what = "Arguments" if isinstance(param, TyperArgument) else "Options"
            panels[getattr(param, "rich_help_panel", None) or what].append(param)
    for title, params in panels.items():
        console.print(f"[bold]{title}[/]")
        for param in params:
            _entry(console, _spec(param), " ".join(_words(param)))
        console.print()
    for param in last:
        _entry(console, _spec(param), " ".join(_words(param)))


def _spec(param: TyperOption | TyperArgument) -> str:
    if isinstance(param, TyperArgument):
        return param.metavar or param.name.upper()
    names = ", ".join((*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {param.metavar or _metavar(param)}"


def _metavar(param: TyperOption) -> str:
    kind = param.type_descriptor.annotation
    return _METAVARS.get(getattr(kind, "__name__", ""), "TEXT")


def _words(param: TyperOption | TyperArgument) -> Iterator[str]:
    yield param.help or ""
    if param.min is not None and param.max is not None:
        yield f"{param.min:,} to {param.max:,}."
    elif param.min is not None:
        yield f"At least {param.min:,}."
    if param.required:
        yield "Required."
    elif param.show_default and not (param.default is None or param.default is False or param.default == ""):
        yield f"Default: {param.default}."
    if getattr(param, "envvar", None):
        yield f"[{param.envvar}]"


def _entry(console: Console, spec: str, words: str) -> None:
    from rich.text import Text

    lines = textwrap.wrap(words.replace("`", ""), console.width - INDENT, break_on_hyphens=False)
    beside = len(spec) + 4 <= INDENT
    specs = textwrap.wrap(spec, console.width - 2, break_long_words=False, break_on_hyphens=False)
    first = Text("  ").append(specs[0], style="bold cyan")
    if beside and lines:
        first.append(" " * (INDENT - len(first))).append(lines.pop(0))
    console.print(first)
    for more in specs[1:]:
        console.print(Text("    ").append(more, style="bold cyan"))
    for line in lines:
        console.print(Text(" " * INDENT + line))
