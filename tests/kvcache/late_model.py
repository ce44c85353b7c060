"""The manager's machine with requests that take their pages little by little.

After every step it must be possible that all of them get the rest and end: what is free or evictable suffices for some
request, its end gives back what is then nobody's, and so on. Leases and reads without an end end by themselves.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, multiple, rule

from pdkv.errors import BoundsError, CapacityError, ReservationDead
from pdkv.ids import PageHash
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.ownership import PageState
from tests.kvcache.chains import chain_of
from tests.kvcache.manager_model import NUM_PAGES, PROMPTS, Held, ManagerMachine


class LateMachine(ManagerMachine):
    live = ManagerMachine.live

    def room(self) -> int:
        return len(self.free()) + len(set(self.cached) - self.locked())

    @rule(target=live, letters=PROMPTS, more=st.integers(0, 9), limit=st.sampled_from([0, 9]), ahead=st.integers(1, 4))
    def start_late(self, letters: str, more: int, limit: int, ahead: int) -> object:
        hashes, total, before = chain_of(letters), len(letters) + more, self.manager.census()
        hit = self.known(hashes)[:limit]
        kept = self.locked() | set(hashes.part(0, len(hit)))
        room = len(self.free()) + len(set(self.cached) - kept)
        try:
            made = self.manager.reserve(hashes, total, max_hit_pages=limit, ahead=ahead)
        except CapacityError:
            lacking = total - len(hit)
            assert min(ahead, lacking) > room or ahead < lacking
            assert self.manager.census() == before
            return multiple()
        assert (made.hit.array.tolist(), made.rest) == (hit, max(total - len(hit) - ahead, 0))
        self.output -= set(hashes.part(0, len(hit)))
        self.held[made] = Held(letters, len(letters), len(hit))
        self.took(made, 0)
        return made

    @rule(reservation=live, count=st.integers(0, 5), all_of_it=st.booleans())
    def grow(self, reservation: Reservation, count: int, all_of_it: bool) -> None:
        before, sequence, rest, room = self.manager.census(), reservation.sequence, reservation.rest, self.room()
        if self.held[reservation].broken:
            with pytest.raises(ReservationDead, match="can only end"):
                self.manager.grow(reservation, count)
            return
        if count > rest and not all_of_it:
            with pytest.raises(BoundsError):
                self.manager.grow(reservation, count)
            return
        count = rest if all_of_it else count
        try:
            self.manager.grow(reservation, count)
        except CapacityError:
            assert count > room or count < rest
            assert (self.manager.census(), reservation.sequence) == (before, sequence)
            return
        assert (reservation.sequence[: len(sequence)], reservation.rest) == (sequence, rest - count)
        self.took(reservation, len(sequence) - len(reservation.hit))

    def took(self, reservation: Reservation, before: int) -> None:
        """Its pages from the `before`-th of its own on are new."""
        pages = reservation.pages[before:]
        evicted = {h for h, page in self.cached.items() if page in set(pages)}
        assert not evicted & self.locked()
        self.cached = {h: page for h, page in self.cached.items() if h not in evicted}
        self.output -= evicted
        assert set(pages) <= set(range(1, NUM_PAGES)) - self.in_state(PageState.RESERVED)
        self.held[reservation].state |= dict.fromkeys(pages, PageState.RESERVED)
        self.expect_moved(pages)

    @invariant()
    def everybody_can_get_the_rest_and_end(self) -> None:
        live = {r: h for r, h in self.held.items() if h.alive}
        locks: Counter[PageHash] = Counter()
        for held in live.values():
            locks.update(set(held.prompt.part(0, held.committed)))
        kept = sum(len(h.pages(PageState.RESERVED, PageState.PRIVATE)) for h in live.values())
        there = NUM_PAGES - 1 - kept - len(locks)
        while live:
            ends = next((r for r in live if r.rest <= there), None)
            assert ends is not None, f"{there} pages there, {[r.rest for r in live]} lacking"
            held = live.pop(ends)
            there += len(held.pages(PageState.RESERVED, PageState.PRIVATE))
            for hash in set(held.prompt.part(0, held.committed)):
                locks[hash] -= 1
                there += not locks[hash]
