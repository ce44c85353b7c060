"""A worker as a source of pages: the gRPC service of any pdkv node, over blocks that its engine holds for others.

Guarantees: has the methods of `rpc.server.SourceService`; who is not connected, in this life and with an equal
contract, gets nothing; pages are asked for by name, so only somebody who knows the prompt can ask.
"""

from __future__ import annotations

from pdkv.adapters.vllm.holds import Holds
from pdkv.node.base import Station
from pdkv.node.messages import Accepted, LeaseCall, LendCall, Loan, LocateCall, NodeIntro
from pdkv.node.peers import PeerBook


class BlockSource:
    """Of one worker."""

    def __init__(self, station: Station, peers: PeerBook, holds: Holds, lease_s: float) -> None:
        self._station, self._peers, self._holds, self._lease_s = station, peers, holds, lease_s

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        """Compare contracts, answer with this node's own introduction."""
        await self._peers.admit(intro, needed=False)
        return self._station.intro()

    async def locate(self, call: LocateCall) -> int:
        """How many of the prompt's first pages it could lend now: all or none."""
        self._peers.check(call.envelope)
        return len(call.hashes) if self._holds.has(call.hashes) else 0

    async def lend(self, call: LendCall) -> Loan:
        """Waits for a prompt that is not sealed yet. Raises `StalePages` if it doesn't come."""
        self._peers.check(call.envelope)
        lease_id, pages = await self._holds.lend(call.hashes, call.first_page_wanted, call.envelope.sender)
        return Loan(Accepted(lease_id, self._lease_s), pages)

    async def release_lease(self, call: LeaseCall) -> None:
        """Idempotent."""
        self._peers.check(call.envelope)
        self._holds.release(call.lease_id, call.envelope.sender)
