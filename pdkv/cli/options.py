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

from pdkv.config import ENV_PREFIX, HttpConfig, NodeConfig, ServiceConfig
from pdkv.fields import Kind, field_kind, shown_bytes
from pdkv.resolve import resolve

C = TypeVar("C", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a serving process is run, beside what it serves."""

    json: bool
    exit_with: int | None
    """Id of the process that started this one, and whose end is this one's end too."""


OWN_PANEL = "This service"
PANELS: dict[str, type[ServiceConfig]] = {
    "Every service": ServiceConfig,
    "Every node with a pool": NodeConfig,
    "HTTP": HttpConfig,
}
RUN_PANEL = "This process"
SETTINGS_WORDS = f"""Each setting may also be a variable (`--node-id` is `{ENV_PREFIX}NODE_ID`) or a key of a YAML file
(`--config`; `node_id: p0`). A switch that is on may be turned off by its `--no-` form."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def config_command(cls: type[C], run: Callable[[C, ServeOptions], None], *, doc: str) -> Callable[..., None]:
    """A typer command with the fields of `cls` as flags. Raises `ConfigError` when it runs, for what can't be used."""

    def command(**given: Any) -> None:
        path = given.pop("config")
        options = ServeOptions(json=given.pop("json"), exit_with=given.pop("exit_with"))
        config = resolve(cls, given, path)
        require_servable(config)
        run(config, options)

    parameters = field_parameters(cls)
    yaml = _option("YAML file with these settings; a flag or variable wins over it.", "PATH", RUN_PANEL)
    says = _option("Say where it serves as one JSON line on stdout, once it does.", "", RUN_PANEL, "--json")
    ends = _option("End when this process ends, which started it.", "PID", RUN_PANEL)
    parameters += [
        _parameter("config", Path | None, None, yaml),
        _parameter("json", bool, False, says),
        _parameter("exit_with", int | None, None, ends),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = f"{inspect.cleandoc(doc)}\n\n{SETTINGS_WORDS}"
    return command


def require_servable(config: ServiceConfig) -> None:
    """What can be known before anything heavy is imported or built. Raises `ConfigError`, `LaneRefused`."""
    from pdkv.rpc.transport import require_free

    config.security()
    require_free(config.bind)
    if isinstance(config, HttpConfig) and config.http_bind:
        require_free(config.http_bind, "http_bind")
    if isinstance(config, NodeConfig) and config.require_rdma and config.backend == "nixl":
        from pdkv.cli.doctor.needs import needs_of
        from pdkv.cli.doctor.network import require_rdma
        from pdkv.machine.devices import devices

        require_rdma(needs_of(config), devices())


def field_parameters(*classes: type[ServiceConfig]) -> list[inspect.Parameter]:
    """A flag for each field of these classes, those of one class alone first. None: not given."""
    owners = {name: cls for cls in reversed(classes) for name in cls.model_fields}
    panels = [OWN_PANEL, *reversed(PANELS)]
    return [_field_parameter(name, owners[name]) for name in sorted(owners, key=lambda n: panels.index(_panel(n)))]


def _field_parameter(name: str, cls: type[ServiceConfig]) -> inspect.Parameter:
    """Text for every field but switches: the config class reads it, as it reads a variable, and names what is wrong."""
    info = cls.model_fields[name]
    kind = field_kind(info)
    words = [info.description or ""]
    words += [f"{kind.bounds[:1].upper()}{kind.bounds[1:]}."] if kind.bounds else []
    words += ["Required."] if info.is_required() else []
    words += [] if info.default_factory or info.is_required() else _default_words(info.default, kind)
    value = (bool if info.annotation is bool else str) | None
    return _parameter(name, value, None, _option(" ".join(words), kind.metavar, _panel(name)))


def _panel(name: str) -> str:
    """Of the class that brings the field in."""
    return next((title for title, owner in PANELS.items() if name in owner.model_fields), OWN_PANEL)


def _default_words(value: Any, kind: Kind) -> list[str]:
    """None where the field's own words say what an empty value or a switch that is off means."""
    if value is None or value is False or value in ("", ()):
        return []
    if kind.metavar == "SIZE":
        return [f"Default: {shown_bytes(value)}."]
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if kind.type is float else value
    return [f"Default: {'on' if value is True else shown}."]


def _option(words: str, metavar: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=words, show_default=False, metavar=metavar or None, rich_help_panel=panel)


def _parameter(name: str, kind: Any, default: object, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, option])
