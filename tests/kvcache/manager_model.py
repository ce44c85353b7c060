"""A plain model of the cache manager, in dicts of page to holder, and a machine that drives both.

After every step they must tell the same, no announced page may have changed hands under an unchanged generation, and
the manager's own audit must pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pdkv.errors import BoundsError, CapacityError, DuplicateRequest, PdkvError, ProtocolError, ReservationDead
from pdkv.geometry.page_layout import Group
from pdkv.ids import LeaseId, LocalPages, PageHash, PageHashes
from pdkv.kvcache.eviction import ORDERS, eviction_order
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import PageState
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import VerifiedPages, Verifier
from tests.kvcache.chains import chain_of
from tests.kvcache.pools import pages_of, tiny_format

NUM_PAGES = 21
PROMPTS = st.sampled_from(["a", "ab", "aba", "abab", "ababa", "ababab", "abba", "abbab", "abbaba", "b", "bab", "babb"])
FMT = tiny_format()


@dataclass
class Held:
    """What the model knows of a reservation, or of a lease (which has no new pages of its own to come)."""

    letters: str
    """The prompt's, and the answer's once it was named."""
    prompt_pages: int
    committed: int
    state: dict[int, PageState] = field(default_factory=dict)
    """Page to reserved, private or quarantined."""
    sealed: set[int] = field(default_factory=set)
    alive: bool = True
    broken: bool = False
    """Pages of it were held back while it lived."""

    @property
    def prompt(self) -> PageHashes:
        return chain_of(self.letters)

    def pages(self, *states: PageState) -> list[int]:
        return [p for p, s in self.state.items() if s in states]


@dataclass(frozen=True)
class Announced:
    """A page as a peer may have heard of it."""

    page: int
    generation: int
    hash: bytes
    digest: tuple[int, int]


class ManagerMachine(RuleBasedStateMachine):
    """Requests, aborts, leases and unsettled reads in any order, on a pool that is always too small."""

    live = Bundle("live")
    quarantines = Bundle("quarantines")

    @initialize(policy=st.sampled_from(sorted(ORDERS)))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.pool = SlotPool.create(FMT, NUM_PAGES)
        self.manager = CacheManager(self.pool, order=eviction_order(policy))
        self.verifier = Verifier(self.pool)
        self.cached: dict[PageHash, int] = {}
        self.output: set[PageHash] = set()
        """Cached pages of answers that no prompt has begun with."""
        self.held: dict[Reservation, Held] = {}
        self.leased: dict[LeaseId, Held] = {}
        self.announced: set[Announced] = set()
        self.stamp = 0
        self.started()

    def started(self) -> None:
        """For negative controls to break something."""

    # --- what the model derives -----------------------------------------------------------------------------------

    def known(self, hashes: PageHashes) -> list[int]:
        found = [self.cached.get(h) for h in hashes]
        return [p for p in found[: found.index(None) if None in found else None] if p is not None]

    def locked(self) -> set[PageHash]:
        holders = [h for h in self.held.values() if h.alive] + list(self.leased.values())
        return {hash for h in holders for hash in h.prompt.part(0, h.committed)}

    def in_state(self, state: PageState) -> set[int]:
        holders = [*self.held.values(), *self.leased.values()]
        return {p for h in holders for p in h.pages(state)}

    def free(self) -> set[int]:
        taken = set(self.cached.values()).union(*(h.state for h in [*self.held.values(), *self.leased.values()]))
        return set(range(1, NUM_PAGES)) - taken

    def write(self, pages: LocalPages) -> None:
        """What an engine or a NIC does: bytes that no page had before, in both caches."""
        self.stamp += 1
        for page in pages:
            for group in Group:
                self.pool.group_bytes(page, group)[0][:8].view(np.uint64)[0] = self.stamp << 8 | page

    def announce(self, pages: LocalPages) -> None:
        columns = (self.manager.generations(pages), self.manager.hashes(pages), self.manager.digests(pages))
        for page, generation, hash, digest in zip(pages, *columns, strict=True):
            self.announced.add(Announced(page, int(generation), hash, (int(digest[0]), int(digest[1]))))

    # --- what happens ---------------------------------------------------------------------------------------------

    @rule(
        target=live,
        letters=PROMPTS,
        more=st.integers(0, 3),
        limit=st.sampled_from([0, 1, 3, 9]),
        drop=st.integers(0, 1),
        priority=st.integers(0, 1),
    )
    def reserve(self, letters: str, more: int, limit: int, drop: int, priority: int = 0) -> object:
        hashes, free_before, total = chain_of(letters), self.free(), len(letters) + more
        hit = self.known(hashes)[:limit]
        hit = hit[: max(len(hit) - drop, 0)]
        evictable = set(self.cached) - self.locked() - set(hashes.part(0, len(hit)))
        short = max(total - len(hit) - len(free_before), 0)
        if short > len(evictable):
            with pytest.raises(CapacityError):
                self.manager.reserve(hashes, total, max_hit_pages=limit, drop_pages=drop)
            return multiple()
        evicted_before = self.manager.evicted_pages
        reservation = self.manager.reserve(hashes, total, max_hit_pages=limit, drop_pages=drop, priority=priority)
        self.output -= set(hashes.part(0, len(hit)))
        assert reservation.hit.array.tolist() == hit
        assert [reservation.page_of(i) for i in range(total)] == hit + reservation.pages.array.tolist()
        evicted = {h for h in evictable if self.cached[h] in set(reservation.pages)}
        assert len(evicted) == short == self.manager.evicted_pages - evicted_before
        answers_stayed = (evictable - evicted) & self.output
        assert evicted <= self.output or not answers_stayed or self.policy == "priority"
        assert set(reservation.pages) <= free_before | {self.cached[h] for h in evicted}
        self.cached = {h: page for h, page in self.cached.items() if h not in evicted}
        self.output -= evicted
        self.held[reservation] = Held(
            letters, len(letters), len(hit), dict.fromkeys(reservation.pages, PageState.RESERVED)
        )
        self.expect_moved(reservation.pages)  # before anybody writes
        return reservation

    @rule(reservation=live, count=st.integers(1, 7))
    def commit(self, reservation: Reservation, count: int) -> None:
        held = self.held[reservation]
        first = held.committed
        pages = reservation.sequence[first : min(first + count, len(held.prompt))]
        hashes = held.prompt.part(first, first + len(pages))
        self.write(pages_of(self.pool, *(p for p in pages if held.state.get(p) is PageState.RESERVED)))
        verified = self.verifier.seal(reservation.id, first, pages, hashes)
        if any(held.state.get(p) is not PageState.RESERVED for p in pages):
            return self.refused(verified)
        standing = self.manager.commit(verified)
        for hash, page in zip(hashes, pages, strict=True):
            if hash in self.cached and not reservation.rest:
                held.state[page] = PageState.PRIVATE
                continue
            del held.state[page]
            if hash not in self.cached:
                self.cached[hash] = page
                self.output.add(hash)
        if first < held.prompt_pages:
            self.output -= set(hashes)
        held.committed += len(pages)
        assert standing.array.tolist() == [self.cached[h] for h in hashes]
        self.announce(standing)

    @rule(reservation=live, answer=st.text("ab", min_size=1, max_size=3))
    def name_the_answer(self, reservation: Reservation, answer: str) -> None:
        """The pages after the prompt, some of them private and sealed until now, are to be committed too."""
        held = self.held[reservation]
        first, letters = held.committed, held.letters + answer
        pages, hashes = (
            reservation.sequence[first : first + len(answer)],
            chain_of(letters).part(len(held.letters), len(letters)),
        )
        own = (PageState.RESERVED, PageState.PRIVATE)
        if first < len(held.letters) or len(pages) < len(answer) or any(held.state.get(p) not in own for p in pages):
            with pytest.raises(BoundsError):
                self.manager.extend(reservation, hashes)
            assert reservation.hashes == held.prompt
            return
        self.manager.extend(reservation, hashes)
        held.letters = letters
        held.state |= dict.fromkeys(pages, PageState.RESERVED)
        held.sealed -= set(pages)

    @precondition(lambda self: len(self.cached) < NUM_PAGES // 2)
    @rule(letters=PROMPTS, answer=st.sampled_from(["", "a", "ba"]))
    def a_whole_request(self, letters: str, answer: str) -> None:
        """Reserved, committed and ended: what fills the tree, and a small pool."""
        reservation = self.reserve(letters, len(answer), len(letters), 0)
        if isinstance(reservation, Reservation):
            self.commit(reservation, len(letters))
            self.name_the_answer(reservation, answer)
            self.commit(reservation, len(answer))
            self.end(reservation, False)

    @rule(reservation=live, first=st.integers(0, 6), shift=st.integers(0, 3), letters=PROMPTS)
    def commit_what_does_not_belong(self, reservation: Reservation, first: int, shift: int, letters: str) -> None:
        held, hashes = self.held[reservation], chain_of(letters)
        pages = reservation.sequence[first + shift : first + shift + len(hashes)]
        prompt = PageHashes(held.prompt.raw[first * 32 : (first + len(hashes)) * 32])
        right = first == held.committed and not shift and hashes == prompt
        if len(pages) == len(hashes) and not right:
            self.refused(self.verifier.seal(reservation.id, first, pages, hashes))

    def refused(self, verified: VerifiedPages) -> None:
        before = (self.manager.census(), len(self.manager.tree), self.manager.tree.locked)
        with pytest.raises(PdkvError) as caught:
            self.manager.commit(verified)
        assert isinstance(caught.value, ReservationDead | BoundsError | ProtocolError)
        assert before == (self.manager.census(), len(self.manager.tree), self.manager.tree.locked)

    @rule(reservation=live, data=st.data(), reopen=st.booleans())
    def private_tail(self, reservation: Reservation, data: st.DataObject, reopen: bool) -> None:
        """Take a page past those committed, seal it as a tail; sometimes write to it again."""
        held = self.held[reservation]
        index = data.draw(st.integers(0, len(reservation.sequence) - 1))
        page = pages_of(self.pool, reservation.page_of(index))
        (number,) = page
        if held.state.get(number) is not PageState.RESERVED:
            with pytest.raises(BoundsError):
                self.manager.take_private(reservation, page)
            return
        self.manager.take_private(reservation, page)
        held.state[number] = PageState.PRIVATE
        self.write(page)
        tail_hash = chain_of("tail" + str(self.stamp)).part(4, 5)
        self.manager.seal_private(reservation, self.verifier.seal(reservation.id, index, page, tail_hash))
        held.sealed.add(number)
        self.announce(page)
        if reopen:
            self.manager.reopen_private(reservation, page)
            held.sealed.discard(number)
            self.write(page)

    @rule(reservation=live, lease=st.integers(0, 9))
    def hand_over(self, reservation: Reservation, lease: int) -> None:
        held, lease_id = self.held[reservation], LeaseId(str(lease))
        if lease_id in self.leased:
            with pytest.raises(DuplicateRequest):
                self.manager.hand_over(reservation, lease_id)
            return
        self.manager.hand_over(reservation, lease_id)
        tails = {p: held.state.pop(p) for p in sorted(held.sealed)}
        self.leased[lease_id] = Held(held.letters, held.prompt_pages, held.committed, tails)
        held.sealed.clear()

    @rule(letters=PROMPTS, lease=st.integers(0, 9))
    def lend(self, letters: str, lease: int) -> None:
        lease_id, hashes = LeaseId(str(lease)), chain_of(letters)
        if lease_id in self.leased:
            with pytest.raises(DuplicateRequest):
                self.manager.lend(hashes, lease_id)
            return
        found = self.known(hashes)
        assert list(self.manager.lend(hashes, lease_id)) == found
        if found:
            self.leased[lease_id] = Held(letters, len(letters), len(found))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def drop_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leased)))
        del self.leased[lease_id]
        assert self.manager.drop_lease(lease_id)
        assert not self.manager.drop_lease(lease_id)

    @rule(target=quarantines, reservation=live, data=st.data())
    def quarantine(self, reservation: Reservation, data: st.DataObject) -> object:
        held = self.held[reservation]
        own = held.pages(PageState.RESERVED, PageState.PRIVATE)
        some = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        pages = pages_of(self.pool, *some)
        self.manager.quarantine(reservation, pages, "no end seen")
        held.state |= dict.fromkeys(some, PageState.QUARANTINED)
        held.sealed -= set(some)
        held.broken |= bool(some)
        self.write(pages)
        return (reservation, pages) if some else multiple()

    @rule(quarantine=consumes(quarantines))
    def settle(self, quarantine: tuple[Reservation, LocalPages]) -> None:
        reservation, pages = quarantine
        self.write(pages)  # the late bytes land
        self.manager.release_quarantine(reservation, pages)
        for page in pages:
            del self.held[reservation].state[page]
        with pytest.raises(BoundsError):
            self.manager.release_quarantine(reservation, pages)

    @rule(target=quarantines, reservation=consumes(live), writers=st.booleans())
    def end(self, reservation: Reservation, writers: bool) -> object:
        held = self.held[reservation]
        own = held.pages(PageState.RESERVED, PageState.PRIVATE)
        back = self.manager.end(reservation, writers=writers)
        assert set(back) == (set(own) if writers else set())
        held.alive, held.sealed = False, set()
        for page in own:
            if writers:
                held.state[page] = PageState.QUARANTINED
            else:
                del held.state[page]
        self.too_late(reservation)
        return (reservation, back) if writers and own else multiple()

    def too_late(self, reservation: Reservation) -> None:
        assert not len(self.manager.end(reservation))
        pages = reservation.sequence[:1]
        self.refused(self.verifier.seal(reservation.id, 0, pages, reservation.hashes.part(0, 1)))
        for call in (self.manager.take_private, self.manager.reopen_private):
            with pytest.raises(ReservationDead):
                call(reservation, pages)
        with pytest.raises(ReservationDead):
            self.manager.extend(reservation, chain_of("a"))
        with pytest.raises(ReservationDead):
            self.manager.quarantine(reservation, pages, "no end seen")
        with pytest.raises(ReservationDead):
            self.manager.hand_over(reservation, LeaseId("late"))

    # --- what is true after each step -----------------------------------------------------------------------------

    def expect_moved(self, pages: LocalPages) -> None:
        now = dict(zip(pages, self.manager.table.generations(pages).tolist(), strict=True))
        assert not self.manager.table.sealed(pages).any()
        assert not [a for a in self.announced if now.get(a.page) == a.generation]

    @invariant()
    def audit(self) -> None:
        self.manager.check()

    @invariant()
    def every_page_has_one_holder(self) -> None:
        expected = {s: self.in_state(s) for s in (PageState.RESERVED, PageState.PRIVATE, PageState.QUARANTINED)}
        expected |= {PageState.FREE: self.free(), PageState.CACHED: set(self.cached.values())}
        for state, pages in expected.items():
            assert set(np.flatnonzero(self.manager.ownership.in_state(state)).tolist()) == pages, state
        counts = {s.name.lower(): len(pages) for s, pages in expected.items()}
        assert sum(counts.values()) == NUM_PAGES - 1
        assert self.manager.census() == counts | {"total": NUM_PAGES - 1}
        assert self.manager.tree.locked == len(self.locked())

    @invariant()
    def the_tree_is_what_was_committed_and_not_evicted(self) -> None:
        for held in self.held.values():
            assert self.manager.tree.match(held.prompt).pages.tolist() == self.known(held.prompt)

    @invariant()
    def an_announced_page_is_what_it_was_or_its_generation_has_moved(self) -> None:
        tails = {p for h in [*self.held.values(), *self.leased.values()] for p in h.sealed | set(h.state)}
        every = pages_of(self.pool, *range(1, NUM_PAGES))
        standing = tails & self.in_state(PageState.PRIVATE) | set(self.cached.values())
        now = self.manager.table.generations(every).tolist()
        self.announced = {a for a in self.announced if now[a.page - 1] == a.generation}  # a moved one never comes back
        announced = sorted(self.announced, key=lambda a: a.page)
        pages = pages_of(self.pool, *(a.page for a in announced))
        assert set(pages) <= standing
        assert self.manager.hashes(pages).raw == b"".join(a.hash for a in announced)
        verified = self.verifier.seal(0, 0, pages, self.manager.hashes(pages)).digests.tolist()
        assert verified == [list(a.digest) for a in announced] == self.manager.digests(pages).tolist()
