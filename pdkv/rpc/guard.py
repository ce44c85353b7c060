"""Who may call, for whom it may speak, and how much one peer may do at once.

Guarantees: under mutual TLS a call is let in only with a certificate that was checked for this very connection and
whose names the server allows, and a message that says which node it comes from only with that node's certificate; in
plain text nobody is asked for a name. Refusals name the caller and the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdkv.errors import LimitReached, NotAuthorised
from pdkv.rpc.security import Gate, MutualTls, Names, Security
from pdkv.v1 import prefill_pb2

ADMIN = "/pdkv.v1.Admin/"
STATUS = ("/Status", "/Estimate")
"""Of each service: what a router and an operator ask for, who need no more."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever is at the other end of a connection."""

    peer: str
    """What is counted as one: a certificate's names, or an IP address."""
    connection: str
    """Its address and port: one of that peer's connections."""
    names: Names | None
    """None in plain text."""

    def require_speaks(self, request: Any) -> None:
        """Raises `NotAuthorised` for a message of another node."""
        if self.names is not None and (node := speaker(request)) is not None and not self.names.say(node):
            words = f"the message is from node {node[:80]!r}, the certificate of {self.names}"
            raise NotAuthorised(words, node=node[:80], names=self.names)


class Guard:
    """Of one server; used in its loop."""

    def __init__(self, security: Security, gate: Gate) -> None:
        self._tls = isinstance(security, MutualTls)
        self._gate = gate
        self._running: dict[str, Counter[str]] = {}
        """Peer to its calls that run, by connection."""

    @contextmanager
    def let_in(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> Iterator[Caller]:
        """For as long as the call runs. Raises `NotAuthorised`, `LimitReached`."""
        caller = self._identify(context, method)
        running = self._running.get(caller.peer, Counter())
        calls, connections = self._gate.calls_per_peer, self._gate.connections_per_peer
        if running.total() >= calls:
            words = f"{caller.peer} has {calls} calls that run; one peer may have {calls} at once"
            raise LimitReached(words, peer=caller.peer, calls_per_peer=calls)
        if len(running) >= connections and caller.connection not in running:
            words = f"{caller.peer} has calls over {connections} connections; one peer may use {connections} at once"
            raise LimitReached(words, peer=caller.peer, connections_per_peer=connections)
        self._running[caller.peer] = running
        running[caller.connection] += 1
        try:
            yield caller
        finally:
            running[caller.connection] -= 1
            if not running[caller.connection]:
                del running[caller.connection]
            if not running:
                del self._running[caller.peer]

    def _identify(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> Caller:
        if not self._tls:
            return Caller(context.peer().rpartition(":")[0], context.peer(), None)
        facts: Mapping[str, Sequence[bytes]] = context.auth_context()  # type: ignore[assignment]
        names = Names(*(tuple(n.decode(errors="replace") for n in facts.get(k, ())) for k in ("peer_dns", "peer_uri")))
        if facts.get("ssl_session_reused", [b""])[0] != b"false":
            raise NotAuthorised("a TLS session was resumed, which checks no certificate: connect anew", names=names)
        if method.startswith(ADMIN) and not names.match(self._gate.allow_admin):
            allowed = ", ".join(self._gate.allow_admin) or "nobody, unless named in allow_admin"
            raise NotAuthorised(f"{names} may not call {method} here; allowed: {allowed}", names=names, allowed=allowed)
        patterns = () if method.startswith(ADMIN) else self._gate.allow_names
        if patterns and method.endswith(STATUS):
            patterns += self._gate.allow_status
        if patterns and not names.match(patterns):
            allowed = ", ".join(patterns)
            raise NotAuthorised(f"{names} may not call {method} here; allowed: {allowed}", names=names, allowed=allowed)
        return Caller(str(names), context.peer(), names)


def speaker(request: Any) -> str | None:
    """Id of the node that a message says it comes from; None for one that may come from anybody.

    An introduction that can't be decoded names nobody: the service refuses it.
    """
    if isinstance(request, prefill_pb2.Introduction):
        try:
            return prefill_pb2.IntroductionBody.FromString(request.body).name.node
        except DecodeError:
            return None
    fields = request.DESCRIPTOR.fields_by_name
    if "envelope" in fields:
        return str(request.envelope.sender.node)
    return str(request.leader.node) if "leader" in fields else None
