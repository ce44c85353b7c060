"""A dataclass as a command, and how its user says with whom to talk."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from pdkv.cli.client import ClientOptions, options_command
from pdkv.errors import ConfigError
from pdkv.rpc.security import MutualTls, PlainText


@dataclass(frozen=True, kw_only=True)
class Options(ClientOptions):
    word: Annotated[str, typer.Argument()]
    count: Annotated[int, typer.Option(help="How many.")] = 3


class Seen:
    def __init__(self) -> None:
        self.options: list[Options] = []
        self.app = typer.Typer()
        self.app.command()(options_command(Options, self.options.append, "Words."))

    def __call__(self, *args: str, **environ: str) -> Options:
        from typer.testing import CliRunner

        result = CliRunner().invoke(self.app, args, env={**environ})
        assert result.exit_code == 0, result.output
        return self.options.pop()


def test_a_field_is_an_option() -> None:
    command = options_command(Options, lambda options: None, "Words.")
    parameters = inspect.signature(command).parameters
    assert parameters["word"].default is inspect.Parameter.empty
    assert parameters["count"].default == 3
    assert command.__doc__ == "Words."
    seen = Seen()
    assert seen("a") == Options(word="a")
    assert seen("b", "--count", "7", "--insecure") == Options(word="b", count=7, insecure=True)


def test_variables_mean_what_they_mean_to_a_service() -> None:
    made = Seen()("a", PDKV_TLS_CA="ca", PDKV_TLS_CERTIFICATE="own", PDKV_TLS_KEY="key")
    assert made.security() == MutualTls(Path("ca"), Path("own"), Path("key"))
    assert Seen()("a", PDKV_INSECURE="true").security() == PlainText()


@pytest.mark.parametrize("given", [{}, {"insecure": True, "tls_ca": "a"}, {"tls_ca": "a"}])
def test_nothing_is_assumed(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options(word="a", **given).security()
