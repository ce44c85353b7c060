"""What an operator may set: the entries of `kv_connector_extra_config`, all optional.

Guarantees: an entry that isn't known is refused by name, as is a value of the wrong kind, and an engine_id that other
nodes would refuse; what NixlConnector is told by environment variables (host and port of the side channel) holds here,
too; every time is one that a lease may last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.ids import NodeId
from pdkv.node.pull import MAX_LEASE_S
from pdkv.rpc.convert.checks import NODE_NAME
from pdkv.rpc.security import MutualTls, PlainText, Security

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""As vLLM names them."""


@dataclass(frozen=True, slots=True)
class Settings:
    host: str = "localhost"
    """Where others reach this node's workers; it also listens there, unless `bind` says otherwise."""
    bind: str = ""
    port: int = 5600
    """Of the first worker; each further one has the next number."""
    weights_id: str = ""
    """What the weights are, where that can't be told from the model's directory or revision."""
    shadow: bool = False
    """Refuse nothing: count and log what differs. Both nodes of a pair have to say so."""
    hold_s: float = 480.0
    """A finished prompt's blocks are kept for so long if nobody comes for them."""
    lease_s: float = 60.0
    """And for so long once somebody reads them."""
    find_s: float = 5.0
    """How long a reader may wait for a prompt that isn't there yet."""
    connect_s: float = 10.0
    allow: str = "*"
    """Addresses, host:port, that a request may send this node to; patterns, separated by commas."""
    backend: str = "nixl"
    require_rdma: bool = False
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def security_of(self, worker: NodeId) -> Security:
        """The worker's certificate has to name it. Raises `ConfigError` unless all three files are named, or none."""
        files = (self.tls_ca, self.tls_certificate, self.tls_key)
        if not any(files):
            return PlainText()
        if not all(files):
            raise ConfigError("tls_ca, tls_certificate, tls_key", files, "all three, or none")
        return MutualTls(Path(self.tls_ca), Path(self.tls_certificate), Path(self.tls_key), worker)


def settings_of(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Raises `ConfigError` for an entry that isn't known, or a value of another kind than its default's."""
    known: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
    given: dict[str, Any] = {}
    if environ.get(HOST):
        given["host"] = environ[HOST]
    if environ.get(PORT):
        given["port"] = _port(PORT, environ[PORT])
    for name, value in extra.items():
        entry = f"kv_connector_extra_config.{name}"
        if name not in known:
            raise ConfigError(entry, value, ", ".join(known))
        kind = type(known[name])
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(entry, value, f"a value like {known[name]!r}")
        if kind is float and not 0 < value <= MAX_LEASE_S:  # written so that NaN fails too
            raise ConfigError(entry, value, f"above 0, at most {MAX_LEASE_S:g}")
        given[name] = _port(entry, str(value)) if name == "port" else kind(value)
    for name in given.keys() & {"host", "bind"}:
        given[name] = _bracketed(given[name])
    return Settings(**given)


def worker_id(engine_id: str, rank: int) -> NodeId:
    """What other nodes know a worker by. Raises `ConfigError` for an engine_id that no node's name can be made of."""
    suffix = f"-{rank}"
    if not NODE_NAME.fullmatch(engine_id + suffix):
        words = (
            f"letters, digits, '.', '_' and '-', the first a letter or digit, with {suffix!r} behind them at most 63"
        )
        raise ConfigError("kv_transfer_config.engine_id", engine_id, f"{words}; or none: vLLM makes one")
    return NodeId(engine_id + suffix)


def _port(field: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ConfigError(field, text, "1 to 65535")
    return int(text)


def _bracketed(host: str) -> str:
    """An IPv6 address as it stands before a port; NixlConnector is given it without brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
