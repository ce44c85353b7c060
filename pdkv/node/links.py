"""Connections of a decode node to prefill nodes, and to others that have pages, by address.

Guarantees: only addresses that this node was told of are dialled, whoever names them; an address is dialled once
however many requests wait for it, and an attempt that failed has failed for all of them; a link whose peer isn't READY
is never handed out: the next request, or the keeper's probe, dials the address anew, so the node behind it may be in
another life; nothing is kept of an address whose peer was forgotten or never got in, but of this node's own ones, which
are dialled until they are met.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Generic, TypeVar

from pdkv.errors import AddressRefused, ContractMismatch, Difference, NotAPrefillNode, PdkvError, RemoteError
from pdkv.ids import PeerName
from pdkv.node.base import Station
from pdkv.node.flow import begin
from pdkv.node.messages import NodeIntro
from pdkv.node.peers import PeerBook, PeerState
from pdkv.node.ports import Connecting, Directory, PrefillPeer, SourcePeer
from pdkv.node.rounds import Rounds

P = TypeVar("P", bound=Connecting)
P_co = TypeVar("P_co", bound=Connecting, covariant=True)
REDIAL_S = 2.0
"""Between two attempts to meet a node that was never met."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkTo(Generic[P_co]):
    """A connected node: how to call it, and its introduction."""

    address: str
    peer: P_co
    intro: NodeIntro


Link = LinkTo[PrefillPeer]


class Redial(Rounds[str]):
    """A node's own prefill addresses: dialled until each was met once, whether anybody asks or not.

    Nothing of such a node is in the book of peers, so it is told here that none of them can be reached.
    """

    def __init__(self, dial: Callable[[str], Awaitable[object]], own: Sequence[str], peers: PeerBook) -> None:
        super().__init__(lambda: peers.now())
        self._dial = dial
        self._own = frozenset(own)
        self._peers = peers
        self._failed: dict[str, tuple[str, float]] = {}
        """Why, and when."""
        self._new = set(own)
        """Never dialled: a node says from its start whether it reaches somebody."""
        self.unreached: Callable[[str], None] = lambda why: None
        """Told why no own address can be met; "" once one is."""

    def __contains__(self, address: str) -> bool:
        return address in self._failed

    def note(self, address: str, error: PdkvError | None) -> None:
        """How a dial ended."""
        self._new.discard(address)
        if address not in self._own:
            return
        if error is None:
            self._failed.pop(address, None)
        else:
            self._failed[address] = (f"{error.kind}: {error}", self._now())
        self._changed()

    def replace(self, own: Sequence[str]) -> None:
        """These are the node's own now; how dialling the others went counts no more."""
        self._new = (self._new & set(own)) | (set(own) - self._own)
        self._own = frozenset(own)
        self._failed = {address: failed for address, failed in self._failed.items() if address in self._own}
        self._changed()

    def _changed(self) -> None:
        self.changed.set()
        self._peers.speak()
        words = "; ".join(f"{address}: {why}" for address, (why, _) in self._failed.items())
        every = bool(self._failed) and len(self._failed) == len(self._own)
        self.unreached(f"no prefill node of {len(self._own)} could be met: {words}" if every else "")

    def due(self) -> Mapping[str, float]:
        again = {address: failed_s + REDIAL_S for address, (_, failed_s) in self._failed.items()}
        return dict.fromkeys(self._new, -math.inf) | again

    async def visit(self, key: str) -> None:
        self._new.discard(key)
        await self._dial(key)


class LinksTo(Generic[P]):
    """Nodes by address."""

    needed: bool
    """Without such nodes this one can't serve."""

    def __init__(
        self,
        parts: Station,
        peers: PeerBook,
        directory: Directory[P],
        own: Sequence[str] = (),
        allowed: Sequence[str] = (),
    ) -> None:
        """`own` addresses, and those that match patterns of `allowed` (as `fnmatch` reads them), may be dialled."""
        self._parts = parts
        self._peers = peers
        self._directory = directory
        self.own = tuple(own)
        self._allowed = tuple(allowed)
        self._links: dict[str, LinkTo[P]] = {}
        self._dialling: dict[str, asyncio.Task[LinkTo[P]]] = {}
        """Only of addresses that are dialled now: they come from whoever sends a request."""
        peers.gone = partial(self._gone, peers.gone)
        self.redial = Redial(self.of, own, peers)
        self.redial.unreached = partial(parts.readiness.say, "links")
        if self.needed:
            peers.unmet = lambda: any(address not in self._links and address not in self.redial for address in self.own)

    def replace_own(self, addresses: Sequence[str]) -> None:
        """These are the node's own from now on: others that it is connected to stay, and are dialled no more unless
        they are allowed."""
        self.own = tuple(addresses)
        self.redial.replace(addresses)

    def met(self, address: str) -> LinkTo[P] | None:
        """The node at `address`, if it is connected and was good for something last."""
        link = self._links.get(address)
        return link if link is not None and self._ready(link) else None

    async def of(self, address: str) -> LinkTo[P]:
        """Connect to the node at `address`, unless that is done.

        Raises `AddressRefused` for one that isn't allowed, `NotAPrefillNode`, `PeerLost`, `ContractMismatch`, and what
        `PeerBook.admit` raises.
        """
        if (link := self.met(address)) is not None:
            return link
        if address not in self._dialling:
            if address not in self.own and not any(fnmatchcase(address, pattern) for pattern in self._allowed):
                raise AddressRefused(address, (*self.own, *self._allowed))
            task = self._dialling[address] = begin(self._dial(address))
            task.add_done_callback(lambda _: self._dialling.pop(address))
        return await asyncio.shield(self._dialling[address])

    def forget(self, link: LinkTo[P], why: PdkvError | None = None) -> None:
        """It failed: `why`. The next request to this address connects again; what came later than that stays."""
        if self._links.get(link.address) is link:
            self._peers.mark(link.intro.name, PeerState.SUSPECT, f"{why.kind}: {why}" if why else "")

    def best_first(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """In the same order, but those that failed after those that didn't."""
        return tuple(sorted(addresses, key=lambda a: a in self._links and not self._ready(self._links[a])))

    async def probe(self, name: PeerName) -> None:
        """Half-open, for the keeper: a call and a read; both ways have to be good. The book says how it went."""
        link = next((link for link in self._links.values() if link.intro.name == name), None)
        if link is None:
            # Another life answers at its address, so only its memory is left to ask.
            return await self._peers.prove(name)
        try:
            if not self._ready(link):
                await self.of(link.address)
                return
            intro = await self._met(link.peer)
            if intro.name == name:
                await self._peers.prove(name)
            else:
                self._links[link.address] = LinkTo(link.address, link.peer, intro)
        except PdkvError as error:
            self._peers.failed(name, error)
            raise

    def _ready(self, link: LinkTo[P]) -> bool:
        peer = self._peers.get(link.intro.name)
        return peer is not None and peer.state is PeerState.READY

    async def _dial(self, address: str) -> LinkTo[P]:
        # Over a connection of its own: an old one may be waiting to be tried again, or lead to who was there before.
        self._directory.drop(address)
        try:
            peer = self._directory.peer(address)
            link = self._links[address] = LinkTo(address, peer, await self._met(peer))
        except PdkvError as error:
            # Whoever chose the address has to know which one it is about.
            error.fields = {"address": address, **error.fields}
            refused = self._told(address, error)
            self._unmet(address, refused)
            if refused is error:
                raise
            raise refused from error
        finally:
            if address not in self._links:
                self._directory.drop(address)
        self.redial.note(address, None)
        return link

    def _told(self, address: str, error: PdkvError) -> PdkvError:
        if self.needed and isinstance(error, RemoteError) and error.fields.get("code") == "UNIMPLEMENTED":
            return NotAPrefillNode(f"{address} is no prefill node: {error}", address=address)
        return error

    def _unmet(self, address: str, error: PdkvError) -> None:
        """A node that was met before is in the book of peers, whose keeper sees to it."""
        if address not in self._links:
            self.redial.note(address, error)

    async def _met(self, peer: P) -> NodeIntro:
        """Introductions both ways; in whatever life the node is, it is in the book afterwards."""
        try:
            intro = await peer.connect(self._parts.intro())
        except ContractMismatch as error:
            # The refusal speaks from the prefill node's side; what leaves here speaks from this one's.
            turned = [Difference(d.field, d.theirs, d.mine, d.rule) for d in error.differences]
            raise ContractMismatch(turned) from error
        await self._peers.admit(intro, needed=self.needed)
        return intro

    def _gone(self, others: Callable[[PeerName], None], name: PeerName) -> None:
        others(name)
        for link in [link for link in self._links.values() if link.intro.name == name]:
            del self._links[link.address]
            self._directory.drop(link.address)


class Links(LinksTo[PrefillPeer]):
    """Prefill nodes by address."""

    needed = True


class SourceLinks(LinksTo[SourcePeer]):
    """Other nodes that may have pages, by address."""

    needed = False
