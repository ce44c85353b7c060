"""What a prefill and a decode node have in common: their parts, and the book of connected peers.

Guarantees: a peer is used only in the incarnation it connected with, under a contract that was compared field by
field; adding one peer twice at once happens once; everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakValueDictionary

import xxhash

from pdkv.contract import Contract, require_compatible, require_equal_shards
from pdkv.errors import ContractMismatch, Difference, PdkvError, ProtocolError, WrongIncarnation
from pdkv.ids import PeerName
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.flow import Worker
from pdkv.node.messages import Envelope, NodeIntro, NodeStatus
from pdkv.node.ports import Drafter, Engine, Transfer
from pdkv.node.stages import Hook, no_hook


@dataclass(frozen=True, slots=True)
class NodeParts:
    """One rank: one process, one pool, one transfer engine, one model."""

    name: PeerName
    contract: Contract
    pool: SlotPool
    manager: CacheManager
    verifier: Verifier
    transfer: Transfer
    engine: Engine
    steps: Worker
    """The engine's own thread."""
    digests: Worker
    drafter: Drafter | None = None
    """Proposes tokens on a decode node and, with a draft layer, writes its rows on both; none: no speculation."""

    barrier: Callable[[], Awaitable[None]] | None = None
    """Of a decode group's leader: until every rank has done what this one's manager has; see `node.group`."""

    at: Hook = no_hook
    """Called at each stage of a request's life, in the node's loop; a fault plan hooks in here."""

    def intro(self) -> NodeIntro:
        return NodeIntro(
            name=self.name,
            contract=self.contract,
            agent_metadata=self.transfer.metadata,
            metadata_checksum=self.transfer.metadata_checksum,
            pool=self.pool.map(),
        )

    def envelope(self, receiver: PeerName) -> Envelope:
        return Envelope(self.name, receiver, self.contract.content_fingerprint)

    def close(self) -> None:
        """Ends the threads, then the agents (the fence), then the memory may go."""
        self.steps.close()
        self.digests.close()
        self.transfer.close()


class PeerState(StrEnum):
    CONNECTING = "CONNECTING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    """Its last call failed; the next one tries again."""
    LOST = "LOST"


class PeerBook:
    """Peers by name: one incarnation of each node, whose memory goes only when its last read has ended."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._intros: dict[PeerName, NodeIntro] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock lives while somebody holds it or waits for it."""
        self.states: dict[PeerName, PeerState] = {}

    async def admit(self, intro: NodeIntro) -> None:
        """Compare contracts and add the peer's memory to the transfer engine. Idempotent for one incarnation; one whose
        last call or read failed is tried again.

        Raises `ContractMismatch` with every differing field, `ProtocolError` for metadata that was cut, for an
        incarnation that introduced itself otherwise before, and for a node id whose other incarnation still answers.
        """
        require_compatible(self._parts.contract, intro.contract)
        require_equal_shards(self._parts.contract, intro.contract)
        checksum = xxhash.xxh3_64_intdigest(intro.agent_metadata)
        if checksum != intro.metadata_checksum:
            raise ProtocolError("agent metadata is damaged", have=checksum, announced=intro.metadata_checksum)
        lock = self._locks.setdefault(intro.name.node, asyncio.Lock())
        async with lock:
            if self._intros.get(intro.name, intro) != intro:
                raise ProtocolError(f"{intro.name} introduced itself otherwise before", peer=intro.name)
            if self.states.get(intro.name) is PeerState.READY:
                return
            old = await self._silent(intro.name)
            self.states[intro.name] = PeerState.CONNECTING
            try:
                await asyncio.wrap_future(
                    self._parts.transfer.add_peer(intro.name, intro.agent_metadata, intro.metadata_checksum, intro.pool)
                )
            except BaseException:
                if intro.name in self._intros:
                    self.states[intro.name] = PeerState.LOST
                else:
                    # It never got in: whoever dials under ever new names must not fill the book.
                    del self.states[intro.name]
                raise
            self._intros[intro.name] = intro
            self.states[intro.name] = PeerState.READY
            # Only now: an introduction that nothing stands behind must not push out a peer that was merely slow.
            for peer in old:
                self._intros.pop(peer, None)
                del self.states[peer]
                self._parts.transfer.remove_peer(peer)

    async def _silent(self, newcomer: PeerName) -> list[PeerName]:
        """The node's other incarnations. Raises `ProtocolError` if one still answers: then two nodes claim one id."""
        old = [peer for peer in self.states if peer.node == newcomer.node and peer != newcomer]
        for peer in old:
            try:
                await asyncio.wrap_future(self._parts.transfer.probe(peer))
            except PdkvError:
                continue
            raise ProtocolError(f"{newcomer} can't take the place of {peer}, which still answers", peer=peer)
        return old

    def intro(self, peer: PeerName) -> NodeIntro:
        """Raises `WrongIncarnation` for a peer that never connected in this incarnation."""
        if peer not in self._intros:
            raise WrongIncarnation(f"{peer} is not connected here; call Connect", peer=peer)
        return self._intros[peer]

    def check(self, envelope: Envelope) -> None:
        """Raises `WrongIncarnation` for another life of either node, `ContractMismatch` for another content."""
        if envelope.receiver != self._parts.name:
            raise WrongIncarnation(
                f"message is for {envelope.receiver}, this is {self._parts.name}",
                meant=envelope.receiver,
                here=self._parts.name,
            )
        self.intro(envelope.sender)
        mine = self._parts.contract.content_fingerprint
        if envelope.content_fingerprint != mine:
            raise ContractMismatch(
                [Difference("content_fingerprint", mine.hex(), envelope.content_fingerprint.hex(), "content")]
            )

    def mark(self, peer: PeerName, state: PeerState) -> None:
        """Nothing happens for a peer that is not in the book any more."""
        if peer in self.states:
            self.states[peer] = state

    def status(self, role: str, *, leases: int, requests: int) -> NodeStatus:
        parts = self._parts
        return NodeStatus(
            name=parts.name,
            role=role,
            pages=parts.manager.census(),
            leases=leases,
            requests=requests,
            backend=parts.transfer.backend_name,
            lanes={str(p): parts.transfer.lane(p) for p in self._intros},
            peers={str(p): s.value for p, s in self.states.items()},
            contract=parts.contract,
            quarantine={str(of): why for of, why in parts.manager.quarantine_reasons().items()},
        )
