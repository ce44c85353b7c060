"""Clients of the services, and the directory that makes them by address.

Guarantees: every failure is a `PdkvError` (the one the server raised, if it did); cancelling the caller cancels the
call, and `asyncio.CancelledError` passes through; closing an event stream early cancels it at the server; every call
has a deadline; nothing is retried; under mutual TLS what is meant for a node goes only to one whose certificate names
it, and an introduction counts only if it came from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdkv.errors import DeadlineExceeded, NotAuthorised, PeerLost, ProtocolError, TlsRefused, WrongIncarnation
from pdkv.ids import PeerName, RequestId, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.node.messages import (
    GenerateEvent,
    GenerateRequest,
    LeaseCall,
    LendCall,
    Loan,
    LocateCall,
    NodeIntro,
    NodeStatus,
    PrefillEvent,
    PrefillRequest,
)
from pdkv.node.ranks import Entry, Joining, NewPeer, RankOutcome, RankRead, RankStep
from pdkv.node.routing import Estimate, EstimateCall, RouterStatus
from pdkv.rpc.channels import Channels
from pdkv.rpc.convert import checks, common, generate, intro, prefill, rank, routing, source
from pdkv.rpc.errors import error_from
from pdkv.rpc.security import Security
from pdkv.rpc.tracing import calling, telling
from pdkv.rpc.transport import Over, require_address
from pdkv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    rank_pb2,
    rank_pb2_grpc,
    router_pb2_grpc,
    source_pb2_grpc,
    visit_pb2_grpc,
)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    connect_timeout_s: float = 10.0
    """From the first attempt to reach the peer to its introduction."""
    call_timeout_s: float = 5.0
    """Of lease calls and status."""


class Client:
    """One service at one address."""

    _service: type[Any]
    _over: Over = "fleet"

    def __init__(self, address: str, channels: Channels, settings: ClientSettings) -> None:
        self.address = require_address("address", address)
        self._channels = channels
        self._settings = settings

    @asynccontextmanager
    async def _call(self, what: str, request: checks.Message, node: str = "") -> AsyncIterator[Any]:
        """The service's stub for one call, to `node` if that is named; what it ends with becomes a `PdkvError`."""
        checks.require_sendable(request, what)
        with calling(self._service, what, self.address) as span:
            try:
                with self._channels.to(self.address, node, self._over) as channel:
                    yield self._service(telling(channel, span))
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure, address=self.address, what=what, tls=self._channels.tls)
                if isinstance(error, TlsRefused) and (complaint := self._channels.complaint):
                    raise TlsRefused(f"{error}; this side's own is bad: {complaint}", **error.fields) from failure
                raise error from failure
            except DecodeError as error:
                raise ProtocolError(f"{what}: {self.address}'s reply can't be decoded", address=self.address) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Nobody cancelled the caller: its channel was closed under the call.
                raise PeerLost(f"{what}: channel to {self.address} was closed here", address=self.address) from None

    async def _ask(self, call: str, message: checks.Message, node: str = "") -> Any:
        """What a call is answered with, that is answered at once."""
        async with self._call(call, message, node) as stub:
            return await getattr(stub, call)(message, timeout=self._settings.call_timeout_s)

    async def _first(self, call: str, message: checks.Message) -> Any:
        """A call that waits until the peer can be reached, at most `connect_timeout_s`; then raises `PeerLost`. What
        TLS refuses is raised at once: it would be refused again."""
        ends_s = asyncio.get_running_loop().time() + self._settings.connect_timeout_s
        try:
            return await self._within(self._settings.connect_timeout_s, call, message)
        except PeerLost as error:
            if isinstance(error, TlsRefused) or error.fields.get("code") != "UNAVAILABLE":
                raise
            # gRPC's own word that nobody is there yet: only while waiting it doesn't say why.
            left_s = max(ends_s - asyncio.get_running_loop().time(), 0.0)
            return await self._within(left_s, call, message, wait=True)

    async def _within(
        self, timeout_s: float, call: str, message: checks.Message, node: str = "", *, wait: bool = False
    ) -> Any:
        """Raises `PeerLost` if the peer isn't reached, at once where that is known, unless it is told to `wait`."""
        try:
            async with self._call(call, message, node) as stub:
                return await getattr(stub, call)(message, timeout=timeout_s, wait_for_ready=wait)
        except DeadlineExceeded as error:
            with self._channels.to(self.address, node) as channel:
                if channel.get_state() == grpc.ChannelConnectivity.READY:
                    raise
            words = f"{self.address} could not be reached within {self._settings.connect_timeout_s:g} s"
            raise PeerLost(words, address=self.address) from error


class _Node(Client):
    """A node with a pool, at whichever service it is called."""

    async def connect(self, intro_: NodeIntro) -> NodeIntro:
        """Raises `PeerLost` at once if nobody listens there, and after `connect_timeout_s` if nothing is heard.

        Under mutual TLS raises `TlsRefused` for a certificate that isn't of the CA or the host, `NotAuthorised` for one
        that doesn't name the node that the peer says it is.
        """
        request = intro.introduction_to_pb(intro_)
        timeout_s = self._settings.connect_timeout_s
        answer = intro.introduction_from_pb(await self._within(timeout_s, "Connect", request))
        if not self._channels.tls:
            return answer
        # Whoever answered has a certificate for the host. It is the node only if it has one for that name too.
        node = answer.name.node
        try:
            named = intro.introduction_from_pb(await self._within(timeout_s, "Connect", request, node))
        except TlsRefused as error:
            words = f"{self.address} says it is node {node}, but its certificate has no DNS name {node}"
            raise NotAuthorised(words, address=self.address, node=node) from error
        if named.name.node != node:
            raise ProtocolError(f"{self.address} is {answer.name} first and {named.name} then", address=self.address)
        return named

    async def release_lease(self, call: LeaseCall) -> None:
        reply = await self._ask("ReleaseLease", prefill.lease_call_to_pb(call), call.envelope.receiver.node)
        common.require_reply(call.envelope, reply.envelope)


class GrpcSource(_Node):
    """`node.ports.SourcePeer` over gRPC."""

    _service = source_pb2_grpc.SourceStub

    async def locate(self, call: LocateCall) -> int:
        reply = await self._ask("Locate", source.locate_call_to_pb(call), call.envelope.receiver.node)
        common.require_reply(call.envelope, reply.envelope)
        return source.located_from_pb(reply, len(call.hashes))

    async def lend(self, call: LendCall) -> Loan:
        reply = await self._ask("Lend", source.lend_call_to_pb(call), call.envelope.receiver.node)
        common.require_reply(call.envelope, reply.envelope)
        return source.loan_from_pb(reply)


class _Stated(Client):
    """A node of either role, as a router sees it."""

    async def status(self) -> NodeStatus:
        return common.status_from_pb(await self._ask("Status", common_pb2.StatusRequest()))

    async def estimate(self, call: EstimateCall) -> Estimate:
        reply = await self._ask("Estimate", routing.estimate_call_to_pb(call))
        return routing.estimate_from_pb(reply, len(call.hashes))


class GrpcPrefillPeer(_Node, _Stated):
    """`node.ports.PrefillPeer` over gRPC."""

    _service = prefill_pb2_grpc.PrefillStub

    async def locate(self, call: LocateCall) -> int:
        return await self._source.locate(call)

    async def lend(self, call: LendCall) -> Loan:
        return await self._source.lend(call)

    @property
    def _source(self) -> GrpcSource:
        return GrpcSource(self.address, self._channels, self._settings)

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        message = prefill.prefill_request_to_pb(request)
        async with self._call("Prefill", message, request.envelope.receiver.node) as stub:
            call = stub.Prefill(message, timeout=request.remaining_s + 2 * checks.STREAM_SLACK_S)
            try:
                async for reply in call:
                    common.require_reply(request.envelope, reply.envelope)
                    yield prefill.prefill_event_from_pb(reply)
            finally:
                call.cancel()

    async def renew_lease(self, call: LeaseCall) -> float:
        reply = await self._ask("RenewLease", prefill.lease_call_to_pb(call), call.envelope.receiver.node)
        common.require_reply(call.envelope, reply.envelope)
        return checks.duration_s("ttl_s", reply.ttl_s)


class _GenerateClient(Client):
    """The token stream, the same at a decode node and at a router."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        message = generate.generate_request_to_pb(request)
        async with self._call("Generate", message) as stub:
            call = stub.Generate(message, timeout=request.remaining_s + 2 * checks.STREAM_SLACK_S)
            try:
                async for reply in call:
                    yield generate.generate_event_from_pb(reply)
            finally:
                call.cancel()


class GrpcDecodeClient(_GenerateClient, _Stated):
    _service = decode_pb2_grpc.DecodeStub

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        """Raises `UnknownRequest`, `BoundsError`."""
        await self._ask("Finish", generate.finish_call_to_pb(request, output_tokens))


class GrpcRouterClient(_GenerateClient):
    _service = router_pb2_grpc.RouterStub
    _over = "front"

    async def status(self) -> RouterStatus:
        return routing.router_status_from_pb(await self._ask("Status", common_pb2.StatusRequest()))


class GrpcRank(Client):
    """`node.ranks.RankPort` over gRPC."""

    _service = rank_pb2_grpc.RankStub

    def __init__(self, address: str, channels: Channels, settings: ClientSettings) -> None:
        super().__init__(address, channels, settings)
        self._leader: PeerName | None = None

    async def join(self, joining: Joining) -> PeerName:
        reply = await self._first("Join", rank.joining_to_pb(joining))
        self._leader = joining.leader
        return common.peer_from_pb(reply)

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        await self._say("Apply", rank.entries_to_pb(self._own, first, entries))

    async def add_peer(self, peer: NewPeer) -> None:
        await self._say("AddPeer", rank.new_peer_to_pb(self._own, peer))

    async def remove_peer(self, peer: PeerName) -> None:
        await self._say(
            "RemovePeer", rank_pb2.RankPeer(leader=common.peer_to_pb(self._own), name=common.peer_to_pb(peer))
        )

    async def read(self, read: RankRead) -> RankOutcome:
        reply = await self._say("Read", rank.read_to_pb(self._own, read))
        return rank.outcome_from_pb(reply, len(read.order))

    async def cancel(self, read_id: int) -> None:
        await self._say("CancelRead", rank_pb2.RankReadId(leader=common.peer_to_pb(self._own), read_id=read_id))

    async def settled(self, read_id: int) -> None:
        await self._say("Settled", rank_pb2.RankReadId(leader=common.peer_to_pb(self._own), read_id=read_id))

    async def verify(self, arrival: Arrival, after: int) -> UInt64Array:
        reply = await self._say("Verify", rank.arrival_to_pb(self._own, arrival, after))
        return rank.digests_from("digests", reply.digests, len(arrival.pages))

    async def step(self, step: RankStep) -> int:
        reply = await self._say("Step", rank.step_to_pb(self._own, step))
        return int(reply.logits_digest)

    @property
    def _own(self) -> PeerName:
        if self._leader is None:
            raise WrongIncarnation(f"{self.address} was not joined")
        return self._leader

    async def _say(self, call: str, message: checks.Message) -> Any:
        async with self._call(call, message) as stub:
            return await getattr(stub, call)(message, timeout=checks.RANK_DEADLINE_S)


class GrpcAdmin(Client):
    """An operator's calls to a node or router."""

    _service = admin_pb2_grpc.AdminStub

    async def drain(self, *, end: bool, wait_s: float) -> None:
        """Returns when nothing runs there any more; raises `DeadlineExceeded` after `wait_s`, and it goes on."""
        request = admin_pb2.DrainRequest(end=end)
        async with self._call("Drain", request) as stub:
            await stub.Drain(request, timeout=wait_s)

    async def compact(self) -> int:
        """Pages that were moved."""
        request = admin_pb2.CompactRequest()
        async with self._call("Compact", request) as stub:
            return int((await stub.Compact(request, timeout=checks.UNARY_DEADLINE_S)).moved_pages)


class GrpcVisit(Client):
    """A node for a visitor, who reads from it and stays unknown to it."""

    _service = visit_pb2_grpc.VisitStub

    async def introduce(self) -> NodeIntro:
        return intro.introduction_from_pb(await self._ask("Introduce", common_pb2.StatusRequest()))


class GrpcDirectory:
    """`node.ports.PrefillDirectory` and `router.service.DecodeDirectory`: clients by address, which share channels."""

    def __init__(self, security: Security, settings: ClientSettings | None = None) -> None:
        """Raises `ConfigError` for key files that can't be used."""
        self._settings = settings or ClientSettings()
        self._channels = Channels(security)

    def peer(self, address: str) -> GrpcPrefillPeer:
        """Raises `ConfigError` if the address isn't host:port."""
        return GrpcPrefillPeer(address, self._channels, self._settings)

    def decode(self, address: str) -> GrpcDecodeClient:
        """As `peer`, for the decode service."""
        return GrpcDecodeClient(address, self._channels, self._settings)

    def router(self, address: str) -> GrpcRouterClient:
        """As `peer`, for the router service."""
        return GrpcRouterClient(address, self._channels, self._settings)

    def rank(self, address: str) -> GrpcRank:
        """As `peer`, for a rank of a decode group."""
        return GrpcRank(address, self._channels, self._settings)

    def admin(self, address: str) -> GrpcAdmin:
        """As `peer`, for an operator's calls."""
        return GrpcAdmin(address, self._channels, self._settings)

    def visit(self, address: str) -> GrpcVisit:
        """As `peer`, for a visitor."""
        return GrpcVisit(address, self._channels, self._settings)

    @property
    def sources(self) -> GrpcSources:
        """`node.ports.SourceDirectory`, over the same channels."""
        return GrpcSources(self)

    def source(self, address: str) -> GrpcSource:
        """As `peer`, for a node as a source of pages."""
        return GrpcSource(address, self._channels, self._settings)

    def drop(self, address: str) -> None:
        """The next call to this address connects anew; those that run go on."""
        self._channels.drop(address)

    async def close(self) -> None:
        """Calls that still run end with `PeerLost`."""
        await self._channels.close()


@dataclass(frozen=True, slots=True)
class GrpcSources:
    """Of a directory, the nodes as sources of pages."""

    directory: GrpcDirectory

    def peer(self, address: str) -> GrpcSource:
        return self.directory.source(address)

    def drop(self, address: str) -> None:
        self.directory.drop(address)
