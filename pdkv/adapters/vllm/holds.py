"""Blocks of finished prompts that are kept for other engines: named, digested, lent, and let go.

Guarantees: a block is named only while a hold has it, so while the engine neither writes to it nor gives it away; what
several holds share is digested once and stays named until the last of them ends; a hold ends once: when its last reader
is done or its lease over, or if nobody asks for it in time; by then the rows of its pages are bumped, so that a late
reader sees that they are void; one that can't be sealed ends at once, and who comes for it is told why; whoever serves
the reads hears when there may be some, and when there can be none any more, however the last reader's lease has ended.
Used on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdkv.errors import DeadlineExceeded, IntegrityError, StalePages
from pdkv.ids import HASH_BYTES, LeaseId, LocalPages, PageHashes, PeerName, ReservationId
from pdkv.kvcache.lease import LeaseTable
from pdkv.kvcache.verifier import Verifier
from pdkv.node.flow import Worker, deadline
from pdkv.node.messages import PagesSealed


@dataclass(frozen=True, slots=True)
class Terms:
    """Of a hold, in seconds."""

    keep_s: float
    """Until somebody asks for it."""
    lease_s: float
    """From then on."""
    find_s: float
    """How long somebody may wait for a prompt that isn't there yet."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what, on the loop."""

    ended: Callable[[str], None]
    """Of each request whose blocks the engine may have back."""
    lent: Callable[[bool], None]
    """When the first lease of a reader begins, and when the last one is over."""


@dataclass(slots=True, eq=False)
class _Held:
    request_id: str
    pages: LocalPages
    hashes: PageHashes
    waiting: LeaseId
    """Its own, for the time until somebody asks for it."""
    readers: set[LeaseId] = field(default_factory=set)
    sealed: bool = False
    error: str = ""
    """Why it can't be lent: the engine has its blocks back."""


class Holds:
    """Of one worker."""

    def __init__(self, verifier: Verifier, myself: PeerName, terms: Terms, listeners: Listeners) -> None:
        pool = verifier.pool
        self.digests = Worker("digests")
        self._verifier, self._myself, self._terms, self._listeners = verifier, myself, terms, listeners
        self._table = pool.table
        self._owners = np.zeros(pool.num_pages, np.int32)
        """Holds that have the page."""
        self._digest_of = np.zeros((pool.num_pages, 2), np.uint64)
        """Of pages that are sealed."""
        self._held: dict[str, _Held] = {}
        self._by_name: dict[bytes, list[_Held]] = {}
        """By the name of the last page, the oldest first."""
        self._leases = LeaseTable()
        self._of_lease: dict[LeaseId, _Held] = {}
        self._readers = 0
        """Leases of all holds but their own."""
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def has(self, hashes: PageHashes) -> bool:
        """All pages of that prompt, ready to be lent."""
        return any(held.hashes == hashes and held.sealed for held in self._by_name.get(_last(hashes), ()))

    async def add(self, request_id: str, pages: LocalPages, hashes: PageHashes) -> None:
        """Keep pages until their reader is done with them. Raises what keeps them from being sealed, whatever it is:
        then they are not kept, and for as long as they would have been, who wants them is told why."""
        lease_id = self._granted(self._myself, self._terms.keep_s)
        held = self._held[request_id] = self._of_lease[lease_id] = _Held(request_id, pages, hashes, lease_id)
        self._by_name.setdefault(_last(hashes), []).append(held)
        self._owners[pages.index] += 1
        try:
            async with self._one_at_a_time:
                await self._seal(held)
        except BaseException as error:
            held.error = f"it could not be sealed: {type(error).__name__}: {error}"
            self._give_back(held)
            raise
        finally:
            self._tell()

    async def lend(self, hashes: PageHashes, first: int, reader: PeerName) -> tuple[LeaseId, PagesSealed]:
        """The pages of a prompt from `first` on. Raises `StalePages` if no hold has it in time."""
        try:
            async with deadline(self._terms.find_s, "looking for a prompt"):
                held = await self._found(hashes)
        except DeadlineExceeded as error:
            words = f"a prompt of {len(hashes)} pages is not here (any more), nor came within {self._terms.find_s:g} s"
            raise StalePages(words, holds=len(self)) from error
        lease_id = self._granted(reader, self._terms.lease_s)
        self._of_lease[lease_id] = held
        held.readers.add(lease_id)
        self._readers += 1
        if self._readers == 1:
            self._listeners.lent(True)
        self.release(held.waiting, self._myself)
        pages, names = held.pages[first:], hashes.part(first, len(hashes))
        ids, generations = np.array(pages.array), self._table.generations(pages)
        return lease_id, PagesSealed(first, names, ids, generations, self._digest_of[pages.index])

    def release(self, lease_id: LeaseId, owner: PeerName) -> None:
        """Idempotent."""
        if self._leases.release(lease_id, owner):
            self._let_go(lease_id)

    async def watch(self) -> None:
        """Runs for the worker's life: ends leases when they expire."""
        loop = asyncio.get_running_loop()
        while True:
            changed = self._changed
            for lease in self._leases.expire(loop.time()):
                self._let_go(lease.lease_id)
            next_s = self._leases.next_expiry_s
            try:
                async with asyncio.timeout(None if next_s is None else max(next_s - loop.time(), 0.0)):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _seal(self, held: _Held) -> None:
        """Pages that another hold has sealed already keep their digests."""
        done = self._table.sealed(held.pages)
        if (self._table.hashes(held.pages.where(done)).column() != held.hashes.column()[done]).any():
            raise IntegrityError("a block is held under two names", request=held.request_id)
        new, names = held.pages.where(~done), PageHashes(held.hashes.column()[~done].tobytes())
        proved = await self.digests.run(self._verifier.seal, ReservationId(0), 0, new, names)
        if self._held.get(held.request_id) is not held:
            return  # nobody asked for it in time, and it took longer than that
        self._digest_of[new.index] = proved.digests
        self._table.seal(new, names)
        held.sealed = True

    async def _found(self, hashes: PageHashes) -> _Held:
        """The one with the fewest readers: the same prompt may have been computed for several."""
        while True:
            changed = self._changed
            same = [held for held in self._by_name.get(_last(hashes), ()) if held.hashes == hashes]
            if ready := [held for held in same if held.sealed]:
                return min(ready, key=lambda held: len(held.readers))
            if same and all(held.error for held in same):
                raise StalePages(same[-1].error, request=same[-1].request_id)
            await changed.wait()

    def _granted(self, owner: PeerName, ttl_s: float) -> LeaseId:
        lease_id = LeaseId(secrets.token_hex(16))
        self._leases.grant(lease_id, owner, ttl_s, asyncio.get_running_loop().time())
        self._tell()
        return lease_id

    def _let_go(self, lease_id: LeaseId) -> None:
        held = self._of_lease.pop(lease_id)
        if lease_id in held.readers:
            held.readers.remove(lease_id)
            self._readers -= 1
            if not self._readers:
                self._listeners.lent(False)
        if held.readers or held.waiting in self._of_lease:
            return
        same = self._by_name[_last(held.hashes)]
        same.remove(held)
        if not same:
            del self._by_name[_last(held.hashes)]
        self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        """Its blocks, once."""
        if self._held.get(held.request_id) is not held:
            return
        del self._held[held.request_id]
        self._owners[held.pages.index] -= 1
        self._table.bump(held.pages.where(self._owners[held.pages.index] == 0))
        self._listeners.ended(held.request_id)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _last(hashes: PageHashes) -> bytes:
    return hashes.raw[-HASH_BYTES:]
