"""A rank of a decode group, as served to its leader.

Guarantees: a rank hears only the life of the leader that it follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from pdkv.errors import WrongIncarnation
from pdkv.rpc.convert import checks
from pdkv.rpc.convert import rank as convert
from pdkv.rpc.convert.common import peer_from_pb, peer_to_pb
from pdkv.v1 import common_pb2, rank_pb2, rank_pb2_grpc

if TYPE_CHECKING:
    from pdkv.node.rank import Rank

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


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
        return rank_pb2.RankDigests(digests=checks.raw(digests))

    async def Step(self, request: rank_pb2.RankStep, context: Context) -> rank_pb2.RankStepDone:
        self._follows(request.leader)
        return rank_pb2.RankStepDone(logits_digest=await self._rank.step(convert.step_from_pb(request)))

    @property
    def _pages(self) -> int:
        return self._rank.parts.pool.num_pages

    def _follows(self, leader: common_pb2.PeerName) -> None:
        if (named := peer_from_pb(leader)) != self._rank.leader:
            raise WrongIncarnation(f"this rank follows {self._rank.leader}, not {named}", leader=self._rank.leader)
