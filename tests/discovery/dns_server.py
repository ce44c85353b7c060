"""A small DNS server over real UDP and TCP, whose answers a test may change at any time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.query
import dns.rcode
import dns.rdatatype
import dns.rrset

UDP_BYTES = 512
"""More than that needs TCP."""


@dataclass
class DnsServer:
    """`records`: name (without the last dot) and type, to texts as they stand in a zone file."""

    address: str = ""
    records: dict[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    broken: dns.rcode.Rcode | None = None
    """What it answers with instead."""
    silent: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    by_tcp: int = 0

    def serve(self, service: str, addresses: Sequence[str]) -> None:
        """These host:port are a service."""
        split = [address.rpartition(":") for address in addresses]
        self.records[service, "SRV"] = [f"0 50 {port} {host}." for host, _, port in split]

    def answer(self, wire: bytes, most: int = 0) -> bytes:
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        reply = dns.message.make_response(query)
        texts = self.records.get((name, kind), ())
        if self.broken is not None:
            reply.set_rcode(self.broken)
        elif texts:
            reply.answer.append(dns.rrset.from_text_list(question.name, 5, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        found = reply.to_wire()
        if not most or len(found) <= most:
            return found
        cut = dns.message.make_response(query)
        cut.flags |= dns.flags.TC
        return cut.to_wire()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if not self.server.silent:
            self.transport.sendto(self.server.answer(data, UDP_BYTES), addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """At one port for both."""
    server = DnsServer()

    async def by_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.by_tcp += 1
        length = int.from_bytes(await reader.readexactly(2), "big")
        found = server.answer(await reader.readexactly(length))
        writer.write(len(found).to_bytes(2, "big") + found)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(by_tcp, "127.0.0.1", 0, family=socket.AF_INET)
    port = listening.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Udp(server), local_addr=("127.0.0.1", port)
    )
    server.address = f"127.0.0.1:{port}"
    try:
        yield server
    finally:
        transport.close()
        listening.close()
