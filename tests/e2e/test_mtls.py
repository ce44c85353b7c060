"""Prefill, decode and router under mutual TLS, as processes: an answer, who is refused, and new files in mid-life."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdkv.cli.demo.fleet import Fleet, NodeProcess
from pdkv.errors import ConfigError, NotAuthorised, PeerLost, TlsRefused
from pdkv.node.messages import GenerateDone, GenerateRequest
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import MutualTls, PlainText, Security
from tests.certificates import HERE, Authority
from tests.e2e.world import World, at_rest, free_address
from tests.rpc.tls import credentials
from tests.waiting import until

CLIENT = "client-7"


@dataclass
class Secured:
    """Three processes and their files."""

    folder: Path
    ca: Authority
    prefill: NodeProcess
    decode: NodeProcess
    router: NodeProcess

    @property
    def nodes(self) -> tuple[NodeProcess, ...]:
        return self.prefill, self.decode, self.router

    def certify(self, ca: Authority, trusted: bytes) -> None:
        """New files for all, in the place of the old ones."""
        for node in self.nodes:
            ca.files(self.folder / node.name, node.name, *HERE, trusted=trusted)


def flags(files: MutualTls) -> dict[str, str | int | bool]:
    return {"tls_ca": str(files.ca), "tls_certificate": str(files.certificate), "tls_key": str(files.key)}


@asynccontextmanager
async def secured(folder: Path, ca: Authority) -> AsyncIterator[Secured]:
    own = {name: flags(ca.files(folder / name, name, *HERE)) for name in ("p-tls", "d-tls", "r-tls")}
    node: dict[str, str | int | bool] = {"model": "tiny", "threads": 1}
    async with Fleet() as fleet:  # these are started as a user does, not forked as the others here
        address = free_address()
        prefill, decode = await asyncio.gather(
            fleet.start(
                "prefill",
                "p-tls",
                {
                    **node,
                    **own["p-tls"],
                    "bind": address,
                    "allow_names": "d-*",
                    "allow_status": "r-*",
                    "chunk_tokens": 512,
                },
            ),
            fleet.start(
                "decode", "d-tls", {**node, **own["d-tls"], "prefill_addresses": address, "allow_names": "r-*"}
            ),
        )
        between = {"prefill_addresses": prefill.address, "decode_addresses": decode.address}
        router = await fleet.start("router", "r-tls", {**own["r-tls"], **between})
        yield Secured(folder, ca, prefill, decode, router)


async def asked(security: Security, request: GenerateRequest, address: str, role: str = "router") -> tuple[int, ...]:
    """The tokens that a client of its own gets."""
    directory = GrpcDirectory(security)
    tokens = []
    try:
        async with aclosing(getattr(directory, role)(address).generate(request)) as events:
            async for event in events:
                if not isinstance(event, GenerateDone):
                    tokens.append(event.token)
    finally:
        await directory.close()
    return tuple(tokens)


def test_a_fleet_under_mutual_tls(world: World, tmp_path: Path) -> None:
    async def body() -> None:
        ca, other = Authority(), Authority("other")
        async with secured(tmp_path, ca) as fleet:
            await _answers(world, fleet, ca.files(tmp_path / "client", CLIENT))
            await _refuses(world, fleet, other)
            await _rotates(world, fleet, other)
            await _ends(fleet, other)

    world.run(body())


async def _answers(world: World, fleet: Secured, client: MutualTls) -> None:
    """As one process does; the node's certificates name them to each other and to the router."""
    request = replace(world.request(700, 300), prefill_address="")
    assert await asked(client, request, fleet.router.address) == (await world.alone(request.tokens)).tokens
    async with grpc.aio.secure_channel(fleet.prefill.address, credentials(client)) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def _refuses(world: World, fleet: Secured, other: Authority) -> None:
    """Strangers by TLS, whoever may not call by name, plain text altogether; health answers only to certificates."""
    request = replace(world.request(701, 100), prefill_address="")
    stranger = other.files(fleet.folder / "stranger", CLIENT, trusted=fleet.ca.pem + other.pem)
    for security in (stranger, PlainText()):
        with pytest.raises(PeerLost, match="it hangs up on connecting") as refused:
            await asked(security, request, fleet.router.address)
        assert isinstance(refused.value, TlsRefused) == (security is stranger)
    friend = fleet.ca.files(fleet.folder / "client", CLIENT)
    with pytest.raises(NotAuthorised, match=rf"{CLIENT} may not call /pdkv.v1.Decode/Generate here; allowed: r-\*"):
        await asked(friend, request, fleet.decode.address, "decode")
    with pytest.raises(ConfigError, match="vouches for now"):
        GrpcDirectory(other.files(fleet.folder / "own", CLIENT, trusted=fleet.ca.pem))
    async with grpc.aio.insecure_channel(fleet.prefill.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)


async def _rotates(world: World, fleet: Secured, other: Authority) -> None:
    """To another CA, in three steps, while the same processes answer after each; a bad file changes nothing."""
    both = fleet.ca.pem + other.pem
    old = fleet.ca.files(fleet.folder / "client", CLIENT, trusted=both)
    new = other.files(fleet.folder / "new", CLIENT, trusted=both)
    pids = [node.pid for node in fleet.nodes]
    for step, (signs, trusted) in enumerate(((fleet.ca, both), (other, both), (other, other.pem))):
        fleet.certify(signs, trusted)
        for client in (old, new):
            request = replace(world.request(702 + 2 * step + (client is new), 200), prefill_address="")
            if (client, step) == (old, 2):
                with pytest.raises(TlsRefused):
                    await asked(client, request, fleet.router.address)
                continue
            assert await asked(client, request, fleet.router.address) == (await world.alone(request.tokens)).tokens
    for node in fleet.nodes:
        (fleet.folder / node.name / "certificate.pem").write_bytes(b"half of a certif")
    request = replace(world.request(709, 200), prefill_address="")
    assert await asked(new, request, fleet.router.address) == (await world.alone(request.tokens)).tokens
    assert [node.pid for node in fleet.nodes] == pids
    assert all(node.running for node in fleet.nodes)
    for node in (fleet.decode, fleet.router):  # nobody had to connect to the prefill node anew, which looks only then
        assert "stays in use: tls_key: " in node.log.read_text(), node.name


async def _ends(fleet: Secured, ca: Authority) -> None:
    directory = GrpcDirectory(ca.files(fleet.folder / "admin", "d-admin", "r-admin"))
    for client in (directory.peer(fleet.prefill.address), directory.decode(fleet.decode.address)):
        await until(client.status, at_rest, "the node at rest")
    for node in fleet.nodes:
        os.kill(node.pid, signal.SIGTERM)
        assert await asyncio.wait_for(node.wait(), 20) == 0
        text = node.log.read_text()
        assert "Traceback" not in text, text
        assert "plain text" not in text, text
        assert "gives no status" not in text, text
    with pytest.raises(PeerLost):
        await directory.decode(fleet.decode.address).status()
    await directory.close()
