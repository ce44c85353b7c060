"""The kinds of values that settings hold, and what each takes, in words.

Guarantees: a value that is refused is answered with what its field takes, whole and in the same words whatever was
wrong with it; `--help` says the same, because both come from here. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from pdkv.discovery.words import ALLOWED, place_of
from pdkv.errors import ConfigError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = {"": 1, **_DECIMAL, **_BINARY}
_SIZE_WORDS = "a count of bytes such as 4096, 64MiB or 55GB"


def parse_bytes(text: str | int, field: str = "bytes") -> int:
    """A count of bytes from 4096, "4096", "64 MiB" (1024^2) or "55GB" (1000^3). Raises `ConfigError` naming `field`."""
    match = re.fullmatch(r"([0-9]+)(\.[0-9]+)?\s*([A-Za-z]*)", str(text).strip())
    unit = _UNITS.get(match[3].upper()) if match else None
    if not match or unit is None or (match[2] and unit == 1):
        raise ConfigError(field, text, _SIZE_WORDS)
    digits = (match[2] or ".")[1:]
    # integers throughout: a float loses bytes from 2^53 on
    return int(match[1] + digits) * unit // int(10 ** len(digits))


def shown_bytes(count: int) -> str:
    """As `parse_bytes` reads it: 64MiB where it is a whole number of the largest such unit, else the plain count."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return next((f"{count // size}{unit}" for unit, size in units.items() if count and count % size == 0), str(count))


@dataclass(frozen=True, slots=True)
class Takes:
    """In a field's annotation: how its value stands in a command line, and what it may be."""

    metavar: str
    words: str


def host_of(address: str) -> str:
    """Of host:port, or of a host alone."""
    host, colon, port = address.rpartition(":")
    return host if colon and port.isdigit() else address


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.fields["allowed"]) from error


def _listed(value: object) -> object:
    """A flag or variable writes a list as one string with commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _matching(pattern: str) -> BeforeValidator:
    def check(value: object) -> object:
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            raise ValueError(pattern)
        return value

    return BeforeValidator(check)


def _address(value: object) -> object:
    if isinstance(value, str):
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError("host:port")
    return value


def _place(value: object) -> object:
    return value if isinstance(value, str) and place_of(value) else _address(value)


def _ip_address(value: object) -> object:
    if isinstance(value, str) and value:
        _address(value)
        ipaddress.ip_address(host_of(value).strip("[]"))
    return value


Listed = BeforeValidator(_listed)
Bytes = Annotated[int, BeforeValidator(_size), Field(gt=0), Takes("SIZE", _SIZE_WORDS)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Takes("SECONDS", "a finite number of seconds")]
Count = Annotated[int, Field(ge=0)]
Address = Annotated[str, BeforeValidator(_address), Takes("HOST:PORT", "host:port")]
Bind = Annotated[str, _matching(r"|.+:[0-9]{1,5}"), Takes("HOST:PORT", "host:port")]
Addresses = Annotated[tuple[Address, ...], Listed]
NodePlace = Annotated[str, BeforeValidator(_place), Takes("HOST:PORT", ALLOWED)]
NodePlaces = Annotated[tuple[NodePlace, ...], Listed]
"""Addresses, and places where some are found; see `discovery.words`."""
DnsServer = Annotated[str, BeforeValidator(_ip_address), Takes("IP:PORT", "IP address:port, such as 10.96.0.10:53")]
ZmqEndpoint = Annotated[
    str,
    _matching(r"|(tcp|ipc)://.+"),
    Takes("ENDPOINT", "a ZMQ endpoint: tcp://HOST:PORT, tcp://*:PORT or ipc://PATH"),
]
NodeName = Annotated[
    str,
    _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"),
    Takes(
        "NAME", "1 to 63 of the letters A to Z and a to z, digits, '.', '_' and '-', beginning with a letter or digit"
    ),
]
CollectorUrl = Annotated[
    str, _matching(r"|https?://[^/\s:]+:[0-9]{1,5}/?"), Takes("URL", "http://host:port, or https://host:port")
]
FilePath = Annotated[str, Takes("PATH", "the path of a file")]


@dataclass(frozen=True, slots=True)
class Kind:
    """A field's type without its None, and what its annotation adds."""

    type: Any
    marks: tuple[Any, ...]

    @property
    def takes(self) -> Takes | None:
        return next((mark for mark in self.marks if isinstance(mark, Takes)), None)

    @property
    def items(self) -> Kind | None:
        """Of a list."""
        return kind_of(get_args(self.type)[0]) if get_origin(self.type) is tuple else None

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def metavar(self) -> str:
        """How a value stands in a command line; empty for a switch."""
        if self.takes is not None:
            return self.takes.metavar
        if self.items is not None:
            return f"{self.items.metavar},..."
        if self.choices:
            return "|".join(self.choices)
        return {bool: "", int: "N", float: "X"}.get(self.type, "TEXT")

    @property
    def bounds(self) -> str:
        """Of a number, in words; empty without any."""
        found = {type(mark): mark for mark in self.marks}
        low, high = found.get(Ge), found.get(Le)
        words = []
        if low and high:
            words.append(f"{_number(low.ge)} to {_number(high.le)}")
        elif low:
            words.append(f"at least {_number(low.ge)}")
        if mark := found.get(Gt):
            words.append(f"above {_number(mark.gt)}")
        if high and not low:
            words.append(f"at most {_number(high.le)}")
        if mark := found.get(Lt):
            words.append(f"below {_number(mark.lt)}")
        if mark := found.get(MultipleOf):
            words.append(f"a multiple of {_number(mark.multiple_of)}")
        return ", ".join(words)

    @property
    def words(self) -> str:
        """What the field takes, whole."""
        if self.items is not None:
            least = next((mark.min_length for mark in self.marks if isinstance(mark, MinLen)), 0)
            return f"{f'at least {least}, each' if least else 'each'} {self.items.words}, with commas between them"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        plain = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "text")
        what = self.takes.words if self.takes is not None else plain
        return f"{what}, {self.bounds}" if self.bounds else what


def kind_of(annotation: Any, marks: Sequence[Any] = ()) -> Kind:
    """Of an annotation, and of what stands beside it in a `FieldInfo`."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return kind_of(inner, (*marks, *more))
    if get_origin(annotation) in (Union, UnionType):
        # a setting is of one type, or has not been set
        return kind_of(next(arg for arg in get_args(annotation) if arg is not NoneType), marks)
    return Kind(annotation, tuple(_flat(marks)))


def field_kind(info: FieldInfo) -> Kind:
    return kind_of(info.annotation, info.metadata)


def _number(bound: Any) -> str:
    return f"{int(bound):,}" if bound == int(bound) else str(bound)


def _flat(marks: Sequence[Any]) -> Iterator[Any]:
    for mark in marks:
        yield from _flat(mark.metadata) if isinstance(mark, FieldInfo) else (mark,)
