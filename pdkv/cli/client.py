"""Commands whose options are the fields of a class, and what those have in common that talk to a service.

Guarantees: a field is an option, its help, default and group stand beside it and nowhere else, and the command gets all
of them as one value; plain text is used only where it was asked for by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from pdkv.config import ENV_PREFIX
from pdkv.rpc.security import Security, security_of

CONNECTION_PANEL = "Connection"
O = TypeVar("O")  # noqa: E741


def options_command(cls: type[O], run: Callable[[O], None], doc: str) -> Callable[..., None]:
    """A typer command with the fields of the dataclass `cls` as options."""

    def command(**given: Any) -> None:
        run(cls(**given))

    hints = get_type_hints(cls, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(cls)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = doc
    return command


def _connection(words: str, variable: str, *names: str, metavar: str = "PATH") -> Any:
    return typer.Option(
        *names,
        help=words,
        metavar=metavar or None,
        envvar=f"{ENV_PREFIX}{variable}",
        rich_help_panel=CONNECTION_PANEL,
        show_default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How to talk to a service: as a service's own settings say it."""

    tls_ca: Annotated[str, _connection("PEM file of the CA whose certificates are taken.", "TLS_CA")] = ""
    tls_certificate: Annotated[str, _connection("PEM file of your certificate.", "TLS_CERTIFICATE")] = ""
    tls_key: Annotated[str, _connection("PEM file of its key.", "TLS_KEY")] = ""
    insecure: Annotated[
        bool, _connection("Plain text instead of mutual TLS.", "INSECURE", "--insecure", metavar="")
    ] = False

    def security(self) -> Security:
        """Raises `ConfigError` unless either key files or plain text were asked for."""
        return security_of(ca=self.tls_ca, certificate=self.tls_certificate, key=self.tls_key, insecure=self.insecure)
