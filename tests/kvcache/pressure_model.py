"""The manager's machine with what a pool under pressure does: pages go to host memory and come back, and move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, precondition, rule

from pdkv.errors import BoundsError, CapacityError
from pdkv.ids import LocalPages
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.compaction import compact, movable, move
from pdkv.kvcache.manager import Reservation
from pdkv.kvcache.offload import HostCopy, HostStore, freed_by_end, require_retractable
from pdkv.kvcache.ownership import PageState
from pdkv.kvcache.page_digest import digest_pages
from tests.kvcache.manager_model import FMT, NUM_PAGES, PROMPTS, ManagerMachine
from tests.kvcache.pools import pages_of

STORED_PAGES = 12
"""Host memory is too small as well."""


class PressureMachine(ManagerMachine):
    live = ManagerMachine.live
    retracted = Bundle("retracted")

    def started(self) -> None:
        self.store = HostStore(self.pool, STORED_PAGES * FMT.page_bytes)
        self.stored = 0
        self.sabotaged()

    def sabotaged(self) -> None:
        """For negative controls to break something."""

    @rule(target=live, letters=PROMPTS, more=st.integers(0, 2))
    def decoding(self, letters: str, more: int) -> object:
        """A request whose prompt has arrived, and that has written to all of its own pages."""
        made = self.reserve(letters, more, 9, 0)
        if isinstance(made, Reservation):
            self.commit(made, len(letters))
            own = made.sequence[len(letters) :]
            self.manager.take_private(made, own)
            self.held[made].state |= dict.fromkeys(own, PageState.PRIVATE)
            self.write(own)
        return made

    # --- offload --------------------------------------------------------------------------------------------------

    @rule(target=retracted, reservation=consumes(live), short=st.integers(0, FMT.page_tokens - 1))
    def retract(self, reservation: Reservation, short: int) -> object:
        """To host memory with all of its pages, the last one `short` tokens short of full; then it ends."""
        held = self.held[reservation]
        own = [held.state.get(page) for page in reservation.sequence[held.committed :]]
        if held.committed != len(held.prompt) or any(state is not PageState.PRIVATE for state in own):
            with pytest.raises(BoundsError):
                require_retractable(self.manager, reservation)
            self.end(reservation, False)
            return multiple()
        require_retractable(self.manager, reservation)
        pages = reservation.sequence
        tokens = len(pages) * FMT.page_tokens - (short if own else 0)
        if self.stored + len(pages) > STORED_PAGES:
            with pytest.raises(CapacityError):
                self.store.save(pages, tokens)
            self.end(reservation, False)
            return multiple()
        if own:  # a sealed tail is void before its last slots are zeroed
            self.manager.reopen_private(reservation, pages[-1:])
        copy = self.store.save(pages, tokens)
        self.stored += copy.pages
        freed, room = freed_by_end(self.manager, reservation), self.room()
        self.end(reservation, False)
        assert self.room() - room == freed
        return copy, held.letters

    @rule(target=live, entry=consumes(retracted))
    def restore(self, entry: tuple[HostCopy, str]) -> object:
        """What the tree still has is hit; the rest comes from host memory, into whatever pages there are."""
        copy, letters = entry
        made = self.reserve(letters, copy.pages - len(letters), 99, 0)
        if isinstance(made, Reservation):
            held, hit, full = self.held[made], len(made.hit), len(letters)
            self.store.load(copy, hit, made.sequence[hit : copy.pages])
            assert np.array_equal(digest_pages(self.pool, made.sequence[hit : copy.pages]), copy.digests[hit:])
            if hit < full:
                new, hashes = made.sequence[hit:full], held.prompt.part(hit, full)
                arrival = Arrival(made.id, hit, new, hashes, copy.digests[hit:full])
                self.manager.commit(self.verifier.verify(arrival))
                for hash, page in zip(hashes, new, strict=True):
                    self.cached[hash] = page
                    del held.state[page]
                self.output -= set(hashes)
                held.committed = full
                self.announce(new)
            self.manager.take_private(made, made.sequence[full:])
            held.state |= dict.fromkeys(made.sequence[full:], PageState.PRIVATE)
        self.forget(copy)
        return made

    @rule(entry=consumes(retracted))
    def give_up(self, entry: tuple[HostCopy, str]) -> None:
        self.forget(entry[0])

    def forget(self, copy: HostCopy) -> None:
        self.store.drop(copy)
        self.stored -= copy.pages
        assert self.store.used_bytes == self.stored * FMT.page_bytes

    def room(self) -> int:
        return len(self.free()) + len(set(self.cached) - self.locked())

    # --- move -----------------------------------------------------------------------------------------------------

    def may_move(self, resting: list[Reservation]) -> set[int]:
        """As the model has it."""
        others = [h for r, h in self.held.items() if h.alive and r not in resting] + list(self.leased.values())
        kept = {hash for h in others for hash in h.prompt.part(0, h.committed)}
        private = {page for r in resting for page in self.held[r].pages(PageState.PRIVATE)}
        return {page for hash, page in self.cached.items() if hash not in kept} | private

    @rule(data=st.data(), limit=st.none() | st.integers(0, 4))
    def compact(self, data: st.DataObject, limit: int | None) -> None:
        alive = [r for r, h in self.held.items() if h.alive]
        resting = data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
        can, free = sorted(self.may_move(resting), reverse=True), sorted(self.free())
        assert set(np.flatnonzero(movable(self.manager, resting)).tolist()) == set(can)
        count = sum(a > b for a, b in zip(can, free, strict=False))
        count = count if limit is None else min(count, limit)
        new = dict(zip(sorted(can[:count]), free[:count], strict=True))
        sequences = {r: r.sequence.array.tolist() for r in alive}
        assert compact(self.manager, resting, limit=limit) == count
        self.expect_moved(pages_of(self.pool, *new))
        self.cached = {hash: new.get(page, page) for hash, page in self.cached.items()}
        sealed: list[int] = []
        for reservation in alive:
            held = self.held[reservation]
            sealed += [new[page] for page in held.sealed if page in new]
            held.state = {new.get(page, page): state for page, state in held.state.items()}
            held.sealed = {new.get(page, page) for page in held.sealed}
            assert reservation.sequence.array.tolist() == [new.get(page, page) for page in sequences[reservation]]
        # from here on the bytes behind the new numbers have to be those that were sealed
        self.announce(pages_of(self.pool, *sealed, *(set(new.values()) & set(self.cached.values()))))

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def move_what_must_stay(self, data: st.DataObject) -> None:
        must = sorted(set(range(1, NUM_PAGES)) - self.may_move([]))
        page = pages_of(self.pool, data.draw(st.sampled_from(must)))
        before = self.manager.table.rows.copy()
        with pytest.raises(BoundsError):
            move(self.manager, page, LocalPages.checked([min(self.free())], NUM_PAGES))
        assert np.array_equal(before, self.manager.table.rows)
