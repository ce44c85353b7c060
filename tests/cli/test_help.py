"""`--help` of each command: every option is there with what it takes, and nothing is cut off in 80 columns."""

from typing import Any

import pytest
import typer
from typer.core import TyperArgument

from pdkv.cli.app import app, run
from pdkv.cli.help import INDENT, WIDEST, Command

ROOT: Any = typer.main.get_command(app)
COMMANDS = sorted(ROOT.commands)


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        run([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_nothing_is_cut_off(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_of(capsys, *filter(None, [command]))
    assert max(map(len, lines)) <= min(columns, WIDEST)
    assert lines[0].startswith(f"Usage: pdkv {command}")
    shown = " ".join(" ".join(lines).split())
    assert "…" not in shown
    for param in (ROOT.commands[command] if command else ROOT).params:
        assert param.help.split("\n\n")[0][:20] in shown, param.name
        assert all(f" {name}" in shown for name in (*param.opts, *param.secondary_opts) if name.startswith("--"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_takes(command: str) -> None:
    for param in ROOT.commands[command].params:
        assert isinstance(param, TyperArgument) or param.is_flag or param.metavar, f"{command} {param.name}"


def test_the_root_names_each_command_and_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys)
    for name in COMMANDS:
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert len(line) > INDENT + 10
    assert not [line for line in lines if "*" in line]


def test_choices_bounds_and_defaults_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pack(
        kind: str = typer.Option("lru", metavar="lru|fifo", help="Words of a choice."),
        count: int = typer.Option(0, min=0, max=9000, help="Words of a number."),
        path: str | None = typer.Option(None, metavar="PATH", help="Words of a path.", envvar="PATH_OF"),
        quick: bool = typer.Option(False, "--quick/--slow", help="Words of a switch."),
    ) -> None:
        pass

    small = typer.Typer()
    small.command(cls=Command)(pack)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        small(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "--kind lru|fifo Words of a choice. Default: lru.",
        "--count N Words of a number. 0 to 9,000. Default: 0.",
        "--path PATH Words of a path. [PATH_OF]",
        "--quick, --slow Words of a switch.",
    ):
        assert words in shown
