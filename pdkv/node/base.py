"""What a prefill and a decode node are made of.

Guarantees: parts are closed in the order in which nothing writes to what has gone already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from pdkv.contract import Contract
from pdkv.geometry.page_layout import PageFormat
from pdkv.ids import LocalPages, PageHashes, PeerName
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.flow import Worker
from pdkv.node.messages import Envelope, NodeIntro, PagesSealed
from pdkv.node.ports import Drafter, Engine, Transfer
from pdkv.node.readiness import Readiness
from pdkv.node.stages import Hook, no_hook


@dataclass(frozen=True, slots=True)
class Station:
    """A node as its peers know it: a pool that they read, and the transfer engine that reads theirs."""

    name: PeerName
    contract: Contract
    pool: SlotPool
    transfer: Transfer
    readiness: Readiness = field(default_factory=Readiness, kw_only=True)
    """Where a part that can't serve says so."""

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


@dataclass(slots=True)
class Moved:
    """Pages between this node and its peers, since the start."""

    read: int = 0
    """Proved, and in their places here."""
    announced: int = 0
    """Or lent, to a peer that asked for them. How many of these it read, only that peer knows."""

    def bytes(self, fmt: PageFormat) -> dict[str, int]:
        """By direction and cache."""
        pages = {"read": self.read, "announced": self.announced}
        caches = {"main": fmt.main_bytes, "index": fmt.index_bytes}
        return {f"{way}_{name}_bytes": count * size for way, count in pages.items() for name, size in caches.items()}


@dataclass(frozen=True, slots=True)
class NodeParts(Station):
    """One rank: one process, one pool, one transfer engine, one model."""

    manager: CacheManager
    verifier: Verifier
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

    moved: Moved = field(default_factory=Moved)

    @property
    def available_pages(self) -> int:
        """Free or evictable."""
        return self.manager.allocator.free_count + self.manager.tree.evictable

    @property
    def uses(self) -> dict[str, int]:
        """Of the cached pages."""
        return {"evictable": self.manager.tree.evictable, "locked": self.manager.tree.locked}

    def columns(self, first: int, pages: LocalPages, hashes: PageHashes) -> PagesSealed:
        """Sealed pages as a peer is told of them; `first` is the first one's place in its prompt.

        Raises `BoundsError` for one that isn't sealed.
        """
        manager = self.manager
        return PagesSealed(first, hashes, np.array(pages.array), manager.generations(pages), manager.digests(pages))

    def announced(self, first: int, pages: LocalPages, hashes: PageHashes) -> PagesSealed:
        """As `columns`, to a peer that asked for them."""
        self.moved.announced += len(pages)
        return self.columns(first, pages, hashes)

    def close(self) -> None:
        """Ends the threads, then the agents (the fence), then the memory may go."""
        self.steps.close()
        self.digests.close()
        self.transfer.close()
