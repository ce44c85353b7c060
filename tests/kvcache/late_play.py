"""A few requests with claims on a pool that is too small for them, at random: can everybody always end?"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

from pdkv.errors import CapacityError
from pdkv.ids import LeaseId
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.ownership import PageState
from pdkv.kvcache.radix_node import Node
from pdkv.kvcache.verifier import Verifier
from pdkv.replay.pool import pool_without_bytes
from tests.kvcache.chains import chain_of

PAGES = 14
PROMPTS = ["abcdef", "abcdef", "abcxyz", "abc", "uvwuvw", "q", ""]
STEPS = 40


class Play:
    """One seed. What is said of the state is recounted from pages and locks, not taken from what grants count."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = CacheManager(pool_without_bytes(PAGES))
        self.verifier = Verifier(self.manager.pool, "none")
        self.leases: list[LeaseId] = []

    @property
    def live(self) -> list[Reservation]:
        return list(self.manager.reservations.values())

    def go(self) -> str:
        """How it went wrong; empty: it didn't."""
        for number in range(STEPS):
            actions = [self.start] + [self.grow, self.commit, self.commit, self.end, self.lease] * bool(self.live)
            self.random.choice(actions)(number)
            if not self.possible():
                return "unsafe"
        self.manager.check()
        for lease in self.leases:
            self.manager.drop_lease(lease)
        return self.ended()

    def start(self, number: int) -> None:
        hashes = chain_of(self.random.choice(PROMPTS))
        total = max(len(hashes) + self.random.choice((0, 1, 4, 8)), 1)
        with suppress(CapacityError):
            self.manager.reserve(hashes, total, max_hit_pages=99, ahead=self.random.choice((0, 1, 2, 5, None)))

    def grow(self, number: int) -> None:
        one = self.random.choice(self.live)
        self.given(one, min(self.random.randrange(4), one.rest))

    def commit(self, number: int) -> None:
        one = self.random.choice(self.live)
        first, stop = one.committed, min(len(one.hashes), len(one.sequence))
        pages = one.sequence[first : self.random.randint(first, stop)]
        if len(pages):
            hashes = one.hashes.part(first, first + len(pages))
            self.manager.commit(self.verifier.seal(one.id, first, pages, hashes))

    def end(self, number: int) -> None:
        self.manager.end(self.random.choice(self.live))

    def lease(self, number: int) -> None:
        if self.leases and self.random.random() < 0.6:
            self.manager.drop_lease(self.leases.pop())
        else:
            self.leases.append(LeaseId(str(number)))
            self.manager.hand_over(self.random.choice(self.live), self.leases[-1])

    def given(self, one: Reservation, count: int) -> bool:
        try:
            self.manager.grow(one, count)
        except CapacityError:
            return False
        return True

    def possible(self) -> bool:
        """All can get the rest and end, in some order, once the leases have ended."""
        live, ownership = self.live, self.manager.ownership
        own = {r: int(ownership.held(r.pages, r.id, PageState.RESERVED, PageState.PRIVATE).sum()) for r in live}
        locks: Counter[Node] = Counter(node for r in live for node in r.node.path())
        there = PAGES - sum(own.values()) - sum(node.pages.size for node in locks)
        while live:
            ends = next((r for r in live if r.rest <= there), None)
            if ends is None:
                return False
            live.remove(ends)
            there += own[ends]
            for node in ends.node.path():
                locks[node] -= 1
                there += node.pages.size * (not locks[node])
        return True

    def ended(self) -> str:
        """From here on each takes what it gets, one window or all of it, and ends when it has everything."""
        while self.live:
            moved = False
            for one in self.live:
                moved |= one.rest > 0 and (self.given(one, min(2, one.rest)) or self.given(one, one.rest))
                if not one.rest:
                    self.manager.end(one)
                    moved = True
            if not moved:
                return "stuck"
        return ""
