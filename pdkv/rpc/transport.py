"""Channels and ports: addresses, limits, keepalive.

Guarantees: plain text is used only where `insecure=True` says so; gRPC retries nothing by itself and goes through no
proxy; messages and metadata are bounded on both sides; a peer that vanished is noticed by keepalive within 15 s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc

from pdkv.errors import ConfigError
from pdkv.rpc.convert.checks import ADDRESS, MAX_MESSAGE_BYTES
from pdkv.rpc.errors import MAX_METADATA_BYTES

WILDCARDS = ("0.0.0.0", "[::]")

Options = list[tuple[str, int | str]]

_LIMITS: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
]
_CHANNEL_OPTIONS: Options = [
    *_LIMITS,
    ("grpc.enable_retries", 0),
    ("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}]}]})),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_SERVER_OPTIONS: Options = [
    *_LIMITS,
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens (`bind`, host:port; port 0: any free one) and what it tells others (`advertise`, a
    host or host:port; empty: the host it binds)."""

    bind: str
    advertise: str = ""


def require_address(field: str, address: str) -> str:
    """host:port, nothing that a resolver would take for another scheme. Raises `ConfigError`."""
    if not ADDRESS.fullmatch(address) or int(address.rpartition(":")[2]) > 65535:
        raise ConfigError(field, address, "host:port")
    return address


def advertised(endpoint: Endpoint, port: int) -> str:
    """host:port for others. Raises `ConfigError` if that would be a wildcard."""
    said = endpoint.advertise or require_address("bind", endpoint.bind).rpartition(":")[0]
    address = said if ADDRESS.fullmatch(said) else f"{said}:{port}"
    host = address.rpartition(":")[0]
    if host in WILDCARDS:
        raise ConfigError("advertise", endpoint.advertise, f"a host that others reach; {host} is none")
    return require_address("advertise", address)


def open_channel(address: str, *, insecure: bool) -> grpc.aio.Channel:
    """Connects on first use. Raises `ConfigError` for an address that isn't host:port."""
    require_plain_text(insecure=insecure)
    return grpc.aio.insecure_channel(f"dns:///{require_address('address', address)}", options=_CHANNEL_OPTIONS)


def make_server(interceptors: list[grpc.aio.ServerInterceptor]) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)


def open_port(server: grpc.aio.Server, bind: str, *, insecure: bool) -> int:
    """The bound port. Raises `ConfigError` if the address can't be bound."""
    require_plain_text(insecure=insecure)
    try:
        return server.add_insecure_port(require_address("bind", bind))
    except RuntimeError as error:
        raise ConfigError("bind", bind, f"an address that is free here ({error})") from error


def require_plain_text(*, insecure: bool) -> None:
    """The place where credentials come in."""
    if not insecure:
        raise ConfigError("insecure", insecure, "true: plain text must be named, and is all there is so far")
