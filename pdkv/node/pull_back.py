"""Pages of a prompt that the asking decode node has and this prefill node lacks: read from it, not computed again.

Guarantees: what the caller offers is of this very prompt, or the request is refused by name before anything moves; it
is read as all that is lent (`borrower`), and what doesn't come is computed.

The caller keeps what it offers for as long as it runs the request that this one serves. So that request is the lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ProtocolError
from pdkv.ids import RemotePages
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.borrower import Borrower, Lent
from pdkv.node.intake import Due
from pdkv.node.messages import PrefillRequest
from pdkv.node.peers import PeerBook
from pdkv.node.prompt import Prompt
from pdkv.node.stages import Stage

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
        self.borrower = Borrower(parts, peers)
        self._parts = parts
        self._peers = peers
        self._limit_s = limit_s

    def check(self, request: PrefillRequest, prompt: Prompt) -> None:
        """Raises `ProtocolError` for pages of another prompt, `BoundsError` for some that the caller can't have."""
        offered = request.offered
        if offered is None:
            return
        count = len(offered.hashes)
        if offered.first_index or offered.hashes != prompt.hashes.part(0, min(count, len(prompt.hashes))):
            raise ProtocolError("offered pages are not the prompt's first ones", first=offered.first_index, count=count)
        RemotePages.checked(offered.page_ids, self._peers.intro(request.envelope.sender).pool.num_pages)

    def lent(self, request: PrefillRequest, prompt: Prompt) -> Lent | None:
        """What of the prompt's first pages can be had from the caller; None: nothing."""
        offered, sender = request.offered, request.envelope.sender
        if offered is None or self._limit_s is None or not self.borrower.ready(sender):
            return None
        return Lent(sender, offered, min(len(offered.hashes), prompt.prefill_hit_pages), self._limit_s)

    async def run(self, request: PrefillRequest, prompt: Prompt, reservation: Reservation) -> Pulled:
        """Bring what is offered beyond what `reservation` has. Raises what is this node's own, and `CapacityError` if
        there are no pages in place of those that a read without an end holds back."""
        lent = self.lent(request, prompt)
        if lent is None or reservation.committed >= lent.stop:
            return Pulled(reservation, 0)

        def at(stage: Stage) -> None:
            if stage in STAGES:
                self._parts.at(STAGES[stage], request.request_id)

        due = Due(request_id=request.request_id, prompt=prompt, at=at)
        pages = await self.borrower.read(lent, due, reservation)
        return Pulled(self._exchanged(reservation, prompt, request.priority), pages)

    def _exchanged(self, old: Reservation, prompt: Prompt, priority: int) -> Reservation:
        """The same request's, anew: it hits what is committed, as the pages that stand in the tree."""
        manager = self._parts.manager
        manager.end(old)
        made = manager.reserve(prompt.hashes, prompt.pages, max_hit_pages=old.committed, priority=priority)
        made.public = prompt.public
        return made
