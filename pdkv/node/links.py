"""Connections of a decode node to prefill nodes, by address.

Guarantees: an address is dialled once however many requests wait for it, and an attempt that failed has failed for all
of them; a link that failed is dialled anew by the next request: the node behind the address may be in another life.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdkv.errors import ContractMismatch, Difference, PdkvError
from pdkv.node.base import NodeParts
from pdkv.node.messages import NodeIntro
from pdkv.node.peers import PeerBook, PeerState
from pdkv.node.ports import PrefillDirectory, PrefillPeer


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A connected prefill node: how to call it, and its introduction."""

    address: str
    peer: PrefillPeer
    intro: NodeIntro


@dataclass(slots=True)
class _Dial:
    """An attempt to connect to an address, and those who wait for how it ends."""

    lock: asyncio.Lock
    waiting: int = 0
    error: PdkvError | None = None
    """It failed: so it has for everybody who waited, instead of one wait after the other."""


class Links:
    """Prefill nodes by address."""

    def __init__(self, parts: NodeParts, peers: PeerBook, directory: PrefillDirectory) -> None:
        self._parts = parts
        self._peers = peers
        self._directory = directory
        self._links: dict[str, Link] = {}
        self._dialling: dict[str, _Dial] = {}
        """Only of addresses that somebody is dialling now: they come from whoever sends a request."""

    async def of(self, address: str) -> Link:
        """Connect to the prefill node at `address`, unless that is done. Raises `ContractMismatch`, `PeerLost`."""
        dial = self._dialling.setdefault(address, _Dial(asyncio.Lock()))
        dial.waiting += 1
        try:
            async with dial.lock:
                if link := self._links.get(address):
                    return link
                if dial.error is not None:
                    raise dial.error
                try:
                    link = self._links[address] = await self._dial(address)
                except PdkvError as error:
                    dial.error = error
                    raise
                return link
        finally:
            dial.waiting -= 1
            if not dial.waiting:
                del self._dialling[address]

    def forget(self, link: Link) -> None:
        """The next request to this address connects again; a new incarnation is added beside the old."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
            self._peers.mark(link.intro.name, PeerState.SUSPECT)

    async def _dial(self, address: str) -> Link:
        peer = self._directory.peer(address)
        try:
            intro = await peer.connect(self._parts.intro())
        except ContractMismatch as error:
            # The refusal speaks from the prefill node's side; what leaves here speaks from this one's.
            turned = [Difference(d.field, d.theirs, d.mine, d.rule) for d in error.differences]
            raise ContractMismatch(turned) from error
        await self._peers.admit(intro)
        return Link(address, peer, intro)
