"""Keeps the book of peers true while nobody asks for anything.

Guarantees: a peer that nothing was heard of for a while is probed; one that failed is probed half-open, one probe at a
time, until it is READY again; it is LOST after a bounded time and, if it stays silent, forgotten after another, with
its memory and its connection; a peer that comes back after that is a new one. Whatever one of them does, the others are
probed at their own pace.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pdkv.ids import PeerName
from pdkv.node.peers import Peer, PeerBook, PeerState
from pdkv.node.rounds import Rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    probe_s: float = 5.0
    """A READY peer is probed when nothing was heard of it for so long, a LOST one as often."""
    retry_s: float = 1.0
    """Between two probes of a SUSPECT one."""
    lost_s: float = 15.0
    """SUSPECT for so long is LOST."""
    forget_s: float = 60.0
    """LOST for so long, and silent, is forgotten. Longer than a lease, so that it has none by then."""


class PeerKeeper(Rounds[PeerName]):
    """Has `run`, for the node's life, and `step`."""

    def __init__(self, book: PeerBook, probe: Callable[[PeerName], Awaitable[None]], settings: KeeperSettings) -> None:
        """`probe` tries every path to a peer and says in the book how that went."""
        super().__init__(lambda: book.now())
        self._book = book
        self._probe = probe
        self._settings = settings
        book.changed = self.changed.set

    def due(self) -> Mapping[PeerName, float]:
        return {peer.name: self._due_s(peer) for peer in self._book}

    async def visit(self, key: PeerName) -> None:
        peer, settings, now_s = self._book.get(key), self._settings, self._now()
        if peer is None:
            return
        peer.probed_s = now_s
        if peer.state is PeerState.LOST and now_s >= max(peer.since_s, peer.heard_s) + settings.forget_s:
            log.warning("%s is forgotten: it was lost for %.3g s; %s", key, now_s - peer.since_s, peer.error)
            await self._book.forget(key, f"forgotten after {settings.forget_s:g} s without a sign of life")
            return
        if peer.state is PeerState.SUSPECT and now_s >= peer.since_s + settings.lost_s:
            log.warning("%s is lost: nothing got through for %.3g s; %s", key, now_s - peer.since_s, peer.error)
            self._book.mark(key, PeerState.LOST)
        await self._probe(key)

    def _due_s(self, peer: Peer) -> float:
        if peer.state is PeerState.SUSPECT:
            return peer.probed_s + self._settings.retry_s
        return max(peer.probed_s, peer.heard_s if peer.state is PeerState.READY else 0.0) + self._settings.probe_s
