"""Leases: a remote node's right to find pages of mine still there.

Guarantees: a lease ends once, by its owner's release or by expiry, and a late renewal revives nothing; only the owner
that it was granted to (a node in one of its lives) can renew or release it; a renewed lease at the head delays nobody
else's expiry; no node has more than its share, whatever its lives. Time is an argument, in seconds of one monotonic
clock of this node; a peer's clock never comes in.

A lease is liveness only: what makes a late read harmless is the page's generation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from heapq import nsmallest

from pdkv.errors import BoundsError, DuplicateRequest, LeaseExpired, LimitReached
from pdkv.ids import LeaseId, NodeId, PeerName
from pdkv.kvcache.keyed_heap import KeyedHeap


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: LeaseId
    owner: PeerName
    ttl_s: float
    expires_s: float
    """On the clock of the node that granted it; never sent anywhere."""


class LeaseTable:
    """All leases that this node has granted and that live. Not thread-safe."""

    def __init__(self, per_node: int | None = None) -> None:
        """`per_node`: most leases of one node at once; None: as many as it asks for."""
        self._per_node = per_node
        self._held: Counter[NodeId] = Counter()
        self._leases: dict[LeaseId, Lease] = {}
        self._by_expiry: KeyedHeap[LeaseId, float] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._leases

    @property
    def next_expiry_s(self) -> float | None:
        """When to call `expire` next; None without a lease."""
        first = self._by_expiry.first()
        return None if first is None else self._leases[first].expires_s

    def first(self, count: int) -> list[Lease]:
        """Those that expire first, at most `count`."""
        return nsmallest(count, self._leases.values(), key=lambda lease: lease.expires_s)

    def grant(self, lease_id: LeaseId, owner: PeerName, ttl_s: float, now_s: float) -> Lease:
        """Raises `DuplicateRequest` if the id is in use, `LimitReached` if the owner's node has all that it may have,
        `BoundsError` on a ttl that is no positive number."""
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise BoundsError("lease ttl, seconds", ttl_s, "a positive number")
        if lease_id in self._leases:
            raise DuplicateRequest(f"lease {lease_id} is already granted", lease=lease_id)
        self.require_room(owner)
        self._held[owner.node] += 1
        return self._keep(Lease(lease_id, owner, ttl_s, now_s + ttl_s))

    def require_room(self, owner: PeerName) -> None:
        """Raises `LimitReached` unless the owner's node may have another one."""
        if self._per_node is not None and self._held[owner.node] >= self._per_node:
            words = f"{owner.node} holds {self._held[owner.node]} leases; one node may hold {self._per_node}"
            raise LimitReached(words, peer=owner, leases_per_peer=self._per_node)

    def renew(self, lease_id: LeaseId, owner: PeerName, now_s: float) -> Lease:
        """Its whole ttl again from now. Raises `LeaseExpired` if it is unknown, over, or another owner's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner or lease.expires_s <= now_s:
            raise LeaseExpired(f"lease {lease_id} is over or unknown", lease=lease_id, owner=owner)
        return self._keep(Lease(lease_id, owner, lease.ttl_s, now_s + lease.ttl_s))

    def release(self, lease_id: LeaseId, owner: PeerName) -> bool:
        """End it; True if this call did. Unknown, over or another owner's: nothing happens."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        self._forget(lease)
        return True

    def expire(self, now_s: float) -> list[Lease]:
        """End those whose time is over, and tell which, the oldest first."""
        over: list[Lease] = []
        while (first := self._by_expiry.first()) is not None and self._leases[first].expires_s <= now_s:
            over.append(self._leases[first])
            self._forget(over[-1])
        return over

    def _keep(self, lease: Lease) -> Lease:
        self._leases[lease.lease_id] = lease
        self._by_expiry.set(lease.lease_id, lease.expires_s)
        return lease

    def _forget(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        self._held[lease.owner.node] -= 1
        if not self._held[lease.owner.node]:
            del self._held[lease.owner.node]
        self._by_expiry.discard(lease.lease_id)
