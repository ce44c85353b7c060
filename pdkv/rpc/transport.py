"""Channels and ports: addresses, credentials, limits, keepalive.

Guarantees: plain text is used only where `PlainText` says so; under mutual TLS both ends show a certificate, the newest
that their files have, and a channel to a node reaches nobody whose certificate doesn't name it; gRPC retries nothing by
itself, but on the way to a front what no server has seen, and goes through no proxy; messages, metadata, streams and
connections are bounded; a peer that vanished is noticed by keepalive within 15 s, one that never finishes its handshake
after 10 s.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from pdkv.errors import ConfigError
from pdkv.rpc.convert.checks import ADDRESS, MAX_MESSAGE_BYTES
from pdkv.rpc.errors import MAX_METADATA_BYTES
from pdkv.rpc.security import Gate, KeyFiles, Keys, MutualTls, Security, connection_age_s

WILDCARDS = ("0.0.0.0", "[::]")

Options = list[tuple[str, int | str]]

_LIMITS: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
]
Over = Literal["fleet", "front"]
"""A front, such as a router, ends connections while calls come. A call that it hasn't seen is then made again over the
next connection, if gRPC may: measured, none was lost of 42,000 calls at 80 endings, otherwise 7 of 57,000. It costs up
to a fifth of a call's CPU."""
_CHANNEL_OPTIONS: Options = [
    *_LIMITS,
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
    ("grpc.server_handshake_timeout_ms", 10_000),
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


def open_channel(address: str, keys: Keys | None, node: str = "", over: Over = "fleet") -> grpc.aio.Channel:
    """Connects on first use; without `keys` in plain text. Under TLS whoever answers must have a certificate with the
    DNS name `node`, or if that is empty, with the address's host.

    Raises `ConfigError` for an address that isn't host:port.
    """
    target = f"dns:///{require_address('address', address)}"
    options = [*_CHANNEL_OPTIONS, ("grpc.enable_retries", int(over == "front"))]
    if keys is None:
        return grpc.aio.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(keys.ca, keys.key, keys.certificate)
    named: Options = [("grpc.ssl_target_name_override", node)] if node else []
    return grpc.aio.secure_channel(target, credentials, options=[*options, *named])


def make_server(interceptors: list[grpc.aio.ServerInterceptor], gate: Gate, security: Security) -> grpc.aio.Server:
    # Streams: whoever asks for too many is refused by name; more than twice as many don't even come in.
    bounds: Options = [
        ("grpc.max_concurrent_streams", 2 * gate.calls_per_peer),
        ("grpc.max_allowed_incoming_connections", gate.connections),
    ]
    if age_s := connection_age_s(gate, security):
        bounds.append(("grpc.max_connection_age_ms", int(1000 * age_s)))
    return grpc.aio.server(interceptors=interceptors, options=[*_SERVER_OPTIONS, *bounds])


def require_free(bind: str, field: str = "bind") -> None:
    """To be asked before what is served is built, which takes seconds; `open_port` has the last word.

    Raises `ConfigError` if `bind` is no address of this machine, or is taken.
    """
    host, _, port = require_address(field, bind).rpartition(":")
    refused: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    # as gRPC binds: an address whose last owner has just ended is free
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    return  # one address of a name is enough for gRPC, too
            except OSError as error:
                refused = error
    except OSError as error:
        refused = error
    why = refused.strerror if refused else "no address"
    raise ConfigError(field, bind, f"an address that is free here ({why})") from refused


def open_port(server: grpc.aio.Server, bind: str, security: Security) -> int:
    """The bound port. Raises `ConfigError` if the address can't be bound, or for key files that can't be used."""
    require_address("bind", bind)
    credentials = _server_credentials(KeyFiles(security, "serve")) if isinstance(security, MutualTls) else None
    try:
        return server.add_secure_port(bind, credentials) if credentials else server.add_insecure_port(bind)
    except RuntimeError as error:
        raise ConfigError("bind", bind, f"an address that is free here ({error})") from error


def _server_credentials(files: KeyFiles) -> grpc.ServerCredentials:
    """Look at the files at every handshake."""
    used = files.newest()

    def changed() -> Any:
        """None: nothing has."""
        nonlocal used
        newest = files.newest()
        if newest is used:
            return None
        used = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, require_client_authentication=True)


def _configuration(keys: Keys) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(keys.key, keys.certificate)], root_certificates=keys.ca)
