"""Nodes by DNS, from a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import dns.rcode
import pytest

from pdkv.discovery import by_dns
from pdkv.discovery.by_dns import DnsSource
from pdkv.discovery.words import Hosts, Services
from pdkv.errors import DiscoveryFailed
from tests.discovery.dns_server import DnsServer, dns_server

SRV = "_grpc._tcp.prefill.pdkv.svc.cluster.local"
DOMAIN = "pdkv.svc.cluster.local"


def run(body: Callable[[DnsServer], Awaitable[None]]) -> None:
    async def served() -> None:
        async with dns_server() as server, asyncio.timeout(30):
            await body(server)

    asyncio.run(served())


async def found(place: Hosts | Services, server: DnsServer) -> tuple[str, ...]:
    (found,) = [each async for each in DnsSource(place, server.address).lists()]
    return found


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod."""
    made = by_dns.DnsSource._resolver

    def resolver(source: DnsSource) -> by_dns.dns.asyncresolver.Resolver:
        resolver = made(source)
        resolver.search = [by_dns.dns.name.from_text(name) for name in (DOMAIN, "svc.cluster.local", "cluster.local")]
        resolver.ndots = 5
        return resolver

    monkeypatch.setattr(by_dns.DnsSource, "_resolver", resolver)


def test_all_addresses_of_a_name_have_the_port() -> None:
    async def body(server: DnsServer) -> None:
        server.records = {("p.test", "A"): ["10.0.0.2", "10.0.0.1"], ("p.test", "AAAA"): ["fd00::7"]}
        assert await found(Hosts("p.test", 7000), server) == ("10.0.0.1:7000", "10.0.0.2:7000", "[fd00::7]:7000")
        del server.records["p.test", "AAAA"]
        assert await found(Hosts("p.test", 7000), server) == ("10.0.0.1:7000", "10.0.0.2:7000")

    run(body)


def test_a_service_brings_names_and_ports() -> None:
    async def body(server: DnsServer) -> None:
        server.records = {("_grpc._tcp.p.test", "SRV"): ["0 50 7001 b.p.test.", "9 1 7000 a.p.test.", "0 0 0 ."]}
        assert await found(Services("_grpc._tcp.p.test"), server) == ("a.p.test:7000", "b.p.test:7001")

    run(body)


@pytest.mark.usefixtures("search")
def test_names_are_as_short_as_they_were_asked_for() -> None:
    """So they are what nodes call themselves, and what stands in their certificates."""

    async def body(server: DnsServer) -> None:
        server.records = {(SRV, "SRV"): [f"0 50 7000 prefill-{i}.prefill.{DOMAIN}." for i in (0, 1)]}
        short = ("prefill-0.prefill:7000", "prefill-1.prefill:7000")
        assert await found(Services("_grpc._tcp.prefill"), server) == short
        assert await found(Services("_grpc._tcp.prefill.pdkv.svc"), server) == tuple(
            address.replace(":", ".pdkv.svc:") for address in short
        )
        whole = tuple(address.replace(":", f".{DOMAIN}:") for address in short)
        assert await found(Services(f"{SRV}."), server) == whole
        server.records[SRV, "SRV"] = ["0 50 7000 elsewhere.test."]
        assert await found(Services("_grpc._tcp.prefill"), server) == ("elsewhere.test:7000",)

    run(body)


@pytest.mark.usefixtures("search")
def test_a_name_is_looked_for_in_the_search_list() -> None:
    async def body(server: DnsServer) -> None:
        server.records = {(f"prefill.{DOMAIN}", "A"): ["10.0.0.1"]}
        assert await found(Hosts("prefill", 7000), server) == ("10.0.0.1:7000",)

    run(body)


def test_many_nodes_come_by_tcp() -> None:
    async def body(server: DnsServer) -> None:
        server.records = {("_grpc._tcp.p.test", "SRV"): [f"0 1 7000 prefill-{i}.p.test." for i in range(200)]}
        assert len(await found(Services("_grpc._tcp.p.test"), server)) == 200
        assert server.by_tcp == 1

    run(body)


def _nobody(server: DnsServer) -> None:
    server.records = {}


def _broken(server: DnsServer) -> None:
    server.broken = dns.rcode.SERVFAIL


def _silent(server: DnsServer) -> None:
    server.silent = True


def _bad_name(server: DnsServer) -> None:
    server.records["_grpc._tcp.p.test", "SRV"] = [r"0 1 7000 a\032b.test."]


def _bad_port(server: DnsServer) -> None:
    server.records["_grpc._tcp.p.test", "SRV"] = ["0 1 0 a.test."]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_nobody, "does not exist"),
        (_broken, "SERVFAIL"),
        (_silent, "timed out|LifetimeTimeout"),
        (_bad_name, "is no address"),
        (_bad_port, "is no address"),
    ],
)
def test_what_fails_is_named_and_nothing_is_told(
    harm: Callable[[DnsServer], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_dns, "LOOK_S", 0.5)

    async def body(server: DnsServer) -> None:
        server.serve("_grpc._tcp.p.test", ["a.test:7000"])
        assert await found(Services("_grpc._tcp.p.test"), server) == ("a.test:7000",)
        harm(server)
        with pytest.raises(DiscoveryFailed, match=words) as failed:
            await found(Services("_grpc._tcp.p.test"), server)
        assert failed.value.fields == {"place": "dns:_grpc._tcp.p.test"}

    run(body)
