"""Reads pages that a peer lends into a reservation: the one way in which a node gets pages that others happen to have.

Guarantees: such pages are committed as any that arrive: verified, and in the order of the prompt; that takes `limit_s`
at most; whatever fails is counted and told, and the request goes on with what was committed by then. Pages that a read
may still write to are in quarantine then: the reservation has to be exchanged before anything else is done with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdkv.errors import (
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    PdkvError,
    PeerLost,
    ReservationDead,
    TransferError,
)
from pdkv.ids import PeerName
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.flow import deadline, together
from pdkv.node.intake import Due, Intake
from pdkv.node.messages import PagesSealed
from pdkv.node.peers import PeerBook, PeerState
from pdkv.node.traced import transfer_told

log = logging.getLogger(__name__)

PIECE_PAGES = 64
"""Of one read: its pages are verified and committed while the next ones arrive, and kept if those don't."""
OF_THIS_NODE = (ConfigError, IntegrityError, ReservationDead)
"""Raised here, they say that nothing else would help."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Pages of a prompt that a peer keeps for this node."""

    peer: PeerName
    pages: PagesSealed
    stop: int
    """The page of the prompt after the last one that is wanted of them."""
    limit_s: float


class Borrower:
    """Of one node."""

    def __init__(self, parts: NodeParts, peers: PeerBook) -> None:
        self._parts = parts
        self._peers = peers
        self.pages = 0
        """Since the start."""
        self.failures: Counter[str] = Counter()
        """By kind of error."""

    async def read(self, lent: Lent, due: Due, reservation: Reservation) -> int:
        """Bring the pages after those that `reservation` has committed, into places that it has.

        Returns how many came. Raises only what is this node's own.
        """
        first, before = reservation.committed, due.count.pages
        try:
            peer = self._peers.intro(lent.peer)
            with transfer_told(self._parts, lent.peer, due.count):
                async with deadline(lent.limit_s, f"reading what {lent.peer} lends"), together() as group:
                    intake = Intake(self._parts, peer, due, reservation, group, lent.limit_s)
                    for piece in pieces(lent.pages, first, lent.stop):
                        intake.announce(piece)
                    await intake.finish()
        except OF_THIS_NODE:
            raise
        except PdkvError as error:
            self.failed(lent.peer, error, f"{due.request_id}: {lent.stop - reservation.committed} pages")
        came = due.count.pages - before
        self.pages += came
        return came

    def ready(self, name: PeerName) -> bool:
        """Whether to ask the peer for anything: one that failed is proved first, so that nobody waits for it twice."""
        peer = self._peers.get(name)
        return peer is not None and peer.state is PeerState.READY

    def failed(self, peer: PeerName, error: PdkvError, what: object) -> None:
        """Count it, tell it, and use the peer only when it was proved, if that is what the error says of it."""
        self.failures[error.kind] += 1
        if isinstance(error, PeerLost | TransferError | DeadlineExceeded):
            self._peers.mark(peer, PeerState.SUSPECT, f"{error.kind}: {error}")
        log.warning("request %s could not be borrowed from %s: %s: %s", what, peer, error.kind, error)


def pieces(lent: PagesSealed, first: int, stop: int) -> Iterator[PagesSealed]:
    """Pages [first, stop) of the prompt, of those that were lent."""
    for at in range(first, stop, PIECE_PAGES):
        part = slice(at - lent.first_index, min(at + PIECE_PAGES, stop) - lent.first_index)
        yield PagesSealed(
            at,
            lent.hashes.part(part.start, part.stop),
            np.array(lent.page_ids[part]),
            lent.generations[part],
            lent.digests[part],
        )
