"""A node as a source of pages: who may read which of them, and for how long. Every node is one, whatever else it does.

Guarantees: a page is lent only sealed, as it stands in the tree, with its digest and the generation that its row has by
then; a lease ends by its owner's release or by expiry, and with it what the lease alone kept, and the request that
still runs under it; a node that is draining lends nothing more. Like all that holds pages, a lease is liveness only.

Pages are asked for by hash: who knows one knows the prompt's namespace, or was told it by somebody who does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from pdkv.errors import Draining, StalePages
from pdkv.ids import LeaseId, PageHashes, PeerName, RequestId
from pdkv.kvcache.lease import LeaseTable
from pdkv.node.base import NodeParts
from pdkv.node.messages import (
    LEASES_TOLD,
    Accepted,
    LeaseCall,
    LeaseStatus,
    LendCall,
    Loan,
    LocateCall,
    NodeIntro,
)
from pdkv.node.peers import PeerBook
from pdkv.node.stages import Stage
from pdkv.tracing.span import Span, current

LEASE = "pdkv.lease"
"""From its grant to its end, which is often after that of the call that it was granted in."""


class Source:
    """Has the methods of `node.ports.SourcePeer`."""

    def __init__(self, parts: NodeParts, peers: PeerBook, *, ttl_s: float, per_peer: int | None) -> None:
        """`ttl_s`: of every lease; `per_peer`: most leases of one node at once, None: as many as it asks for."""
        self.parts = parts
        self.peers = peers
        self.ttl_s = ttl_s
        self.leases = LeaseTable(per_peer)
        self.draining = False
        self.computing: dict[LeaseId, asyncio.Task[object]] = {}
        """Requests that run under a lease, or will; they end with it."""
        self.ended: Callable[[], None] = lambda: None
        """Called when a lease has ended."""
        self._request_of: dict[LeaseId, RequestId] = {}
        """The request of each lease that lives and was granted to one."""
        self._spans: dict[LeaseId, Span] = {}
        """Of each lease that lives and was granted in a request that is traced."""
        self._added = asyncio.Event()

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        """Compare contracts, learn the peer's memory, answer with this node's own introduction."""
        await self.peers.admit(intro, needed=False)
        return self.parts.intro()

    async def locate(self, call: LocateCall) -> int:
        """How many of the prompt's first pages it could lend now."""
        self.peers.check(call.envelope)
        return self._held(call.hashes)

    async def lend(self, call: LendCall) -> Loan:
        """All that it has of the prompt is kept by one lease; the pages that are wanted of it.

        Raises `StalePages` if it has none of those (any more), `Draining`, and `LimitReached` for too many leases.
        """
        self.peers.check(call.envelope)
        self.require_serving()
        held, first = self._held(call.hashes), call.first_page_wanted
        if first >= held:
            raise StalePages(f"page {first} of the prompt is not here (any more): {held} are", pages=[first], have=held)
        lease_id, owner = LeaseId(secrets.token_hex(16)), call.envelope.sender
        self.leases.require_room(owner)
        pages = self.parts.manager.lend(call.hashes, lease_id)
        self._grant(lease_id, owner)
        columns = self.parts.announced(first, pages[first:], call.hashes.part(first, len(pages)))
        return Loan(Accepted(lease_id, self.ttl_s), columns)

    def grant(self, lease_id: LeaseId, owner: PeerName, request: RequestId) -> None:
        """For a request's pages. Raises `LimitReached`."""
        self._grant(lease_id, owner)
        self._request_of[lease_id] = request

    async def renew_lease(self, call: LeaseCall) -> float:
        """The lease's full life again, in seconds. Raises `LeaseExpired`: a late renewal revives nothing."""
        self.peers.check(call.envelope)
        self.leases.renew(call.lease_id, call.envelope.sender, _now())
        if request := self._request_of.get(call.lease_id):
            self.parts.at(Stage.RENEWED, request)
        return self.ttl_s

    async def release_lease(self, call: LeaseCall) -> None:
        """Idempotent: releasing an unknown or ended lease is no error."""
        self.peers.check(call.envelope)
        request = self._request_of.get(call.lease_id)
        if self.release(call.lease_id, call.envelope.sender) and request:
            self.parts.at(Stage.RELEASED, request)

    def release(self, lease_id: LeaseId, owner: PeerName) -> bool:
        """End it; True if this call did."""
        released = self.leases.release(lease_id, owner)
        if released:
            self.let_go(lease_id)
        return released

    async def watch_leases(self) -> None:
        """Runs for the node's life: ends leases when they expire."""
        while True:
            for lease in self.leases.expire(_now()):
                if told := self._spans.get(lease.lease_id):
                    told.note({"pdkv.lease.expired": True})
                self.let_go(lease.lease_id)
            next_s = self.leases.next_expiry_s
            self._added.clear()
            try:
                async with asyncio.timeout(None if next_s is None else max(next_s - _now(), 0.0)):
                    await self._added.wait()
            except TimeoutError:
                continue

    def let_go(self, lease_id: LeaseId) -> None:
        """What a lease kept that has ended."""
        self._request_of.pop(lease_id, None)
        if told := self._spans.pop(lease_id, None):
            told.end()
        if task := self.computing.get(lease_id):
            task.cancel()
        self.parts.manager.drop_lease(lease_id)
        self.parts.transfer.expect_reads(peers_may=bool(self.leases))
        self.ended()

    def require_serving(self) -> None:
        """Raises `Draining`."""
        if self.draining:
            raise Draining(f"{self.parts.name} is draining", node=self.parts.name)

    def status(self) -> dict[str, LeaseStatus]:
        """Of the leases that expire first."""
        held = self.leases.first(LEASES_TOLD)
        now_s = _now() if held else 0.0  # a node that holds none can be asked outside of its loop
        return {
            str(lease.lease_id): LeaseStatus(
                str(lease.owner), lease.expires_s - now_s, lease.lease_id in self.computing
            )
            for lease in held
        }

    def _held(self, hashes: PageHashes) -> int:
        """None of a node that proves nothing of what it has, or has pages that others must have as well."""
        parts = self.parts
        if self.draining or not (parts.manager.lends and parts.verifier.checks_digests):
            return 0
        return parts.manager.tree.match(hashes).pages.size

    def _grant(self, lease_id: LeaseId, owner: PeerName) -> None:
        self.leases.grant(lease_id, owner, self.ttl_s, _now())
        if (within := current()).listening:
            self._spans[lease_id] = within.child(LEASE, {"pdkv.peer": str(owner), "pdkv.lease.ttl_s": self.ttl_s})
        self.parts.transfer.expect_reads(peers_may=True)
        self._added.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
