"""Clients of the services, and the directory that keeps one channel an address.

Guarantees: every failure is a `PdkvError` (the one the server raised, if it did); cancelling the caller cancels the
call, and `asyncio.CancelledError` passes through; closing an event stream early cancels it at the server; every call
has a deadline; nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdkv.errors import DeadlineExceeded, PeerLost, ProtocolError, WrongIncarnation
from pdkv.ids import PeerName, UInt64Array
from pdkv.kvcache.verifier import Arrival
from pdkv.node.messages import (
    GenerateEvent,
    GenerateRequest,
    LeaseCall,
    NodeIntro,
    NodeStatus,
    PrefillEvent,
    PrefillRequest,
    RouterStatus,
)
from pdkv.node.ranks import Entry, Joining, NewPeer, RankOutcome, RankRead, RankStep
from pdkv.rpc.convert import checks, common, generate, intro, prefill, rank
from pdkv.rpc.errors import error_from
from pdkv.rpc.transport import open_channel
from pdkv.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, rank_pb2, rank_pb2_grpc, router_pb2_grpc


@dataclass(frozen=True, slots=True)
class ClientSettings:
    connect_timeout_s: float = 10.0
    """From the first attempt to reach the peer to its introduction."""
    call_timeout_s: float = 5.0
    """Of lease calls and status."""


RANK_TIMEOUT_S = 600.0
"""Of a rank's call that computes, digests or waits: the leader's own deadlines are shorter."""


class _Client:
    """One service at one address."""

    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        self.address = address
        self._channel = channel
        self._settings = settings

    @asynccontextmanager
    async def _call(self, what: str, request: checks.Message) -> AsyncIterator[None]:
        """Turns what a call may end with into a `PdkvError`."""
        checks.require_sendable(request, what)
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, address=self.address, what=what) from failure
        except DecodeError as error:
            words = f"{what} at {self.address}: the reply can't be decoded"
            raise ProtocolError(words, address=self.address) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the caller: its channel was closed under the call.
            raise PeerLost(f"{what}: the connection to {self.address} was closed here", address=self.address) from None


class GrpcPrefillPeer(_Client):
    """`node.ports.PrefillPeer` over gRPC."""

    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        super().__init__(address, channel, settings)
        self._stub: Any = prefill_pb2_grpc.PrefillStub(channel)

    async def connect(self, intro_: NodeIntro) -> NodeIntro:
        """Waits until the peer can be reached, at most `connect_timeout_s`; then raises `PeerLost`."""
        request, timeout_s = intro.introduction_to_pb(intro_), self._settings.connect_timeout_s
        try:
            async with self._call("Connect", request):
                reply = await self._stub.Connect(request, timeout=timeout_s, wait_for_ready=True)
        except DeadlineExceeded as error:
            if self._channel.get_state() == grpc.ChannelConnectivity.READY:
                raise
            words = f"{self.address} could not be reached within {timeout_s:g} s"
            raise PeerLost(words, address=self.address) from error
        return intro.introduction_from_pb(reply)

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        message = prefill.prefill_request_to_pb(request)
        async with self._call("Prefill", message):
            call = self._stub.Prefill(message, timeout=request.remaining_s)
            try:
                async for reply in call:
                    common.require_reply(request.envelope, reply.envelope)
                    yield prefill.prefill_event_from_pb(reply)
            finally:
                call.cancel()

    async def renew_lease(self, call: LeaseCall) -> float:
        message = prefill.lease_call_to_pb(call)
        async with self._call("RenewLease", message):
            reply = await self._stub.RenewLease(message, timeout=self._settings.call_timeout_s)
        common.require_reply(call.envelope, reply.envelope)
        return checks.duration_s("ttl_s", reply.ttl_s)

    async def release_lease(self, call: LeaseCall) -> None:
        message = prefill.lease_call_to_pb(call)
        async with self._call("ReleaseLease", message):
            reply = await self._stub.ReleaseLease(message, timeout=self._settings.call_timeout_s)
        common.require_reply(call.envelope, reply.envelope)

    async def status(self) -> NodeStatus:
        request = common_pb2.StatusRequest()
        async with self._call("Status", request):
            reply = await self._stub.Status(request, timeout=self._settings.call_timeout_s)
        return common.status_from_pb(reply)


class _GenerateClient(_Client):
    """The token stream, the same at a decode node and at a router."""

    _stub: Any

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        message = generate.generate_request_to_pb(request)
        async with self._call("Generate", message):
            call = self._stub.Generate(message, timeout=request.remaining_s)
            try:
                async for reply in call:
                    yield generate.generate_event_from_pb(reply)
            finally:
                call.cancel()


class GrpcDecodeClient(_GenerateClient):
    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        super().__init__(address, channel, settings)
        self._stub = decode_pb2_grpc.DecodeStub(channel)

    async def status(self) -> NodeStatus:
        request = common_pb2.StatusRequest()
        async with self._call("Status", request):
            reply = await self._stub.Status(request, timeout=self._settings.call_timeout_s)
        return common.status_from_pb(reply)


class GrpcRouterClient(_GenerateClient):
    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        super().__init__(address, channel, settings)
        self._stub = router_pb2_grpc.RouterStub(channel)

    async def status(self) -> RouterStatus:
        request = common_pb2.StatusRequest()
        async with self._call("Status", request):
            reply = await self._stub.Status(request, timeout=self._settings.call_timeout_s)
        return common.router_status_from_pb(reply)


class GrpcRank(_Client):
    """`node.ranks.RankPort` over gRPC."""

    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        super().__init__(address, channel, settings)
        self._stub: Any = rank_pb2_grpc.RankStub(channel)
        self._leader: PeerName | None = None

    async def join(self, joining: Joining) -> PeerName:
        message = rank.joining_to_pb(joining)
        async with self._call("Join", message):
            reply = await self._stub.Join(message, timeout=self._settings.connect_timeout_s, wait_for_ready=True)
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
        async with self._call(call, message):
            return await getattr(self._stub, call)(message, timeout=RANK_TIMEOUT_S)


class GrpcDirectory:
    """`node.ports.PrefillDirectory` and `router.service.DecodeDirectory`: clients by address, over one channel each."""

    def __init__(self, *, insecure: bool = False, settings: ClientSettings | None = None) -> None:
        self._insecure = insecure
        self._settings = settings or ClientSettings()
        self._channels: dict[str, grpc.aio.Channel] = {}

    def peer(self, address: str) -> GrpcPrefillPeer:
        """Raises `ConfigError` if the address isn't host:port, or plain text was not asked for by name."""
        return GrpcPrefillPeer(address, self._channel(address), self._settings)

    def decode(self, address: str) -> GrpcDecodeClient:
        """As `peer`, for the decode service."""
        return GrpcDecodeClient(address, self._channel(address), self._settings)

    def router(self, address: str) -> GrpcRouterClient:
        """As `peer`, for the router service."""
        return GrpcRouterClient(address, self._channel(address), self._settings)

    def rank(self, address: str) -> GrpcRank:
        """As `peer`, for a rank of a decode group."""
        return GrpcRank(address, self._channel(address), self._settings)

    async def close(self) -> None:
        """Calls that still run end with `PeerLost`."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, insecure=self._insecure)
        return self._channels[address]
