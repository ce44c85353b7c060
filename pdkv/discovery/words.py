"""How a list of addresses says where its nodes are found.

Guarantees: each entry means one thing: an address (host:port), a name in DNS whose addresses all have one port
(`dns:NAME:PORT`), services in DNS, which bring names and ports (`dns:_PORT._tcp.NAME`), or a Service of Kubernetes by
its API (`k8s:[NAMESPACE/]SERVICE[:PORT]`); what is none of these is refused with that list. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

ALLOWED = "host:port, dns:NAME:PORT, dns:_PORT._tcp.NAME or k8s:[NAMESPACE/]SERVICE[:PORT]"
GRPC_PORT = "grpc"
"""Name of the port of a Service, unless another one is given."""
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = rf"{_LABEL}(?:\.{_LABEL})*\.?"
_PORT = r"[0-9]{1,5}"
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, slots=True)
class Hosts:
    """All addresses (A and AAAA) of a name, at one port."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns:{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Services:
    """Names and ports of a service (SRV)."""

    name: str

    def __str__(self) -> str:
        return f"dns:{self.name}"


@dataclass(frozen=True, slots=True)
class Slices:
    """The EndpointSlices of a Service; `namespace` is empty for this pod's own."""

    namespace: str
    service: str
    port: str = GRPC_PORT

    def __str__(self) -> str:
        space = f"{self.namespace}/" if self.namespace else ""
        return f"k8s:{space}{self.service}:{self.port}"


Place: TypeAlias = Hosts | Services | Slices


def place_of(word: str) -> Place | None:
    """Where to look; None for what isn't written as a place, such as an address. Raises `ValueError` for one that is
    written wrongly, with what is allowed."""
    scheme, colon, rest = word.partition(":")
    # a host may be called like a scheme, and then has a port
    if not colon or scheme not in ("dns", "k8s") or re.fullmatch(_PORT, rest):
        return None
    if scheme == "k8s" and (found := re.fullmatch(rf"(?:({_LABEL})/)?({_LABEL})(?::({_LABEL}))?", rest)):
        return Slices(found[1] or "", found[2], found[3] or GRPC_PORT)
    if scheme == "dns" and re.fullmatch(rf"_{_LABEL}\._(?:tcp|udp)\.{_NAME}", rest):
        return Services(rest)
    if scheme == "dns" and (found := re.fullmatch(rf"({_NAME}):({_PORT})", rest)) and int(found[2]) < 1 << 16:
        return Hosts(found[1], int(found[2]))
    raise ValueError(ALLOWED)


def host_and_port(host: str, port: int) -> str:
    """An address as everybody here writes it. Raises `ValueError` for a host that nobody could dial."""
    bracketed = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(bracketed) or not 0 < port < 1 << 16:
        raise ValueError(f"{host!r} at port {port} is no address")
    return f"{bracketed}:{port}"
