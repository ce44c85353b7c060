"""A rank of a decode group that is not its leader: does what the leader's log says, and proves its own bytes.

Guarantees: entries are carried out in the order of the log, each once, and must give what they gave at the leader: else
the rank says so and does nothing more; pages are committed only with a proof that this rank's own verifier made of
them, for the digests that the leader has; a page is free here only when the log says so, which is after every read and
step of this rank on it was answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from pdkv.contract import require_compatible
from pdkv.errors import (
    BoundsError,
    DeadlineExceeded,
    DigestMismatch,
    IntegrityError,
    PdkvError,
    PeerLost,
    ProtocolError,
    TransferError,
)
from pdkv.ids import LocalPages, PeerName, ReservationId, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.verifier import VerifiedPages
from pdkv.node.base import NodeParts
from pdkv.node.flow import settle
from pdkv.node.ranks import Entry, Joining, NewPeer, Op, RankOutcome, RankRead, RankStep, StepKind
from pdkv.node.sampling import logits_digest
from pdkv.transfer.engine import ReadOutcome, ReadStatus

NUMBERS = {Op.RESERVE: 4, Op.COMMIT: 1, Op.SEAL: 1, Op.END: 1}
"""Integers that an entry carries; those not named carry none."""


class Rank:
    """Has the methods of `node.ranks.RankPort`."""

    def __init__(self, parts: NodeParts) -> None:
        self.parts = parts
        self.leader: PeerName | None = None
        self.applied = 0
        self.diverged: PdkvError | None = None
        self._moved = asyncio.Event()
        self._reservations: dict[ReservationId, Reservation] = {}
        self._proofs: dict[int, VerifiedPages] = {}
        """By the first page's id, until they are committed or read into again."""
        self._reads: dict[int, Future[ReadOutcome]] = {}
        self._unsettled: dict[int, Future[None]] = {}
        self._do: dict[Op, Callable[[Entry], None]] = {
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.EXTEND: lambda e: parts.manager.extend(self._of(e), e.hashes),
            Op.TAKE: lambda e: parts.manager.take_private(self._of(e), self._pages(e)),
            Op.SEAL: lambda e: parts.manager.seal_private(self._of(e), self._proof(e)),
            Op.REOPEN: lambda e: parts.manager.reopen_private(self._of(e), self._pages(e)),
            Op.QUARANTINE: lambda e: parts.manager.quarantine(self._of(e), self._pages(e), e.reason),
            Op.RELEASE: self._release,
            Op.END: self._end,
        }

    async def join(self, joining: Joining) -> PeerName:
        require_compatible(self.parts.contract, joining.contract)
        if joining.num_pages != self.parts.pool.num_pages:
            raise BoundsError("pages of a rank's pool", self.parts.pool.num_pages, f"the leader's {joining.num_pages}")
        if self.leader not in (None, joining.leader) or self.applied:
            raise ProtocolError(f"this rank follows {self.leader}: start it anew", leader=self.leader)
        self.leader = joining.leader
        return self.parts.name

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        self._require_sound()
        if first != self.applied:
            raise ProtocolError(f"entry {first} of the log, {self.applied} is next", first=first, next=self.applied)
        for entry in entries:
            try:
                _require_numbers(entry)
                self._do[entry.op](entry)
            except PdkvError as error:
                where = f"entry {self.applied} ({entry.op} of reservation {entry.reservation}) at {self.parts.name}"
                self.diverged = IntegrityError(f"{where}: {error}", rank=self.parts.name, op=entry.op)
                self._moved.set()
                raise self.diverged from error
            self.applied += 1
        self._moved.set()

    async def add_peer(self, peer: NewPeer) -> None:
        """Raises `TransferError` if the peer can't be reached from here: that is about the peer, and not this rank."""
        adding = self.parts.transfer.add_peer(peer.name, peer.metadata, peer.metadata_checksum, peer.pool)
        try:
            await asyncio.wrap_future(adding)
        except (PeerLost, DeadlineExceeded) as error:
            raise TransferError(f"{self.parts.name}: {error}", rank=self.parts.name, peer=peer.name) from error

    async def remove_peer(self, peer: PeerName) -> None:
        await asyncio.wrap_future(self.parts.transfer.remove_peer(peer))

    async def read(self, read: RankRead) -> RankOutcome:
        await self._reached(read.after)
        local = read.order.local
        for first, proof in list(self._proofs.items()):
            if np.isin(proof.pages.array, local.array).any():
                del self._proofs[first]
        posted = self._reads[read.read_id] = self.parts.transfer.read(read.order)
        future = asyncio.wrap_future(posted)
        try:
            outcome = await asyncio.shield(future)
        except PeerLost as error:
            raise TransferError(f"{self.parts.name}: {error}", rank=self.parts.name, peer=read.order.peer) from error
        except asyncio.CancelledError:
            # The leader is gone: its pages stay reserved here, for nobody frees them.
            self.parts.transfer.cancel(posted)
            await settle(future)
            raise
        finally:
            del self._reads[read.read_id]
        if outcome.status is ReadStatus.UNSETTLED and outcome.settled is not None:
            self._unsettled[read.read_id] = outcome.settled
        return RankOutcome(outcome.status, outcome.stale, outcome.reason)

    async def cancel(self, read_id: int) -> None:
        """A read that hasn't begun here, or has ended, is none to cancel."""
        if posted := self._reads.get(read_id):
            self.parts.transfer.cancel(posted)

    async def settled(self, read_id: int) -> None:
        if read_id in self._unsettled:
            await asyncio.shield(asyncio.wrap_future(self._unsettled[read_id]))
            self._unsettled.pop(read_id, None)

    async def verify(self, arrival: Arrival, after: int) -> UInt64Array:
        await self._reached(after)
        verifier = self.parts.verifier
        try:
            proof = await self.parts.digests.run(verifier.verify, arrival)
        except DigestMismatch:
            return await self.parts.digests.run(digest_pages, self.parts.pool, arrival.pages, verifier.algorithm)
        if len(proof):
            self._proofs[int(proof.pages.array[0])] = proof
        return proof.digests

    async def step(self, step: RankStep) -> int:
        await self._reached(step.after)
        engine, pages = self.parts.engine, LocalPages.checked(step.pages, self.parts.pool.num_pages)
        if step.kind is StepKind.FORWARD:
            return logits_digest(await self.parts.steps.run(engine.forward, step.tokens, step.start, pages))
        compute = engine.chunk if step.kind is StepKind.CHUNK else engine.verify
        return logits_digest((await self.parts.steps.run(compute, step.tokens, step.start, pages)).logits)

    async def _reached(self, position: int) -> None:
        """Until the log is carried out that far."""
        self._require_sound()
        while self.applied < position:
            self._moved.clear()
            await self._moved.wait()
            self._require_sound()

    def _require_sound(self) -> None:
        if self.diverged is not None:
            raise self.diverged

    # --- entries --------------------------------------------------------------------------------------------------

    def _reserve(self, entry: Entry) -> None:
        total, most, dropped, priority = entry.numbers
        reservation = self.parts.manager.reserve(
            entry.hashes, total, max_hit_pages=most, drop_pages=dropped, priority=priority
        )
        self._reservations[reservation.id] = reservation
        if reservation.id != entry.reservation or not np.array_equal(reservation.sequence.array, entry.pages):
            have = f"reservation {reservation.id} of {reservation.sequence}"
            raise IntegrityError(f"{have}, the leader has {entry.reservation} of {entry.pages.tolist()}")

    def _commit(self, entry: Entry) -> None:
        standing = self.parts.manager.commit(self._proof(entry))
        if not np.array_equal(standing.array, entry.pages):
            raise IntegrityError(f"{standing} stand in the tree, the leader has {entry.pages.tolist()}")

    def _release(self, entry: Entry) -> None:
        self.parts.manager.release_quarantine(self._of(entry), self._pages(entry))
        self._forget(entry.reservation)

    def _end(self, entry: Entry) -> None:
        self.parts.manager.end(self._of(entry), writers=bool(entry.numbers[0]))
        self._forget(entry.reservation)

    def _forget(self, reservation: ReservationId) -> None:
        if not self._reservations[reservation].alive and reservation not in self.parts.manager.held_back:
            gone = self._reservations.pop(reservation)
            for page in gone.pages:
                self._proofs.pop(page, None)

    def _of(self, entry: Entry) -> Reservation:
        if entry.reservation not in self._reservations:
            raise IntegrityError(f"no reservation {entry.reservation} here", reservation=entry.reservation)
        return self._reservations[entry.reservation]

    def _pages(self, entry: Entry) -> LocalPages:
        return LocalPages.checked(entry.pages, self.parts.pool.num_pages)

    def _proof(self, entry: Entry) -> VerifiedPages:
        """Of the pages that an entry commits or seals: those of the reservation from the entry's first index on."""
        first = entry.numbers[0]
        page = self._of(entry).page_of(first)
        proof = self._proofs.pop(page, None)
        if proof is None or (proof.first_index, proof.hashes) != (first, entry.hashes):
            raise IntegrityError(f"pages from index {first} on were not verified here", page=page)
        return proof


def _require_numbers(entry: Entry) -> None:
    due = NUMBERS.get(entry.op, 0)
    if len(entry.numbers) != due:
        raise BoundsError(f"numbers of a {entry.op} entry", len(entry.numbers), due)
