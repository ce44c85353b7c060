"""`pdkv status`: what a node or router says of itself.

Guarantees: everything that is said is shown, also what this version has no name for; asking changes nothing. Exit code
0: it answered; 2: it didn't, or is none of ours; 130: interrupted.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.cli.client import ClientOptions, options_command
from pdkv.contract import Contract
from pdkv.errors import ConfigError, PdkvError, RemoteError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pdkv.node.messages import NodeStatus
    from pdkv.node.routing import RouterStatus
    from pdkv.rpc.client import GrpcDirectory

INTERRUPTED = 130
EXPLAINED = {
    "claims": "pages that requests which have started will need, and have; growing: of these requests, those that wait",
    "uses": "of the cached pages",
    "totals": "since the start; announced: also lent, to peers that may read it",
    "held_leases": "those that expire first; computing: its request still runs",
}
"""Words beside the name of a table that alone says too little."""
SHOWN_OF_CONTRACT = ("engine", "weights_id", "main_row_format", "speculation", "eagle_rule", "placement", "version")

HELP = """Show what a decode node, a prefill node or a router says of itself.

Pages by what they are used for, peers and the lanes to them, leases, quarantine and why, requests and the queue, and
the fingerprints of the contract: nodes whose fingerprints differ are never paired.

**Examples**

`pdkv status 127.0.0.1:7001 --insecure`

`pdkv status 127.0.0.1:7001 --insecure --watch 2`: again every 2 seconds, until Ctrl-C.

`pdkv status 127.0.0.1:7001 --insecure --json | jq .pages`
"""


@dataclass(frozen=True, kw_only=True)
class StatusOptions(ClientOptions):
    """The command line, one field an option."""

    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="host:port of a decode node, a prefill node or a router.")
    ]
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --watch one a line.")] = False
    watch: Annotated[float | None, typer.Option(metavar="SECONDS", help="Ask again every so often, until Ctrl-C.")] = (
        None
    )


def run_status(options: StatusOptions) -> None:
    if options.watch is not None and not 0 < options.watch < math.inf:
        raise ConfigError("watch", options.watch, "a number of seconds above 0")
    try:
        asyncio.run(_shown(options))
    except KeyboardInterrupt:
        print("pdkv: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


status = options_command(StatusOptions, run_status, HELP)


async def status_of(directory: GrpcDirectory, address: str) -> NodeStatus | RouterStatus:
    """Of whichever of our services is there. Raises `ConfigError` if none is, and what a call raises."""
    for ask in (directory.decode(address).status, directory.peer(address).status, directory.router(address).status):
        try:
            return await ask()
        except RemoteError as error:
            if error.fields.get("code") != "UNIMPLEMENTED":
                raise
    raise ConfigError("address", address, "a decode node, a prefill node or a router; ask a group's leader for a group")


async def _shown(options: StatusOptions) -> None:
    from rich.console import Console

    from pdkv.rpc.client import GrpcDirectory

    console = Console(highlight=False, soft_wrap=True)
    directory = GrpcDirectory(options.security())
    try:
        while True:
            try:
                _show(await status_of(directory, options.address), options, console)
            except PdkvError as error:
                if options.watch is None or isinstance(error, ConfigError):
                    raise
                # it may come back
                print(f"pdkv: {error.kind}: {error}", file=sys.stderr)
            if options.watch is None:
                return
            await asyncio.sleep(options.watch)
    finally:
        await directory.close()


def _show(found: NodeStatus | RouterStatus, options: StatusOptions, console: Console) -> None:
    if options.json:
        print(json.dumps(status_object(found)), flush=True)
        return
    if options.watch is not None and console.is_terminal:
        console.clear()
    parts = list(status_text(found, options.address))
    # names are never cut off: a narrow terminal wraps lines instead
    wide = console.options.update(width=1000)
    console.width = max(console.width, *(console.measure(part, options=wide).maximum for part in parts))
    for part in parts:
        console.print(part, markup=False)


def status_object(found: NodeStatus | RouterStatus) -> dict[str, Any]:
    """The JSON object: every field of the status; of a contract its own form and both fingerprints."""
    return {field.name: _plain(getattr(found, field.name)) for field in fields(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, Contract):
        prints = {"fingerprint": value.fingerprint.hex(), "content_fingerprint": value.content_fingerprint.hex()}
        return prints | value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return str(value) if type(value).__str__ is not object.__str__ else asdict(value)
    return value


def status_text(found: NodeStatus | RouterStatus, address: str) -> Iterator[RenderableType]:
    """Numbers and words first, then a table for each map, in the order in which the status has them."""
    name, role = getattr(found, "name", ""), getattr(found, "role", "router")
    yield f"{role} {name} at {address}".replace("  ", " ")
    maps: dict[str, Mapping[str, Any]] = {}
    words: list[tuple[str, object]] = []
    contract: list[tuple[str, object]] = []
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Contract):
            contract += _contract_words(value)
        elif isinstance(value, Mapping):
            maps[field.name] = dict(sorted(value.items()))
        elif field.name not in ("name", "role") and value != "" and value is not False:
            words.append((field.name, value))
    yield _columns("", {word: (value,) for word, value in words + contract}, ())
    for title, entries in maps.items():
        if entries:
            yield ""
            if title in EXPLAINED:
                yield f"{_words(title)}: {EXPLAINED[title]}"
            yield _map_table("" if title in EXPLAINED else title, entries)


def _contract_words(contract: Contract) -> Iterator[tuple[str, object]]:
    yield "content fingerprint", contract.content_fingerprint.hex()
    yield "contract fingerprint", contract.fingerprint.hex()
    yield from ((name, getattr(contract, name)) for name in SHOWN_OF_CONTRACT if getattr(contract, name))


def _map_table(title: str, entries: Mapping[str, Any]) -> RenderableType:
    """A row an entry; the fields of a value that has some are columns."""
    first = next(iter(entries.values()))
    if is_dataclass(first) and not isinstance(first, type):
        names = tuple(field.name for field in fields(first))
        return _columns(title, {key: tuple(getattr(value, n) for n in names) for key, value in entries.items()}, names)
    return _columns(title, {key: (value,) for key, value in entries.items()}, ())


def _columns(title: str, rows: Mapping[str, tuple[object, ...]], names: tuple[str, ...]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=_words(title) or None,
        title_justify="left",
        box=SIMPLE_HEAD if names else None,
        show_header=bool(names),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for i in range(max(len(values) for values in rows.values())):
        numeric = all(isinstance(values[i], int | float) for values in rows.values())
        table.add_column(_words(names[i]) if names else "", justify="right" if numeric else "left", no_wrap=True)
    for key, values in rows.items():
        table.add_row(*(Text(cell) for cell in (shown_value(key if names else _words(key)), *map(shown_value, values))))
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def shown_value(value: object) -> str:
    """As a person reads it, and no terminal takes it for a command."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    # words that come from peers: a terminal must not take them for commands
    words = f"{value:.4g}" if isinstance(value, float) else str(value)
    return words if words.isprintable() else words.encode("unicode_escape").decode()
