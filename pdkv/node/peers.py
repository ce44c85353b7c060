"""The book of connected peers: who is let in, in which life, and how each of them is.

Guarantees: a peer is used only in the incarnation it connected with, under a contract that was compared field by
field; what happens to one node is serialised, whatever hangs on one holds up no other; a peer that failed is READY
again only after a read from it ended well; a new incarnation is added beside the old one, which goes when its last read
has settled; everything here runs on one event loop.

    CONNECTING ─► READY ─► SUSPECT ─► LOST ─► forgotten; from SUSPECT and LOST, READY again by a read that ends well
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakValueDictionary

import xxhash

from pdkv.contract import Contract, require_compatible, require_equal_shards
from pdkv.errors import ContractMismatch, Difference, PdkvError, ProtocolError, WrongIncarnation
from pdkv.ids import PeerName
from pdkv.kvcache.manager import CacheManager
from pdkv.node.base import Station
from pdkv.node.flow import begin, together
from pdkv.node.messages import Envelope, NodeIntro, NodeStatus, PeerStatus

_NAMED = 4
"""Peers in the reason why a node is unready."""


class PeerState(StrEnum):
    CONNECTING = "CONNECTING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    """Its last call, read or probe failed; the next one tries again."""
    LOST = "LOST"
    """Nothing has got through to it for long; or another life of the node took its place, and its reads run out."""


@dataclass(slots=True, eq=False)
class Peer:
    """One life of a node. Times are seconds of the book's clock."""

    intro: NodeIntro
    state: PeerState
    since_s: float
    """When it came into this state."""
    heard_s: float
    """The last sign of life."""
    probed_s: float = float("-inf")
    """When the last probe began."""
    failures: int = 0
    """Probes that failed since something got through."""
    error: str = ""
    """What failed last, also once it is over."""
    needed: bool = True
    """Without such peers the node can't serve; others only save it work."""
    leaving: bool = False
    """Out of use for good: its entry goes when the transfer engine has let go of it."""

    @property
    def name(self) -> PeerName:
        return self.intro.name

    @property
    def open(self) -> bool:
        """It got in, and isn't on its way out."""
        return self.state is not PeerState.CONNECTING and not self.leaving


class PeerBook:
    """Peers by name, in as many lives as have not ended."""

    def __init__(self, parts: Station, now: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._peers: dict[PeerName, Peer] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By node id; a lock lives while somebody holds it or waits for it."""
        self.now = now
        self.changed: Callable[[], None] = lambda: None
        """Called when a peer has come into another state."""
        self.gone: Callable[[PeerName], None] = lambda name: None
        """Called when nothing of a peer is left."""
        self.overlook: Callable[[Sequence[Difference]], bool] = lambda differences: False
        """Told of a contract that differs; whether its peer is let in all the same."""
        self.unmet: Callable[[], bool] = lambda: False
        """Whether there may be peers that this node was told of and hasn't met."""
        self._broken = False

    def __iter__(self) -> Iterator[Peer]:
        """Those that got in."""
        return iter([peer for peer in self._peers.values() if peer.open])

    @property
    def states(self) -> dict[PeerName, PeerState]:
        return {name: peer.state for name, peer in self._peers.items()}

    def get(self, name: PeerName) -> Peer | None:
        """A peer that got in and isn't on its way out."""
        peer = self._peers.get(name)
        return peer if peer is not None and peer.open else None

    # --- in ---------------------------------------------------------------------------------------------------------

    async def admit(self, intro: NodeIntro, *, needed: bool = True) -> None:
        """Compare contracts and add the peer's memory to the transfer engine; one that isn't READY is tried again. It
        is `needed` once it was said to be.

        Raises `ContractMismatch` with every differing field, `ProtocolError` for metadata that was cut, for an
        incarnation that introduced itself otherwise before, and for a node id whose other incarnation still answers;
        what `Transfer.add_peer` raises for one that can't be read from.
        """
        self._compare(intro.contract)
        checksum = xxhash.xxh3_64_intdigest(intro.agent_metadata)
        if checksum != intro.metadata_checksum:
            raise ProtocolError("agent metadata is damaged", have=checksum, announced=intro.metadata_checksum)
        await asyncio.shield(begin(self._admit(intro, needed=needed)))

    async def prove(self, name: PeerName) -> None:
        """Read from the peer: READY if that ends well, else it is SUSPECT, and the error is raised.

        Raises `WrongIncarnation` for a peer that isn't there, and what `Transfer.probe` and `add_peer` raise.
        """
        await asyncio.shield(begin(self._probe(name)))

    def _compare(self, theirs: Contract) -> None:
        try:
            require_compatible(self._parts.contract, theirs)
            require_equal_shards(self._parts.contract, theirs)
        except ContractMismatch as error:
            if not self.overlook(error.differences):
                raise

    async def _admit(self, intro: NodeIntro, *, needed: bool) -> None:
        async with self._alone_with(intro.name):
            peer = self.get(intro.name)
            if peer is None:
                await self._enter(intro, needed=needed)
                return
            if peer.intro != intro:
                raise ProtocolError(f"{intro.name} introduced itself otherwise before", peer=intro.name)
            peer.needed |= needed
            if peer.state is not PeerState.READY:
                await self._prove(peer)

    async def _probe(self, name: PeerName) -> None:
        async with self._alone_with(name):
            await self._prove(self._known(name))

    async def _enter(self, intro: NodeIntro, *, needed: bool) -> None:
        """A new life. The others of its node are probed meanwhile: if one answers, two nodes claim one id."""
        peer = Peer(intro, PeerState.CONNECTING, self.now(), self.now(), needed=needed)
        others = [other for other in self._peers.values() if other.open and other.name.node == intro.name.node]
        self._peers[peer.name] = peer
        try:
            async with together() as group:
                for other in others:
                    group.create_task(self._require_silent(other, peer.name))
                await self._added(peer)
        except BaseException:
            # It never got in: whoever dials under ever new names must not fill the book.
            self._drop(peer)
            self._let_go(peer)
            raise
        self._turn(peer, PeerState.READY)
        # Only now: an introduction that nothing stands behind must not push out a peer that was merely slow.
        for other in others:
            self._dismiss(other, f"{peer.name} took its place")

    async def _require_silent(self, other: Peer, newcomer: PeerName) -> None:
        if other.state is PeerState.LOST:
            return  # it has had its time to answer
        try:
            await asyncio.wrap_future(self._parts.transfer.probe(other.name))
        except PdkvError:
            return
        words = f"{newcomer} can't take the place of {other.name}, which still answers"
        way_out = "give each a node_id of its own (vLLM: engine_id)"
        raise ProtocolError(f"{words}: two nodes run under one name, {way_out}", peer=other.name)

    async def _prove(self, peer: Peer) -> None:
        try:
            # An engine that has given it up has to be told of it again; where it is known, nothing happens.
            await self._added(peer)
            await asyncio.wrap_future(self._parts.transfer.probe(peer.name))
        except PdkvError as error:
            self.failed(peer.name, error)
            raise
        self._turn(peer, PeerState.READY)

    async def _added(self, peer: Peer) -> None:
        intro = peer.intro
        await asyncio.wrap_future(
            self._parts.transfer.add_peer(peer.name, intro.agent_metadata, intro.metadata_checksum, intro.pool)
        )

    # --- how it is --------------------------------------------------------------------------------------------------

    def intro(self, name: PeerName) -> NodeIntro:
        """Raises `WrongIncarnation` for a peer that is not connected in this incarnation."""
        return self._known(name).intro

    def check(self, envelope: Envelope) -> None:
        """Raises `WrongIncarnation` for another life of either node, `ContractMismatch` for another content."""
        if envelope.receiver != self._parts.name:
            raise WrongIncarnation(
                f"message is for {envelope.receiver}, this is {self._parts.name}",
                meant=envelope.receiver,
                here=self._parts.name,
            )
        sender = self._known(envelope.sender)
        sender.heard_s = self.now()
        met, theirs = sender.intro.contract.content_fingerprint, envelope.content_fingerprint
        if theirs != met:  # that of this node, but for a peer that was overlooked
            raise ContractMismatch([Difference("content_fingerprint", met.hex(), theirs.hex(), "content")])

    def mark(self, name: PeerName, state: PeerState, why: str = "") -> None:
        """READY after a request that went well, SUSPECT after a call or read that failed, LOST after long; `why`.

        Nothing happens for a peer that isn't in the book any more; one that is LOST doesn't get SUSPECT again.
        """
        peer = self.get(name)
        if peer is None:
            return
        peer.error = why or peer.error
        if state is not PeerState.SUSPECT or peer.state is PeerState.READY:
            self._turn(peer, state)

    def failed(self, name: PeerName, error: PdkvError) -> None:
        """A probe of the peer came to nothing."""
        peer = self.get(name)
        if peer is not None:
            peer.failures += 1
            self.mark(name, PeerState.SUSPECT, f"{error.kind}: {error}")
            self.speak()

    def _turn(self, peer: Peer, state: PeerState) -> None:
        now_s = self.now()
        if state is PeerState.READY:
            peer.failures, peer.heard_s = 0, now_s
        if state is not peer.state:
            peer.state, peer.since_s = state, now_s
            self.changed()
        self.speak()

    def speak(self) -> None:
        """A data path broken to all peers it needs makes the node unready; one dead one doesn't, nor having none."""
        peers = [peer for peer in self if peer.needed]
        broken = bool(peers) and all(peer.failures for peer in peers) and not self.unmet()
        if broken is self._broken:
            return
        self._broken = broken
        words = "; ".join(f"{peer.name}: {peer.error}" for peer in peers[:_NAMED]) if broken else ""
        self._parts.readiness.say("peers", words and f"no peer of {len(peers)} can be reached: {words}")

    # --- out --------------------------------------------------------------------------------------------------------

    async def forget(self, name: PeerName, why: str) -> None:
        """No message and no new read of it any more, in this life; its entry stays until its last read has settled.

        Waits for an attempt to reach it that is under way: it stays if that has made it READY.
        """
        async with self._alone_with(name):
            peer = self.get(name)
            if peer is not None and peer.state is not PeerState.READY:
                self._dismiss(peer, why)

    def _dismiss(self, peer: Peer, why: str) -> None:
        self._turn(peer, PeerState.LOST)
        peer.leaving, peer.error = True, why
        self._let_go(peer)
        self.speak()

    def _let_go(self, peer: Peer) -> None:
        removed = asyncio.wrap_future(self._parts.transfer.remove_peer(peer.name))
        removed.add_done_callback(lambda done: self._gone(peer, done))

    def _gone(self, peer: Peer, removed: asyncio.Future[None]) -> None:
        """An engine that couldn't remove it says why; the peer is out of use all the same."""
        if not removed.cancelled() and (error := removed.exception()):
            peer.error = str(error)
            return
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        # The same life may have come back meanwhile, with an entry of its own.
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        if peer.name not in self._peers:
            self.gone(peer.name)

    def _known(self, name: PeerName) -> Peer:
        peer = self.get(name)
        if peer is None:
            raise WrongIncarnation(f"{name} is not connected here; call Connect", peer=name)
        return peer

    def _alone_with(self, name: PeerName) -> asyncio.Lock:
        return self._locks.setdefault(name.node, asyncio.Lock())

    # --- told -------------------------------------------------------------------------------------------------------

    def status(self, role: str, manager: CacheManager, *, leases: int, requests: int) -> NodeStatus:
        parts, now_s = self._parts, self.now()
        peers = {
            str(name): PeerStatus(peer.state, now_s - peer.since_s, parts.transfer.lane(name), peer.error)
            for name, peer in self._peers.items()
        }
        reads = parts.transfer.status()
        return NodeStatus(
            name=parts.name,
            role=role,
            pages=manager.census(),
            leases=leases,
            requests=requests,
            backend=parts.transfer.backend_name,
            peers=peers,
            contract=parts.contract,
            quarantine={str(of): why for of, why in manager.quarantine_reasons().items()},
            unready=parts.readiness.unready,
            unsettled={
                str(row.peer): f"{row.reads} reads of {row.pages} pages, the oldest given up {row.oldest_s:.1f} s ago"
                for row in reads.unsettled
            },
            fences=reads.rotations,
            fence_error=reads.fence_error,
            memory=parts.pool.memory.facts() | {"registered": str(reads.registration)},
            rails={rail.device or "any": str(rail) for rail in reads.rails},
        )
