"""The one owner of pages and tree: everything that happens to a page happens here, to both of its caches at once.

Guarantees, after every call, whether it returned or raised:
- free + reserved + cached + private + quarantined = all pages; no page has two holders; `check` recounts it;
- a page gets a new holder only when nobody can write to it any more: a caller that can't prove it says so
  (`quarantine`, or `writers=True`), and such pages stay out until it can;
- a page's generation has moved, and its row is no longer sealed, before a new holder hears of it;
- matching, locking and reserving are one step: it succeeds, or it raises and nothing has changed;
- what is in the tree was verified for a live reservation, and extends what that reservation had committed before.

A page's life, and who holds it:

    free ─reserve─► reserved ─commit─► cached ─(evicted by a later reserve)─► reserved of another
                        │  ├─take_private─► private ─end, drop_lease─► free      (a duplicate too: see commit)
                        │  ◄────extend──────┘
                        └─quarantine─► quarantined ─release_quarantine─► free

Not thread-safe: one thread calls it. Each call costs the pages and tree nodes it touches, never the pool or the tree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdkv.errors import (
    BoundsError,
    DuplicateRequest,
    ProtocolError,
    ReservationDead,
)
from pdkv.ids import LeaseId, LocalPages, PageHashes, ReservationId, UInt64Array
from pdkv.kvcache.audit import audit
from pdkv.kvcache.eviction import EvictionOrder
from pdkv.kvcache.granting import require_growth, require_start
from pdkv.kvcache.moves import PageMoves
from pdkv.kvcache.ownership import CACHED, PageState, claim
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.radix_node import Node, Use
from pdkv.kvcache.reservation import HeldBack, LeasedPages, Reservation
from pdkv.kvcache.shortage import never_fits
from pdkv.kvcache.verifier import VerifiedPages

__all__ = ["CacheManager", "Reservation"]

_OWN = (PageState.RESERVED, PageState.PRIVATE)
_PAIR = np.dtype("V16")
_LOCAL_WRITER = "a local writer may still run"


class CacheManager(PageMoves):
    """Owner of the pages of one pool, of its page table and of the tree of cached ones."""

    renumbers = True
    """Its pages may become others of its pool (`compaction`)."""
    lends = True
    """Leases may lock cached pages: nobody else has to have locked the same."""

    def __init__(self, pool: SlotPool, *, order: EvictionOrder | None = None) -> None:
        super().__init__(pool, order=order)
        self.reservations: dict[ReservationId, Reservation] = {}
        """The live ones."""
        self.leased: dict[LeaseId, LeasedPages] = {}
        self.held_back: dict[ReservationId, HeldBack] = {}
        self._digests = np.zeros((pool.num_pages, 2), np.uint64)
        # a page's pair as one opaque item: numpy moves those twenty times faster than rows of two
        self._digest_pairs = self._digests.view(_PAIR)[:, 0]
        self.on_room: Callable[[], None] = lambda: None
        """Called when pages have come free or evictable, amid the manager's work: must not call it back at once."""

    # --- what there is --------------------------------------------------------------------------------------------

    def census(self) -> dict[str, int]:
        """Pages: free, reserved, cached, private, quarantined, total."""
        return self.ownership.census()

    def quarantine_reasons(self) -> dict[ReservationId, str]:
        """Why pages are held back, by the reservation they were reserved for."""
        return {of: f"{held.pages} pages: {'; '.join(held.reasons)}" for of, held in self.held_back.items()}

    def hashes(self, pages: LocalPages) -> PageHashes:
        """Of sealed pages, to announce them; a tail's is its tail hash. Raises `BoundsError` on an unsealed one."""
        self._require_sealed(pages)
        return self.table.hashes(pages)

    def generations(self, pages: LocalPages) -> UInt64Array:
        """uint64 [pages] of sealed pages, to announce them. Raises `BoundsError` on an unsealed one."""
        self._require_sealed(pages)
        return self.table.generations(pages)

    def digests(self, pages: LocalPages) -> UInt64Array:
        """uint64 [pages, 2] (main, index), as they were when sealed. Raises `BoundsError` on an unsealed one."""
        self._require_sealed(pages)
        found: UInt64Array = self._digests[pages.array]
        return found

    def carry_digests(self, source: LocalPages, target: LocalPages) -> None:
        """Page i of `target` has now the bytes that page i of `source` had when it was sealed."""
        self._digests[target.array] = self._digests[source.array]

    # --- a request ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        hashes: PageHashes,
        total_pages: int,
        *,
        max_hit_pages: int,
        drop_pages: int = 0,
        priority: int = 0,
        ahead: int | None = None,
    ) -> Reservation:
        """Find, lock and reserve the `total_pages` pages of a request whose prompt has the full pages `hashes`.

        At most `max_hit_pages` are taken from the tree; then `drop_pages` fewer than were found (the drop-page rule).
        `priority` is for an eviction order that asks for it: the highest stays longest. With `ahead`, of the others at
        most so many are taken now: the request is sure to get the rest later (`grow`, `granting`), and until it has, no
        engine step may work on pages of it that are to be committed.

        Raises `NeverFits` if the pool is smaller, `CapacityError` if too few pages are free or evictable now, or if
        with it some request could wait for its rest in vain; `BoundsError` if the sequence is shorter than its prompt
        or a limit is negative.
        """
        if min(max_hit_pages, drop_pages, ahead or 0) < 0 or total_pages < max(len(hashes), 1):
            have = f"{total_pages} in all, {len(hashes)} of the prompt, hit at most {max_hit_pages} less {drop_pages}"
            raise BoundsError("pages to reserve", have, "at least the prompt's, at least 1, no negative limit")
        usable = self.pool.num_pages - 1
        if total_pages > usable:
            raise never_fits(self.pool.fmt, total_pages, usable)
        match = self.tree.match(hashes, limit=max_hit_pages)
        if drop_pages and match.pages.size:
            match = self.tree.match(hashes, limit=max(match.pages.size - drop_pages, 0))
        lacking = total_pages - match.pages.size
        wanted = lacking if ahead is None else min(ahead, lacking)
        require_start(self, match, lacking, wanted)
        node = self.tree.boundary(match)
        use = Use(priority)
        self.tree.lock(node, use=use)
        taken = self._take(wanted, self._new_holder())
        return self._keep(hashes, LocalPages.kept(match.pages), taken, node, use, total_pages)

    def grow(self, reservation: Reservation, count: int) -> None:
        """Give the request `count` more of the pages that it lacks: they follow those of its sequence.

        Raises `ReservationDead`, also if pages of it were held back, `BoundsError` unless it lacks so many,
        `CapacityError` if too few pages are free or evictable now, or if without them some request could wait for its
        rest in vain; nothing is taken then.
        """
        self._require_live(reservation)
        if reservation.broken:
            of = reservation.id
            raise ReservationDead(f"pages of reservation {of} were held back: it can only end", reservation=of)
        if not 0 <= count <= reservation.rest:
            raise BoundsError("pages to grow by", count, f"0 to {reservation.rest}")
        require_growth(self, reservation, count)
        reservation.append(self._take(count, reservation.id))

    def commit(self, verified: VerifiedPages) -> LocalPages:
        """Seal verified pages and put them into the tree; the reservation's lock then covers them.

        Returns the pages that stand in the tree for these hashes: what to announce. If another request was faster, the
        tree keeps that one's page, and this reservation's own stays its private one until it ends: its page table, in
        which steps may be running, names that one, and to swap a page under a running step would need a fence. While it
        still lacks pages no step is running: then its own is freed, and its sequence has that one's. For otherwise it
        would keep both, more than it said that it would need, and others could wait for ever for the difference.

        Raises `ReservationDead` if it has ended, `BoundsError` if the pages are not its reserved pages right after its
        committed prefix, `ProtocolError` if their hashes are not those of its prompt. Nothing is committed then.
        """
        reservation = self.reservations.get(verified.reservation)
        if reservation is None:
            raise ReservationDead(f"reservation {verified.reservation} has ended", reservation=verified.reservation)
        first, count = verified.first_index, len(verified.pages)
        if first != reservation.committed:
            raise BoundsError("first page to commit", first, f"{reservation.committed}: the next after the last one")
        self._require_place(reservation, verified)
        self.ownership.require(verified.pages, reservation.id, PageState.RESERVED)
        if reservation.hashes.part(first, first + count) != verified.hashes:
            raise ProtocolError("the hashes of pages to commit are not those of the prompt", first_index=first)
        use = reservation.use if first < reservation.prompt_pages else reservation.use._replace(output=True)
        inserted = self.tree.extend(reservation.node, verified.hashes, verified.pages.array, use=use)
        reservation.node = inserted.node
        reservation.committed += count
        known = inserted.existing.size
        new = verified.pages[known:] if known else verified.pages
        self.table.seal(new, verified.hashes.part(known, count) if known else verified.hashes)
        self._digest_pairs[new.index] = verified.digests.view(_PAIR)[known:, 0]
        self.ownership.put(new, claim(PageState.RESERVED, reservation.id), CACHED)
        if self.observer is not None and reservation.public is not None and len(new):
            self.observer.stored(reservation.public, first + known, new)
        if not known:
            return new
        own, standing = verified.pages[:known], LocalPages.kept(inserted.existing)
        if reservation.rest:
            reservation.replace(first, standing)
            self._free(own, claim(PageState.RESERVED, reservation.id))
            self.on_room()
        else:
            self.ownership.turn(own, reservation.id, PageState.RESERVED, PageState.PRIVATE)
        return LocalPages.kept(np.concatenate((standing.array, new.array)))

    def extend(self, reservation: Reservation, hashes: PageHashes) -> None:
        """Name the full pages after the prompt, made of its answer, so that `commit` takes them: when decode is over.

        `hashes` goes on where the committed ones end; the first page may have begun as the prompt's tail. Their rows
        are void from here on, and nobody may write to them any more. The tree evicts them before any prompt's pages,
        until a prompt begins with them.

        Raises `ReservationDead`, or `BoundsError` if pages of the prompt are still to be committed or the reservation
        has no such pages of its own after it; nothing has changed then.
        """
        self._require_live(reservation)
        first = reservation.committed
        if first != len(reservation.hashes):
            raise BoundsError("committed pages", first, f"{len(reservation.hashes)}: all of the prompt first")
        pages = reservation.sequence[first : first + len(hashes)]
        if len(pages) != len(hashes):
            raise BoundsError("pages of an answer", len(hashes), f"at most {len(pages)}")
        self.ownership.require(pages, reservation.id, *_OWN)
        self.table.bump(pages)
        private = pages.where(self.ownership.held(pages, reservation.id, PageState.PRIVATE))
        self.ownership.turn(private, reservation.id, PageState.PRIVATE, PageState.RESERVED)
        reservation.hashes = PageHashes(reservation.hashes.raw + hashes.raw)

    def take_private(self, reservation: Reservation, pages: LocalPages) -> None:
        """Reserved pages become private ones, for a tail or for output: they never reach the tree.

        Raises `ReservationDead`, or `BoundsError` if one is not a reserved page of it; nothing is taken then.
        """
        self._require_live(reservation)
        self.ownership.turn(pages, reservation.id, PageState.RESERVED, PageState.PRIVATE)

    def seal_private(self, reservation: Reservation, verified: VerifiedPages) -> None:
        """Make private pages readable by peers under their hash (a tail's is its tail hash); they stay private.

        Raises `ReservationDead`, or `BoundsError` if they are not private pages of it at that place of its sequence, or
        are sealed already; nothing is sealed then.
        """
        self._require_live(reservation)
        self._require_place(reservation, verified)
        self.ownership.require(verified.pages, reservation.id, PageState.PRIVATE)
        self.table.seal(verified.pages, verified.hashes)
        self._digests[verified.pages.array] = verified.digests

    def reopen_private(self, reservation: Reservation, pages: LocalPages) -> None:
        """To be called before sealed private pages are written to again: peers can't take them for what they were.

        Raises `ReservationDead`, or `BoundsError` if one is not a private page of it.
        """
        self._require_live(reservation)
        self.ownership.require(pages, reservation.id, PageState.PRIVATE)
        self.table.bump(pages)

    def end(self, reservation: Reservation, *, writers: bool = False) -> LocalPages:
        """The request is over: unlock what it hit and committed, and free its other pages. A second call does nothing.

        Without `writers` the caller states that nobody writes any more, to any page that was not given to `quarantine`
        before. With it, a local engine step or kernel may still write to them: they are quarantined, and returned, for
        `release_quarantine` when that step has completed.
        """
        if not reservation.alive:
            return LocalPages.none()
        self._require_live(reservation)
        reservation.alive = False
        del self.reservations[reservation.id]
        self.tree.unlock(reservation.node)
        if writers:
            own = self._of(reservation, *_OWN)
            self._hold_back(reservation, own, _LOCAL_WRITER)
            self.on_room()
            return own
        self._give_back(self.ownership.let_go(reservation.pages, reservation.id))
        self.on_room()
        return LocalPages.none()

    # --- pages that somebody may still write to -------------------------------------------------------------------

    def quarantine(self, reservation: Reservation, pages: LocalPages, reason: str) -> None:
        """Hold pages back because a read into them has no proven end; they outlive the reservation.

        Raises `ReservationDead` (the pages are gone: it came too late), or `BoundsError` if one is not a reserved or
        private page of it; nothing is held back then.
        """
        self._require_live(reservation)
        self.ownership.require(pages, reservation.id, *_OWN)
        self._hold_back(reservation, pages, reason)

    def release_quarantine(self, reservation: Reservation, pages: LocalPages) -> None:
        """Free pages of a reservation, ended or not: nobody can write to them any more, that is proved.

        Raises `BoundsError` if one is not in quarantine for this reservation (any more); nothing is freed then.
        """
        self.ownership.require(pages, reservation.id, PageState.QUARANTINED)
        if not len(pages):
            return
        self._free(pages, claim(PageState.QUARANTINED, reservation.id))
        held = self.held_back[reservation.id]
        held.pages -= len(pages)
        if not held.pages:
            del self.held_back[reservation.id]
        self.on_room()

    # --- pages that a peer may read after the request has ended ------------------------------------------------------

    def hand_over(self, reservation: Reservation, lease_id: LeaseId) -> None:
        """Let a lease keep what the reservation has now: a lock of its own on all pages hit and committed, and its
        sealed private pages, which leave the reservation.

        Raises `ReservationDead`, or `DuplicateRequest` if that lease keeps pages already.
        """
        self._require_live(reservation)
        if lease_id in self.leased:
            raise DuplicateRequest(f"lease {lease_id} keeps pages already", lease=lease_id)
        own = self._of(reservation, PageState.PRIVATE)
        sealed = own.where(self.table.sealed(own))
        holder = self._new_holder()
        self.tree.lock(reservation.node)
        private, leased = claim(PageState.PRIVATE, reservation.id), claim(PageState.PRIVATE, holder)
        self.ownership.move(sealed, private, leased)
        reservation.lost += len(sealed)
        self.leased[lease_id] = LeasedPages(holder, reservation.node, sealed)

    def lend(self, hashes: PageHashes, lease_id: LeaseId) -> LocalPages:
        """Let a lease lock the longest prefix of `hashes` that is cached, and return its pages; without one, nothing
        happens.

        Raises `DuplicateRequest` if that lease keeps pages already.
        """
        if lease_id in self.leased:
            raise DuplicateRequest(f"lease {lease_id} keeps pages already", lease=lease_id)
        match = self.tree.match(hashes)
        if match.pages.size:
            node = self.tree.boundary(match)
            self.tree.lock(node)
            self.leased[lease_id] = LeasedPages(self._new_holder(), node, LocalPages.none())
        return LocalPages.kept(match.pages)

    def drop_lease(self, lease_id: LeaseId) -> bool:
        """The lease has ended: cached pages stay, evictable; its private pages are freed. True if it kept any."""
        kept = self.leased.pop(lease_id, None)
        if kept is None:
            return False
        self.tree.unlock(kept.node)
        self._free(kept.private, claim(PageState.PRIVATE, kept.holder))
        self.on_room()
        return True

    # --- the moves ------------------------------------------------------------------------------------------------

    def _keep(
        self, hashes: PageHashes, hit: LocalPages, pages: LocalPages, node: Node, use: Use, total_pages: int
    ) -> Reservation:
        """The reservation of pages that were taken for the newest holder."""
        holder = ReservationId(self._last_holder)
        sequence = LocalPages.kept(np.concatenate((hit.array, pages.array)))
        reservation = Reservation(holder, hashes, hit, pages, sequence, node, len(hit), len(hashes), use, total_pages)
        self.reservations[holder] = reservation
        return reservation

    def _hold_back(self, reservation: Reservation, pages: LocalPages, reason: str) -> None:
        if not len(pages):
            return
        self.table.bump(pages)  # a sealed tail among them may change now
        reservation.lost += len(pages)
        reservation.broken = True
        for state in _OWN:
            some = pages.where(self.ownership.held(pages, reservation.id, state))
            self.ownership.turn(some, reservation.id, state, PageState.QUARANTINED)
        held = self.held_back.setdefault(reservation.id, HeldBack(0, []))
        held.pages += len(pages)
        if reason not in held.reasons:
            held.reasons.append(reason)

    def _of(self, reservation: Reservation, *states: PageState) -> LocalPages:
        """The reservation's own pages in these states."""
        return reservation.pages.where(self.ownership.held(reservation.pages, reservation.id, *states))

    def _require_live(self, reservation: Reservation) -> None:
        if self.reservations.get(reservation.id) is not reservation:
            raise ReservationDead(f"reservation {reservation.id} has ended", reservation=reservation.id)

    def _require_place(self, reservation: Reservation, verified: VerifiedPages) -> None:
        first, stop = verified.first_index, verified.first_index + len(verified.pages)
        due = reservation.sequence.array[first:stop]
        if verified.reservation != reservation.id or due.tobytes() != verified.pages.array.tobytes():
            have = f"{verified.pages} at {first} for reservation {verified.reservation}"
            raise BoundsError("verified pages", have, f"those of reservation {reservation.id} at that place, in order")

    def _require_sealed(self, pages: LocalPages) -> None:
        unsealed = pages.array[~self.table.sealed(pages)]
        if unsealed.size:
            raise BoundsError("page to announce", int(unsealed[0]), "a sealed page")

    # --- the laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything; raises `IntegrityError`. Costs pool and tree: for tests and `pdkv doctor`."""
        audit(self)
