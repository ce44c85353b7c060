"""Nodes by DNS: the addresses of a name, or the names and ports of a service.

Guarantees: an answer is taken whole or not at all; a look-up ends within `LOOK_S`; names are told as short as they
were asked for: what the search list of this machine added to the question is taken off the answer, so that a node is
called what it calls itself (`prefill-0.prefill`) and what its certificate says. Priority and weight of a service count
for nothing: who gets a request is not DNS's to say.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from pdkv.discovery.words import Hosts, Services, host_and_port
from pdkv.errors import DiscoveryFailed

LOOK_S = 3.0
"""For all servers, and all names that the search list makes of one."""

TRY_S = 1.0
"""For one server, of which a packet may have been lost."""


class DnsSource:
    """Asks once; to be asked again."""

    def __init__(self, place: Hosts | Services, server: str = "") -> None:
        """`server` (IP:PORT) instead of those of this machine, unless it is empty."""
        self._place = place
        self._server = server

    async def lists(self) -> AsyncGenerator[tuple[str, ...], None]:
        try:
            resolver = self._resolver()
            if isinstance(self._place, Hosts):
                found = await _hosts(resolver, self._place)
            else:
                found = await _services(resolver, self._place)
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise DiscoveryFailed(str(self._place), f"{type(error).__name__}: {error}") from error
        yield tuple(sorted(found))

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """With the search list that this machine has now."""
        resolver = dns.asyncresolver.Resolver()
        resolver.timeout = TRY_S
        if self._server:
            host, _, port = self._server.rpartition(":")
            resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
        return resolver


async def _hosts(resolver: dns.asyncresolver.Resolver, place: Hosts) -> set[str]:
    answers = await resolver.resolve_name(place.name, socket.AF_UNSPEC, search=True, lifetime=LOOK_S)
    return {host_and_port(host, place.port) for host in answers.addresses()}


async def _services(resolver: dns.asyncresolver.Resolver, place: Services) -> set[str]:
    answer = await resolver.resolve(place.name, dns.rdatatype.SRV, search=True, lifetime=LOOK_S)
    asked = dns.name.from_text(place.name, origin=None)
    added = dns.name.Name(answer.qname.labels[len(asked) :]) or dns.name.root
    return {
        host_and_port(record.target.relativize(added).to_text(omit_final_dot=True), record.port)
        for record in answer
        if record.target != dns.name.root
    }
