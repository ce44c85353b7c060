"""A rank of a decode group over gRPC: the servicer at the rank, the port at its leader.

Guarantees: a rank hears only the life of the leader that it follows; every call has a deadline and ends with a
`PdkvError`, as those of `rpc.client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from pdkv.errors import WrongIncarnation
from pdkv.ids import PeerName, UInt64Array
from pdkv.kvcache.verifier import Arrival
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, Joining, NewPeer, RankOutcome, RankRead, RankStep
from pdkv.rpc.client import Client, ClientSettings
from pdkv.rpc.convert import checks
from pdkv.rpc.convert import rank as convert
from pdkv.rpc.convert.common import peer_from_pb, peer_to_pb
from pdkv.v1 import common_pb2, rank_pb2, rank_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
STEP_TIMEOUT_S = 600.0
"""Of a call that computes, digests or waits: the leader's own deadlines are shorter."""


class RankServicer(rank_pb2_grpc.RankServicer):
    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    async def Join(self, request: rank_pb2.Joining, context: Context) -> common_pb2.PeerName:
        return peer_to_pb(await self._rank.join(convert.joining_from_pb(request)))

    async def Apply(self, request: rank_pb2.Entries, context: Context) -> rank_pb2.RankReply:
        self._follows(request.leader)
        await self._rank.apply(request.first, convert.entries_from_pb(request))
        return rank_pb2.RankReply()

    async def AddPeer(self, request: rank_pb2.NewPeer, context: Context) -> rank_pb2.RankReply:
        self._follows(request.leader)
        await self._rank.add_peer(convert.new_peer_from_pb(request))
        return rank_pb2.RankReply()

    async def RemovePeer(self, request: rank_pb2.RankPeer, context: Context) -> rank_pb2.RankReply:
        self._follows(request.leader)
        await self._rank.remove_peer(peer_from_pb(request.name))
        return rank_pb2.RankReply()

    async def Read(self, request: rank_pb2.RankRead, context: Context) -> rank_pb2.RankOutcome:
        self._follows(request.leader)
        return convert.outcome_to_pb(await self._rank.read(convert.read_from_pb(request, self._pages)))

    async def CancelRead(self, request: rank_pb2.RankReadId, context: Context) -> rank_pb2.RankReply:
        self._follows(request.leader)
        await self._rank.cancel(request.read_id)
        return rank_pb2.RankReply()

    async def Settled(self, request: rank_pb2.RankReadId, context: Context) -> rank_pb2.RankReply:
        self._follows(request.leader)
        await self._rank.settled(request.read_id)
        return rank_pb2.RankReply()

    async def Verify(self, request: rank_pb2.RankArrival, context: Context) -> rank_pb2.RankDigests:
        self._follows(request.leader)
        digests = await self._rank.verify(convert.arrival_from_pb(request, self._pages), request.after)
        return rank_pb2.RankDigests(digests=convert.digests_raw(digests))

    async def Step(self, request: rank_pb2.RankStep, context: Context) -> rank_pb2.RankStepDone:
        self._follows(request.leader)
        return rank_pb2.RankStepDone(logits_digest=await self._rank.step(convert.step_from_pb(request)))

    @property
    def _pages(self) -> int:
        return self._rank.parts.pool.num_pages

    def _follows(self, leader: common_pb2.PeerName) -> None:
        if (named := peer_from_pb(leader)) != self._rank.leader:
            raise WrongIncarnation(f"this rank follows {self._rank.leader}, not {named}", leader=self._rank.leader)


class GrpcRank(Client):
    """`node.ranks.RankPort` over gRPC."""

    def __init__(self, address: str, channel: grpc.aio.Channel, settings: ClientSettings) -> None:
        super().__init__(address, channel, settings)
        self._stub: Any = rank_pb2_grpc.RankStub(channel)
        self._leader: PeerName | None = None

    async def join(self, joining: Joining) -> PeerName:
        message = convert.joining_to_pb(joining)
        async with self._call("Join", message):
            reply = await self._stub.Join(message, timeout=self._settings.connect_timeout_s, wait_for_ready=True)
        self._leader = joining.leader
        return peer_from_pb(reply)

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        await self._say("Apply", convert.entries_to_pb(self._own, first, entries))

    async def add_peer(self, peer: NewPeer) -> None:
        await self._say("AddPeer", convert.new_peer_to_pb(self._own, peer))

    async def remove_peer(self, peer: PeerName) -> None:
        await self._say("RemovePeer", rank_pb2.RankPeer(leader=peer_to_pb(self._own), name=peer_to_pb(peer)))

    async def read(self, read: RankRead) -> RankOutcome:
        reply = await self._say("Read", convert.read_to_pb(self._own, read))
        return convert.outcome_from_pb(reply, len(read.order))

    async def cancel(self, read_id: int) -> None:
        await self._say("CancelRead", rank_pb2.RankReadId(leader=peer_to_pb(self._own), read_id=read_id))

    async def settled(self, read_id: int) -> None:
        await self._say("Settled", rank_pb2.RankReadId(leader=peer_to_pb(self._own), read_id=read_id))

    async def verify(self, arrival: Arrival, after: int) -> UInt64Array:
        reply = await self._say("Verify", convert.arrival_to_pb(self._own, arrival, after))
        return convert.digests_from("digests", reply.digests, len(arrival.pages))

    async def step(self, step: RankStep) -> int:
        reply = await self._say("Step", convert.step_to_pb(self._own, step))
        return int(reply.logits_digest)

    @property
    def _own(self) -> PeerName:
        if self._leader is None:
            raise WrongIncarnation(f"{self.address} was not joined")
        return self._leader

    async def _say(self, call: str, message: checks.Message) -> Any:
        async with self._call(call, message):
            return await getattr(self._stub, call)(message, timeout=STEP_TIMEOUT_S)
