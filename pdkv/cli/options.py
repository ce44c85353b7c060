"""Turns a configuration class into a command: one flag a field, its help from the field's own words.

Guarantees: a flag, a `PDKV_` variable and a key of the YAML file always mean the same field, since all three come from
the class; the command runs with a config that was validated, or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pdkv.config import ENV_PREFIX, ServiceConfig, resolve

C = TypeVar("C", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a serving process is run, beside what it serves."""

    json: bool
    exit_with: int | None
    """Id of the process that started this one, and whose end is this one's end too."""


TLS_CA = typer.Option(help="PEM file of the CA whose certificates are taken.", envvar=f"{ENV_PREFIX}TLS_CA")
TLS_CERTIFICATE = typer.Option(help="PEM file of your certificate.", envvar=f"{ENV_PREFIX}TLS_CERTIFICATE")
TLS_KEY = typer.Option(help="PEM file of its key.", envvar=f"{ENV_PREFIX}TLS_KEY")
INSECURE = typer.Option("--insecure", help="Plain text instead.", envvar=f"{ENV_PREFIX}INSECURE")
"""Of a client, as of a service."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def config_command(cls: type[C], run: Callable[[C, ServeOptions], None], *, doc: str) -> Callable[..., None]:
    """A typer command with the fields of `cls` as flags. Raises `ConfigError` when it runs, for what can't be used."""

    def command(**given: Any) -> None:
        path = given.pop("config")
        options = ServeOptions(json=given.pop("json"), exit_with=given.pop("exit_with"))
        run(resolve(cls, given, path), options)

    parameters = [_field_parameter(name, cls) for name in cls.model_fields]
    parameters += [
        _parameter("config", Path | None, None, "YAML file with these settings; a flag or variable wins over it."),
        _parameter("json", bool, False, "Say where the node serves as one JSON line on stdout, once it does."),
        _parameter("exit_with", int | None, None, "Process id of the parent: end when it ends, however it does."),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = doc
    return command


def _field_parameter(name: str, cls: type[ServiceConfig]) -> inspect.Parameter:
    """Text for every field but switches: the config class reads it, as it reads a variable, and names what is wrong."""
    info = cls.model_fields[name]
    plain = info.default_factory is None and not info.is_required() and info.default not in ("", None, ())
    default = f" Default: {_shown(info.default)}." if plain else ""
    words = f"{info.description or ''}{default} [{ENV_PREFIX}{name.upper()}]".strip()
    return _parameter(name, (bool if info.annotation is bool else str) | None, None, words)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parameter(name: str, kind: Any, default: object, words: str) -> inspect.Parameter:
    option = typer.Option(help=words, show_default=False)
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, option])
