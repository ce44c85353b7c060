"""`pdkv doctor`: is this machine, and are its peers, fit for the node that is to run here?

Guarantees: takes the settings that the node takes, from the same places; nothing is changed, and no peer learns of it;
each finding says what was found and, unless all is well, what to do. Exit code 0: nothing failed; 1: something did; 2:
bad input.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pdkv.cli.console import table_console
from pdkv.cli.options import field_parameters
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig, RankConfig
from pdkv.discovery.words import place_of
from pdkv.errors import ConfigError
from pdkv.resolve import resolve

NOT_READY = 1
"""Exit code when a finding is a failure."""
ROLES: dict[str, type[NodeConfig]] = {"decode": DecodeConfig, "prefill": PrefillConfig, "rank": RankConfig}
PANEL = "The examination"

HELP = """Look for what would keep a node from serving well: before it starts, or beside it.

Checks memory, huge pages, NUMA, memlock and capabilities, RDMA devices, UCX and its settings, a GPU and its NIC; then
each peer's contract, and the lane to it with a measured rate. A finding is ok, warn or fail, and says what to do.
Exit code 1: something failed.

The settings are the node's own: replace `pdkv decode` by `pdkv doctor decode`.

**Examples**

`pdkv doctor --alone`: this machine, for a decode node with the default settings.

`pdkv doctor prefill --config /etc/pdkv/prefill.yaml --json`: as an init container or a readiness gate.

`pdkv doctor decode --require-rdma --connect p0:7000,p1:7000 --insecure`: which lane reads from two prefill nodes take.
"""


def run_doctor(role: str, config: NodeConfig, connect: tuple[str, ...], *, as_json: bool) -> bool:
    """Examine and report. True if nothing failed."""
    from pdkv.cli.doctor.examine import peers, this_machine
    from pdkv.cli.doctor.report import ready, report_object, report_table, summary

    findings = this_machine(config)
    if connect:
        findings += asyncio.run(peers(config, connect))
    if as_json:
        print(json.dumps({"role": role, **report_object(findings)}))
    else:
        console = table_console()
        console.print(report_table(findings))
        console.print(summary(findings))
    return ready(findings)


def doctor(**given: Any) -> None:
    role, path, named = given.pop("role"), given.pop("config"), given.pop("connect")
    alone, as_json = given.pop("alone"), given.pop("json")
    if role not in ROLES:
        raise ConfigError("role", role, ", ".join(ROLES))
    config = resolve(ROLES[role], given, path)
    if named is not None and alone:
        raise ConfigError("connect", named, "nothing together with alone")
    own = config.prefill_addresses if isinstance(config, DecodeConfig) else ()
    listed = () if named is None else tuple(address.strip() for address in named.split(","))
    for word in listed:
        try:
            place_of(word)
        except ValueError as error:
            raise ConfigError("connect", word, error) from error
    connect = () if alone else tuple(dict.fromkeys((*listed, *own)))
    if not run_doctor(role, config, connect, as_json=as_json):
        raise typer.Exit(NOT_READY)


def _option(words: str, *names: str, metavar: str = "") -> Any:
    return typer.Option(*names, help=words, show_default=False, metavar=metavar or None, rich_help_panel=PANEL)


_CONNECT = "Addresses of nodes to examine, with commas; a decode node's own prefill_addresses beside them."
_OWN = {
    "connect": (str | None, None, _option(_CONNECT, metavar="HOST:PORT,...")),
    "alone": (bool, False, _option("Examine this machine only.", "--alone")),
    "config": (Path | None, None, _option("YAML file with the node's settings.", metavar="PATH")),
    "json": (bool, False, _option("Print one JSON object.", "--json")),
}
_ROLE = typer.Argument(metavar="ROLE", help=f"What the node is to be: {', '.join(ROLES)}.", show_default=True)
_PARAMETERS = [
    inspect.Parameter("role", inspect.Parameter.KEYWORD_ONLY, default="decode", annotation=Annotated[str, _ROLE]),
    *(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        for name, (kind, default, option) in _OWN.items()
    ),
    *field_parameters(*ROLES.values()),
]
doctor.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
doctor.__annotations__ = {p.name: p.annotation for p in _PARAMETERS}
doctor.__doc__ = HELP
