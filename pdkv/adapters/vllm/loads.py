"""Brings prompts that other engines have computed into this one's blocks.

Guarantees: a block counts as loaded only if it was read whole, the source's row said afterwards that it was that page
of that prompt, and its digest is the announced one; a load ends only when nothing can land in its blocks any more, with
the blocks that it didn't bring, and why, whatever happens to the other engine; it doesn't outlast its lease, which
nobody renews, by more than the end of a read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pdkv.errors import (
    BoundsError,
    DigestMismatch,
    IntegrityError,
    LeaseExpired,
    PdkvError,
    PeerLost,
    ProtocolError,
    StalePages,
    TransferError,
    TransferUnsettled,
    WrongIncarnation,
)
from pdkv.ids import LocalPages, PageHashes, RemotePages, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import Station
from pdkv.node.flow import Worker, begin
from pdkv.node.intake import portions
from pdkv.node.links import LinkTo, SourceLinks
from pdkv.node.messages import LeaseCall, LendCall, Loan, NodeIntro
from pdkv.node.ports import SourcePeer
from pdkv.node.pull import require_ttl
from pdkv.transfer.orders import Flow, ReadOrder, ReadStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Pages [first, len(hashes)) of a prompt, and where they belong."""

    request_id: str
    hashes: PageHashes
    first: int
    pages: LocalPages
    address: str


@dataclass(slots=True)
class Loaded:
    """What became of a load."""

    pages: int = 0
    """That came, from the first wanted one on."""
    bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    """Of posting the reads; over a lane where the caller copies, the copy is in it."""
    error: PdkvError | None = None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What to do about a proof that fails: `told` of it, and `shadow`: go on as if it hadn't."""

    shadow: bool = False
    told: Callable[[PdkvError], None] = field(default=lambda error: None)


@dataclass(frozen=True, slots=True)
class _Source:
    intro: NodeIntro
    loan: Loan
    number: int
    """Of the load."""
    ends_s: float
    """The lease, in the loop's seconds, if the loan took no time to get here."""

    @property
    def left_s(self) -> float:
        return self.ends_s - asyncio.get_running_loop().time()

    @contextmanager
    def bounding(self) -> Iterator[None]:
        """What isn't there once the lease is over is lacking because of that. Raises `LeaseExpired`."""
        try:
            yield
        except (StalePages, TransferUnsettled) as error:
            if self.left_s > 0:
                raise
            raise self.over(str(error)) from error

    def over(self, why: str) -> LeaseExpired:
        lease, pages = self.loan.lease, len(self.loan.pages.hashes)
        words = f"{self.intro.name} lent {pages} pages for {lease.ttl_s:g} s, and not all came by then ({why})"
        return LeaseExpired(f"{words}: a slow line needs a longer lease_s there", lease=lease.lease_id)


class Loads:
    """Of one worker."""

    def __init__(
        self, station: Station, links: SourceLinks, verifier: Verifier, digests: Worker, tolerance: Tolerance
    ) -> None:
        self._station, self._links, self._verifier, self._digests = station, links, verifier, digests
        self._tolerance = tolerance
        self._number = 0

    async def load(self, wanted: Wanted) -> Loaded:
        """To its end: what fails is told in the result, and what isn't pdkv's own is raised. Without pages the other
        engine is only told that nobody comes for them."""
        loaded, began_s = Loaded(), asyncio.get_running_loop().time()
        self._number += 1
        try:
            link, loan = await self._lent(wanted)
            ends_s = asyncio.get_running_loop().time() + loan.lease.ttl_s
            source = _Source(link.intro, loan, self._number, ends_s)
            with source.bounding():
                try:
                    if len(wanted.pages):
                        await self._bring(wanted, source, loaded)
                except TransferError as error:
                    self._links.forget(link, error)
                    raise
                finally:
                    begin(self._released(link, loan))
        except PdkvError as error:
            loaded.error = error
        loaded.seconds = asyncio.get_running_loop().time() - began_s
        return loaded

    async def _lent(self, wanted: Wanted) -> tuple[LinkTo[SourcePeer], Loan]:
        """Of a node that has begun a new life since it was met, after it has been met again."""
        first = min(wanted.first, len(wanted.hashes) - 1)
        link = await self._links.of(wanted.address)
        try:
            return link, await self._asked(link, wanted.hashes, first)
        except (PeerLost, WrongIncarnation) as error:
            self._links.forget(link, error)
        link = await self._links.of(wanted.address)
        return link, await self._asked(link, wanted.hashes, first)

    async def _asked(self, link: LinkTo[SourcePeer], hashes: PageHashes, first: int) -> Loan:
        loan = await link.peer.lend(LendCall(self._station.envelope(link.intro.name), hashes, first))
        if loan.pages.first_index != first or loan.pages.hashes != hashes.part(first, len(hashes)):
            raise ProtocolError(f"{link.intro.name} lends other pages than were asked for", first=first)
        require_ttl(loan.lease.ttl_s)
        return loan

    async def _released(self, link: LinkTo[SourcePeer], loan: Loan) -> None:
        try:
            call = LeaseCall(self._station.envelope(link.intro.name), loan.lease.lease_id)
            await link.peer.release_lease(call)
        except PdkvError as error:
            log.info("%s wasn't told that its pages were read: %s; its lease will run out", link.intro.name, error)

    async def _bring(self, wanted: Wanted, source: _Source, loaded: Loaded) -> None:
        """One portion is proved while the next is read."""
        sealed, proving = source.loan.pages, None
        remote = RemotePages.checked(sealed.page_ids, source.intro.pool.num_pages)
        if len(remote) != len(wanted.pages):
            raise BoundsError("pages lent", len(remote), f"{len(wanted.pages)}, as many as are wanted")
        try:
            for part in portions(len(remote), self._station.pool.fmt.page_bytes):
                pages, stop = wanted.pages[part], len(sealed.hashes) - part.stop
                arrival = Arrival(
                    ReservationId(source.number),
                    wanted.first + part.start,
                    pages,
                    sealed.hashes.part(part.start, part.stop),
                    sealed.digests[part],
                )
                order = ReadOrder(
                    source.intro.name,
                    pages,
                    remote[part],
                    sealed.generations[part],
                    arrival.hashes,
                    source.left_s,
                    Flow(source.number, len(remote), stop),
                )
                await self._read(order, source, loaded)
                if proving is not None:
                    await proving
                proving = asyncio.create_task(self._prove(arrival, order, source, loaded))
        finally:
            if proving is not None:
                await proving

    async def _read(self, order: ReadOrder, source: _Source, loaded: Loaded) -> None:
        """One read to its end; one without a proven end is waited for: until then the blocks can't be given back."""
        if (left_s := source.left_s) <= 0:
            raise source.over("a portion was still to be asked for")
        outcome = await asyncio.wrap_future(self._station.transfer.read(replace(order, deadline_s=left_s)))
        if outcome.status is ReadStatus.UNSETTLED:
            if outcome.settled is None:
                raise IntegrityError("an unsettled read doesn't say when it settles", pages=len(order))
            await asyncio.wrap_future(outcome.settled)
            raise TransferUnsettled(f"read from {order.peer} did not end in time: {outcome.reason}", peer=order.peer)
        if outcome.status is ReadStatus.FAILED:
            raise TransferError(f"read from {order.peer} failed: {outcome.reason}", peer=order.peer)
        if outcome.stale.any():
            stale = order.local.array[outcome.stale].tolist()
            self._refuse(
                StalePages(f"{len(stale)} pages of {order.peer} were reused while they were read", pages=stale)
            )
        loaded.bytes += outcome.bytes
        loaded.descriptors += outcome.descriptors
        loaded.post_seconds += outcome.post_s

    async def _prove(self, arrival: Arrival, order: ReadOrder, source: _Source, loaded: Loaded) -> None:
        """What differs is read once more; then it is data loss."""
        try:
            try:
                await self._digests.run(self._verifier.verify, arrival)
            except DigestMismatch:
                await self._read(order, source, loaded)
                await self._digests.run(self._verifier.verify, arrival)
        except DigestMismatch as error:
            self._refuse(error)
        loaded.pages += len(arrival.pages)

    def _refuse(self, error: PdkvError) -> None:
        """A proof has failed."""
        self._tolerance.told(error)
        if not self._tolerance.shadow:
            raise error
