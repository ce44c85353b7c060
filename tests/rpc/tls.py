"""Servers and channels under mutual TLS, on this machine's loopback address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from pdkv.rpc.client import ClientSettings, GrpcDirectory
from pdkv.rpc.security import Gate, MutualTls, Security
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.certificates import HERE, Authority
from tests.rpc import samples
from tests.rpc.fakes import LIMIT_S, FakeDecode, FakePrefill, FakeRouter

CA = Authority()
PREFILL, DECODE = samples.P.node, samples.D.node
SOON = ClientSettings(LIMIT_S, LIMIT_S)


class Files:
    """Of the processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = self.of("server", PREFILL, *HERE)
        self.client = self.of("client", DECODE)

    def of(self, who: str, *names: str, ca: Authority = CA, **more: Any) -> MutualTls:
        """Files of `who`, new ones in the place of those that it has."""
        return ca.files(self.folder / who, *names, **more)


@asynccontextmanager
async def served(
    security: Security, services: Services | None = None, gate: Gate | None = None
) -> AsyncIterator[GrpcServer]:
    services = services or Services(FakePrefill(), FakeDecode(), FakeRouter())
    server = GrpcServer(Endpoint("127.0.0.1:0"), services, security, gate)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def dialling(security: Security, settings: ClientSettings = SOON) -> AsyncIterator[GrpcDirectory]:
    directory = GrpcDirectory(security, settings)
    try:
        yield directory
    finally:
        await directory.close()


def credentials(files: MutualTls, ca: bytes | None = None) -> grpc.ChannelCredentials:
    """With whatever is in the files, good or bad: a client that doesn't look at what it has."""
    key, certificate = files.key.read_bytes(), files.certificate.read_bytes()
    return grpc.ssl_channel_credentials(ca or files.ca.read_bytes(), key, certificate)


class Looker:
    """A server of one method, that notes the DNS names of whoever calls it; `open_until` lets a stream run on."""

    def __init__(self, files: MutualTls) -> None:
        key, certificate = files.key.read_bytes(), files.certificate.read_bytes()
        keys = grpc.ssl_server_credentials([(key, certificate)], files.ca.read_bytes(), require_client_auth=True)
        self.seen: list[tuple[str, ...]] = []
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_unary_rpc_method_handler(self._look)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Looker", {"Look": handler})])
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', keys)}"

    async def _look(self, request: bytes, context: Any) -> bytes:
        self.seen.append(tuple(name.decode() for name in context.auth_context()["peer_dns"]))
        return request

    async def __aenter__(self) -> Looker:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


async def look(channel: grpc.aio.Channel) -> bytes:
    reply: bytes = await channel.unary_unary("/Looker/Look")(b"look", timeout=LIMIT_S)
    return reply
