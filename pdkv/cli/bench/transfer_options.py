"""Options of `pdkv bench transfer`, and what they ask for.

Guarantees: a list that can't be read is refused with its value and what it takes, before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pdkv.cli.bench.cases import FULL, QUICK, Mode, Sweep
from pdkv.cli.client import ClientOptions
from pdkv.errors import ConfigError
from pdkv.fields import parse_bytes
from pdkv.geometry.page_layout import PlacementKind
from pdkv.rpc.security import MutualTls, PlainText, Security

ROLES = ("both", "source", "sink")
PLACEMENTS: Mapping[str, PlacementKind] = {"page_major": "page_major", "layer_major": "layer_major"}
ORDERS = {"scattered": True, "contiguous": False}
SWITCH = {"on": True, "off": False}
BASELINES = ("nixl_pages", "process_vm_readv", "memcpy", "grpc_stream", "socket", "ucx", "mooncake")
MEMORY_SHARE = 8
"""Pools of source and sink, and as large ones of raw source and raw sink, leave half of what is free."""
MAX_PAGES = 1 << 20
WHAT, WHERE, SAID = "What is measured", "Where", "How it is told"
T = TypeVar("T")


def _given(words: str, metavar: str, panel: str = WHAT) -> Any:
    return typer.Option(help=words, metavar=metavar, rich_help_panel=panel, show_default=False)


def _number(words: str, least: float, metavar: str = "N") -> Any:
    return typer.Option(help=words, min=least, metavar=metavar, rich_help_panel=WHAT, show_default=False)


def _switch(words: str, *names: str, panel: str = WHAT) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel, show_default=False)


@dataclass(frozen=True, kw_only=True)
class TransferOptions(ClientOptions):
    model: Annotated[str, _given("Whose pages: a preset or a path of a config.json. Default: glm-5.3.", "MODEL")] = (
        "glm-5.3"
    )
    full: Annotated[bool, _switch("Many more cases, for minutes. Default: --quick.", "--full/--quick")] = False
    pages: Annotated[str | None, _given("Full pages of a prompt.", "N,...")] = None
    mode: Annotated[
        str | None,
        _given(
            "warm: the source has the prompt in its cache; cold: the same over a new connection into untouched memory;"
            " streaming: it is sealed and announced chunk by chunk.",
            "MODE,...",
        ),
    ] = None
    order: Annotated[str | None, _given("Of page ids, on both sides: scattered, contiguous.", "ORDER,...")] = None
    placement: Annotated[
        str | None, _given("page_major, layer_major, of both sides; or SOURCE:SINK.", "PLACEMENT,...")
    ] = None
    digests: Annotated[
        str | None, _given("on, off. Bytes are compared either way, outside of what is timed.", "on|off,...")
    ] = None
    chunk_pages: Annotated[str | None, _given("Pages that are announced together when streaming.", "N,...")] = None
    read_pages: Annotated[
        str | None, _given("Most pages of one READ, a quarter of those in flight; 0: as a node.", "N,...")
    ] = None
    peers: Annotated[str | None, _given("Sources that each sink pulls from at once.", "N,...")] = None
    sinks: Annotated[str | None, _given("Sinks that pull at once, the same prompts.", "N,...")] = None
    hit: Annotated[str | None, _given("Part of the pages that the sink has already, 0 to 1.", "X,...")] = None
    product: Annotated[bool, _switch("Measure all values with all others.", "--product")] = False
    repetitions: Annotated[int | None, _number("Of each case. Default: 3; 7 with --full.", 1)] = None
    baselines: Annotated[
        str, _given(f"Also measured in turns: all, or some of {', '.join(BASELINES)}.", "NAME,...")
    ] = ""
    damage: Annotated[int, _number("Change a bit of so many pulled pages, to show that it is found.", 0)] = 0
    link_gbit: Annotated[float, _number("Rate of the link, Gbit/s. Default: what the system says.", 0, "X")] = 0.0
    role: Annotated[
        str, _given("both: sources and sinks here; or one of them. Default: both.", "both|source|sink", WHERE)
    ] = "both"
    bind: Annotated[
        str, _given("Where a source listens; port 0 takes a free one. Default: 127.0.0.1:0.", "HOST:PORT", WHERE)
    ] = "127.0.0.1:0"
    advertise: Annotated[str, _given("How sinks reach it, if not by what it binds.", "HOST[:PORT]", WHERE)] = ""
    connect: Annotated[str, _given("Sources that a sink pulls from.", "HOST:PORT,...", WHERE)] = ""
    raw_bind: Annotated[
        str,
        _given("Of a source: a raw one listens there, for the ceiling; on a trusted network only.", "HOST:PORT", WHERE),
    ] = ""
    raw_source: Annotated[
        str, _given("Of a sink: its source's raw one; without it there is no ceiling.", "HOST:PORT", WHERE)
    ] = ""
    node_id: Annotated[
        str, _given("Name of this side, in its certificate if it has one. Default: source, sink.", "NAME", WHERE)
    ] = ""
    memory: Annotated[str, _given("Most memory of a pool. Default: an eighth of what is free.", "SIZE", WHERE)] = ""
    ucx_tls: Annotated[str, _given("UCX transports to allow, as in UCX_TLS.", "TEXT", WHERE)] = ""
    net_devices: Annotated[str, _given("Network devices to use, as in UCX_NET_DEVICES.", "TEXT", WHERE)] = ""
    json_: Annotated[bool, _switch("One JSON object on stdout.", "--json", panel=SAID)] = False
    csv: Annotated[str, _given("Write the rows there.", "PATH", SAID)] = ""
    plot: Annotated[str, _given("Draw them there: .png, .svg or .pdf.", "PATH", SAID)] = ""

    def check(self) -> None:
        """Raises `ConfigError` for options that don't go together."""
        if self.role not in ROLES:
            raise ConfigError("role", self.role, ", ".join(ROLES))
        if (self.role == "sink") != bool(self.connect):
            raise ConfigError("connect", self.connect, "addresses of sources for --role sink, and only there")
        if self.raw_source and self.role != "sink":
            raise ConfigError("raw_source", self.raw_source, "only with --role sink")
        if self.raw_bind and self.role != "source":
            raise ConfigError("raw_bind", self.raw_bind, "only with --role source")
        if self.csv and not Path(self.csv).parent.is_dir():
            raise ConfigError("csv", self.csv, "a file in a folder that exists")

    def secured(self) -> Security:
        """As a node of this name. Raises `ConfigError`."""
        if self.role != "both":
            found = self.security()
            return replace(found, node=self.name) if isinstance(found, MutualTls) else found
        if self.tls_ca or self.tls_certificate or self.tls_key:
            raise ConfigError("role", self.role, "source or sink with key files: on one host it is all plain text")
        return PlainText()

    @property
    def name(self) -> str:
        return self.node_id or ("source" if self.role == "source" else "sink")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.connect.split(",") if part.strip())

    def memory_bytes(self) -> int:
        return parse_bytes(self.memory, "memory") if self.memory else _free_bytes() // MEMORY_SHARE

    def sweep(self) -> Sweep:
        """The preset, with what was given in place of its values. Raises `ConfigError`."""
        preset = FULL if self.full else QUICK
        if self.role == "sink":
            preset = replace(preset, sources=tuple(n for n in preset.sources if n <= len(self.addresses)))
        counts = {"pages": MAX_PAGES, "chunk_pages": 1 << 14, "sinks": 16}
        sources = len(self.addresses) if self.role == "sink" else 16
        given: dict[str, Any] = {
            **{name: self._values(name, _whole(1, most)) for name, most in counts.items()},
            "read_pages": self._values("read_pages", _whole(0, 1 << 14)),
            "sources": self._values("peers", _whole(1, sources)),
            "mode": self._values("mode", _one_of({mode.value: mode for mode in Mode})),
            "scattered": self._values("order", _one_of(ORDERS)),
            "placement": self._values("placement", _placements),
            "digests": self._values("digests", _one_of(SWITCH)),
            "hit": self._values("hit", _share),
        }
        return replace(preset, **{name: values for name, values in given.items() if values})

    def kinds(self) -> tuple[str, ...]:
        """Names of baselines. Raises `ConfigError`."""
        if self.baselines == "all":
            return BASELINES
        return self._values("baselines", _one_of({name: name for name in BASELINES}))

    def times(self) -> int:
        return self.repetitions or (7 if self.full else 3)

    def picture(self) -> Path | None:
        return Path(self.plot) if self.plot else None

    def _values(self, name: str, read: Callable[[str], T]) -> tuple[T, ...]:
        """Each once; none if the option was not given."""
        text = getattr(self, name) or ""
        try:
            return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))
        except _Refused as refused:
            raise ConfigError(name, text, f"{refused}, with commas between them") from refused


class _Refused(ValueError):
    """Of one entry: what it may be."""


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise _Refused(f"whole numbers from {least} to {most}")
        return int(text)

    return read


def _one_of(names: Mapping[str, T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        if text not in names:
            raise _Refused(f"any of {', '.join(names)}")
        return names[text]

    return read


def _placements(text: str) -> tuple[PlacementKind, PlacementKind]:
    source, _, sink = text.partition(":")
    read = _one_of(PLACEMENTS)
    return read(source), read(sink or source)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise _Refused("numbers from 0 to 1")
    return share


def _free_bytes() -> int:
    """Memory that the system could give now; half a GB an eighth where it doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else 4 << 30
