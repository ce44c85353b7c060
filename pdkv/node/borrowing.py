"""A decode node's way to pages that any other node has: asks its sources, and borrows from the one that has most.

Guarantees: a source is asked only while it is known to be there, for `locate_s` at most, and all at once; what none of
them answers in time costs nothing else, and who doesn't is proved before it is asked again. Pages are borrowed only
where that brings more of the prompt than this node has and than the prefill node has that it turns to; a loan is over
before its lease ends, so nothing renews it; while one lasts nobody waits for pages of this node, or two that lend to
each other could wait for each other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from pdkv.errors import DeadlineExceeded, PdkvError
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.borrower import Borrower, Lent
from pdkv.node.flow import begin, deadline
from pdkv.node.intake import Wanted
from pdkv.node.links import LinkTo, SourceLinks
from pdkv.node.messages import LeaseCall, LendCall, Loan, LocateCall
from pdkv.node.peers import PeerBook
from pdkv.node.ports import SourcePeer
from pdkv.node.prompt import Prompt
from pdkv.node.pull import require_ttl
from pdkv.node.stages import Stage

RELEASE_S = 5.0
"""Longest wait for a source to hear that its pages may go; after that, the lease expires by itself."""
Farewell = Callable[[Coroutine[None, None, None]], None]
Room = Callable[[int], int]
"""Takes pages for so many of the sequence, if that may be now; says how many there are."""


@dataclass(frozen=True, slots=True)
class Limits:
    locate_s: float
    borrow_s: float


class Borrowing:
    """Of one decode node."""

    def __init__(
        self, parts: NodeParts, peers: PeerBook, sources: SourceLinks, addresses: Sequence[str], limits: Limits
    ) -> None:
        self.borrower = Borrower(parts, peers)
        self.addresses = tuple(addresses)
        self._parts = parts
        self._sources = sources
        self._limits = limits

    async def find(
        self, wanted: Wanted, have: int, prefill: LinkTo[SourcePeer] | None = None
    ) -> LinkTo[SourcePeer] | None:
        """The source that has most of the prompt, if that is more than `have` and than `prefill` has."""
        links = [link for address in self.addresses if (link := self._met(address))]
        if not links or usable(wanted.prompt, len(wanted.prompt.hashes)) <= have:
            return None
        asked = {begin(self._located(link, wanted)): link for link in (*links, *([prefill] if prefill else []))}
        try:
            _, late = await asyncio.wait(asked, timeout=self._limits.locate_s)
        finally:
            for task in asked:
                task.cancel()
        for link in {asked[task] for task in late}.difference([prefill]):
            self.borrower.failed(link.intro.name, _late(self._limits.locate_s), f"{wanted.request_id}: pages")
        found = {link: task.result() for task, link in asked.items() if task.done() and not task.cancelled()}
        least = max(have, found.pop(prefill, 0) if prefill else 0)
        best = max(found, key=lambda link: found[link], default=None)
        return best if best is not None and found[best] > least else None

    async def borrow(
        self,
        wanted: Wanted,
        reservation: Reservation,
        source: LinkTo[SourcePeer],
        room: Room,
        say_farewell: Farewell,
    ) -> int:
        """Bring what the source lends beyond what `reservation` has committed, as far as it has `room` by now; returns
        how many pages came."""
        prompt, first = wanted.prompt, reservation.committed
        limit_s = min(self._limits.borrow_s, wanted.until_s - asyncio.get_running_loop().time())
        envelope = self._parts.envelope(source.intro.name)
        try:
            async with deadline(limit_s, f"borrowing from {source.intro.name}"):
                loan = await source.peer.lend(LendCall(envelope, _askable(prompt), first))
                require_ttl(loan.lease.ttl_s)
        except PdkvError as error:
            self.borrower.failed(source.intro.name, error, f"{wanted.request_id}: pages")
            return 0
        try:
            wanted.at(Stage.LENT)
            lent = self._lent(loan, source, prompt, limit_s)
            return await self.borrower.read(replace(lent, stop=min(lent.stop, room(lent.stop))), wanted, reservation)
        finally:
            say_farewell(self._release(source, LeaseCall(envelope, loan.lease.lease_id)))

    def _lent(self, loan: Loan, source: LinkTo[SourcePeer], prompt: Prompt, limit_s: float) -> Lent:
        stop = usable(prompt, loan.pages.first_index + len(loan.pages.hashes))
        return Lent(source.intro.name, loan.pages, stop, min(limit_s, loan.lease.ttl_s))

    def _met(self, address: str) -> LinkTo[SourcePeer] | None:
        """One that isn't there yet is dialled beside the request, for later ones."""
        link = self._sources.met(address)
        if link is None:
            begin(self._sources.of(address))
        return link

    async def _located(self, link: LinkTo[SourcePeer], wanted: Wanted) -> int:
        """Pages of the prompt that the node could lend; none if it doesn't say."""
        try:
            call = LocateCall(self._parts.envelope(link.intro.name), _askable(wanted.prompt))
            return usable(wanted.prompt, await link.peer.locate(call))
        except PdkvError as error:
            self.borrower.failed(link.intro.name, error, f"{wanted.request_id}: pages")
            return 0

    async def _release(self, source: LinkTo[SourcePeer], call: LeaseCall) -> None:
        """If it can't be told, the lease expires by itself."""
        try:
            async with deadline(RELEASE_S, "releasing a lease"):
                await source.peer.release_lease(call)
        except PdkvError as error:
            self.borrower.failed(source.intro.name, error, "release")


def usable(prompt: Prompt, pages: int) -> int:
    """Of so many first pages of the prompt, what a decode node may hit."""
    return max(min(pages, prompt.decode_hit_pages) - prompt.drop_pages, 0)


def _late(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"locate did not end within {seconds:.3g} s", what="locate", seconds=seconds)


def _askable(prompt: Prompt) -> PageHashes:
    return prompt.hashes.part(0, prompt.decode_hit_pages)
