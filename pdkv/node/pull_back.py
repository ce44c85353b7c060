"""Pages of a prompt that the asking decode node has and this prefill node lacks: read from it, not computed again.

Guarantees: what the caller offers is of this very prompt, or the request is refused by name before anything moves; its
pages are committed as any that arrive, verified and in the order of the prompt; that takes `limit_s` at most, and what
fails is counted and told: the request goes on with what was committed by then, and computes the rest. Pages that a read
may still write to are replaced.

The caller keeps what it offers for as long as it runs the request that this one serves. So that request is the lease.
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
    ProtocolError,
    ReservationDead,
    TransferError,
)
from pdkv.ids import PeerName, RemotePages
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.flow import deadline, together
from pdkv.node.intake import Due, Intake
from pdkv.node.messages import PagesSealed, PrefillRequest
from pdkv.node.peers import PeerBook, PeerState
from pdkv.node.prompt import Prompt
from pdkv.node.stages import Stage

log = logging.getLogger(__name__)

PIECE_PAGES = 64
"""Of one read: its pages are verified and committed while the next ones arrive, and kept if those don't."""
OF_THIS_NODE = (ConfigError, IntegrityError, ReservationDead)
"""Raised here, they say that computing would not help."""
STAGES = {Stage.READING: Stage.PULLING, Stage.COMMITTED: Stage.PULLED}


@dataclass(frozen=True, slots=True)
class Pulled:
    """A request's pages after a pull back."""

    reservation: Reservation
    """In place of the one before, which has ended: it has hit what was pulled."""
    pages: int


class PullBack:
    """Of one prefill node."""

    def __init__(self, parts: NodeParts, peers: PeerBook, *, limit_s: float | None) -> None:
        """`limit_s` None: nothing is pulled back."""
        self._parts = parts
        self._peers = peers
        self._limit_s = limit_s
        self.pages = 0
        self.failures: Counter[str] = Counter()
        """By kind of error."""

    def check(self, request: PrefillRequest, prompt: Prompt) -> None:
        """Raises `ProtocolError` for pages of another prompt, `BoundsError` for some that the caller can't have."""
        offered = request.offered
        if offered is None:
            return
        count = len(offered.hashes)
        if offered.first_index or offered.hashes != prompt.hashes.part(0, min(count, len(prompt.hashes))):
            raise ProtocolError("offered pages are not the prompt's first ones", first=offered.first_index, count=count)
        RemotePages.checked(offered.page_ids, self._peers.intro(request.envelope.sender).pool.num_pages)

    async def run(self, request: PrefillRequest, prompt: Prompt, reservation: Reservation) -> Pulled:
        """Bring what is offered beyond what `reservation` has. Raises what is this node's own, and `CapacityError` if
        there are no pages in place of those that a read without an end holds back."""
        offered, sender, limit_s = request.offered, request.envelope.sender, self._limit_s
        first, stop = reservation.committed, min(len(offered.hashes) if offered else 0, prompt.prefill_hit_pages)
        if offered is None or limit_s is None or first >= stop or not self._ready(sender):
            return Pulled(reservation, 0)

        def at(stage: Stage) -> None:
            if stage in STAGES:
                self._parts.at(STAGES[stage], request.request_id)

        due = Due(prompt=prompt, at=at)
        try:
            async with deadline(limit_s, "pulling back"), together() as group:
                intake = Intake(self._parts, self._peers.intro(sender), due, reservation, group, limit_s)
                for piece in pieces(offered, first, stop):
                    intake.announce(piece)
                await intake.finish()
        except OF_THIS_NODE:
            raise
        except PdkvError as error:
            self._failed(request, error, stop - reservation.committed)
        self.pages += due.count.pages
        return Pulled(self._exchanged(reservation, prompt, request.priority), due.count.pages)

    def _ready(self, peer: PeerName) -> bool:
        """One that failed is proved first, by the keeper: nobody's request waits for it twice."""
        found = self._peers.get(peer)
        return found is not None and found.state is PeerState.READY

    def _failed(self, request: PrefillRequest, error: PdkvError, pages: int) -> None:
        self.failures[error.kind] += 1
        if isinstance(error, PeerLost | TransferError | DeadlineExceeded):
            self._peers.mark(request.envelope.sender, PeerState.SUSPECT, f"{error.kind}: {error}")
        log.warning(
            "request %s: %d pages of %s could not be pulled back and are computed: %s: %s",
            request.request_id,
            pages,
            request.envelope.sender,
            error.kind,
            error,
        )

    def _exchanged(self, old: Reservation, prompt: Prompt, priority: int) -> Reservation:
        """The same request's, anew: it hits what is committed, as the pages that stand in the tree."""
        manager = self._parts.manager
        manager.end(old)
        made = manager.reserve(prompt.hashes, prompt.pages, max_hit_pages=old.committed, priority=priority)
        made.public = prompt.public
        return made


def pieces(offered: PagesSealed, first: int, stop: int) -> Iterator[PagesSealed]:
    """Pages [first, stop) of those offered, which begin with the prompt's first."""
    for at in range(first, stop, PIECE_PAGES):
        part = slice(at, min(at + PIECE_PAGES, stop))
        yield PagesSealed(
            at,
            offered.hashes.part(at, part.stop),
            np.array(offered.page_ids[part]),
            offered.generations[part],
            offered.digests[part],
        )
