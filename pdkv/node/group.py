"""The leader's side of a decode group: its node's parts, such that what they do happens on every rank.

Guarantees: ranks reserve, commit and free in one order, that of the leader's log, so page ids and trees are the same on
all; a page is committed only after every rank has read it and reported the announced digests (VERIFIED), and a request
is admitted only after every rank has committed (`barrier`); what fails on one rank fails the request on all, and frees
nothing before every rank's read or step has ended; pages that are quarantined for one rank are quarantined on all; a
rank that can't be reached or gives other results ends the group: it isn't ready any more, and refuses every request
until it is started anew.

`DecodeNode` doesn't know of it: `lead` turns the parts of one rank into a group's. Speculation stays with engines that
step all of their ranks themselves: drafts are rolled back by a pool's own hand, which this log doesn't hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from pdkv.errors import BadPage, ConfigError, DigestMismatch, IntegrityError
from pdkv.geometry.page_layout import Group as Cache
from pdkv.ids import LocalPages, PageHashes, ReservationId, UInt32Array, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.kvcache.eviction import EvictionOrder
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Soon, VerifiedPages, Verifier
from pdkv.node.base import NodeParts
from pdkv.node.group_log import Group, GroupSettings, Member
from pdkv.node.group_transfer import GroupTransfer
from pdkv.node.ports import Computed, Engine, Logits
from pdkv.node.ranks import NO_HASHES, Entry, Joining, Op, RankPort, RankStep, StepKind
from pdkv.node.sampling import logits_digest

__all__ = ["Group", "GroupEngine", "GroupManager", "GroupSettings", "GroupTransfer", "GroupVerifier", "lead"]

T = TypeVar("T")
_NAMED_IN_TEXT = 16


async def lead(
    parts: NodeParts,
    ranks: Sequence[RankPort],
    settings: GroupSettings | None = None,
    *,
    order: EvictionOrder | None = None,
) -> tuple[NodeParts, Group]:
    """Parts of a node that hasn't served yet, as the leader's of a group with these other ranks.

    `order` is that of all ranks' trees. Raises `ConfigError` for parts that draft, and what `RankPort.join` raises.
    """
    if parts.drafter is not None:
        raise ConfigError("speculation", parts.contract.speculation, "none: a group's engine drafts by itself")
    joining = Joining(parts.name, parts.contract, parts.pool.num_pages)
    group = Group([Member(rank, await rank.join(joining)) for rank in ranks], settings or GroupSettings())
    group.ended = lambda why: parts.readiness.say("group", f"the group is broken: {why}")
    of_all = replace(
        parts,
        manager=GroupManager(parts.pool, group, order),
        verifier=GroupVerifier(parts.pool, parts.verifier.algorithm, group),
        transfer=GroupTransfer(parts.transfer, group),
        engine=GroupEngine(parts.engine, group),
        barrier=group.barrier,
    )
    return of_all, group


class GroupManager(CacheManager):
    """The leader's manager. Each call that changed something is an entry of the log; one that raised has changed
    nothing, and is none. Pages are neither moved nor lent, and a request has all of its own from the start: no entry
    says otherwise, and ranks would part."""

    renumbers = False
    lends = False

    def __init__(self, pool: SlotPool, group: Group, order: EvictionOrder | None = None) -> None:
        super().__init__(pool, order=order)
        self._group = group

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
        """As `CacheManager.reserve`; raises `ConfigError` if some are to be taken later."""
        if ahead is not None:
            raise ConfigError("reserve", "late", "all, in a group of ranks")
        self._group.require_whole()
        made = super().reserve(
            hashes, total_pages, max_hit_pages=max_hit_pages, drop_pages=drop_pages, priority=priority
        )
        self._write(Op.RESERVE, made.id, made.sequence, hashes, (total_pages, max_hit_pages, drop_pages, priority))
        return made

    def commit(self, verified: VerifiedPages) -> LocalPages:
        standing = super().commit(verified)
        self._write(Op.COMMIT, verified.reservation, standing, verified.hashes, (verified.first_index,))
        return standing

    def extend(self, reservation: Reservation, hashes: PageHashes) -> None:
        super().extend(reservation, hashes)
        self._write(Op.EXTEND, reservation.id, LocalPages.none(), hashes)

    def take_private(self, reservation: Reservation, pages: LocalPages) -> None:
        super().take_private(reservation, pages)
        self._write(Op.TAKE, reservation.id, pages)

    def seal_private(self, reservation: Reservation, verified: VerifiedPages) -> None:
        super().seal_private(reservation, verified)
        self._write(Op.SEAL, reservation.id, verified.pages, verified.hashes, (verified.first_index,))

    def reopen_private(self, reservation: Reservation, pages: LocalPages) -> None:
        super().reopen_private(reservation, pages)
        self._write(Op.REOPEN, reservation.id, pages)

    def end(self, reservation: Reservation, *, writers: bool = False) -> LocalPages:
        alive = reservation.alive
        held = super().end(reservation, writers=writers)
        if alive:
            self._write(Op.END, reservation.id, LocalPages.none(), NO_HASHES, (int(writers),))
        return held

    def quarantine(self, reservation: Reservation, pages: LocalPages, reason: str) -> None:
        super().quarantine(reservation, pages, reason)
        self._group.write(Entry(Op.QUARANTINE, reservation.id, pages.array, reason=reason))

    def release_quarantine(self, reservation: Reservation, pages: LocalPages) -> None:
        super().release_quarantine(reservation, pages)
        self._write(Op.RELEASE, reservation.id, pages)

    def _write(
        self,
        op: Op,
        reservation: ReservationId,
        pages: LocalPages,
        hashes: PageHashes = NO_HASHES,
        numbers: tuple[int, ...] = (),
    ) -> None:
        self._group.write(Entry(op, reservation, pages.array, hashes, numbers))


class GroupVerifier(Verifier):
    """Proves pages on every rank at once; called from a thread that is not the loop's."""

    def __init__(self, pool: SlotPool, algorithm: str, group: Group) -> None:
        super().__init__(pool, algorithm)
        self._group = group

    @property
    def watches(self) -> bool:
        return False

    def watch(self, arrival: Arrival, soon: Soon) -> None:
        """Ranks are waited for while the leader's own pages are digested."""

    def verify(self, arrival: Arrival) -> VerifiedPages:
        """Raises `DigestMismatch` for bytes of any rank that are not what was announced: so those of replicated
        segments are also the same on all."""
        asked = asyncio.run_coroutine_threadsafe(self._ranks(arrival), self._group.loop)
        try:
            verified = super().verify(arrival)
        finally:
            theirs = asked.result()
        self._compare(arrival, theirs)
        return verified

    def seal(
        self, reservation: ReservationId, first_index: int, pages: LocalPages, hashes: PageHashes
    ) -> VerifiedPages:
        """Pages that every rank's own engine wrote. Raises `DigestMismatch` for a rank that wrote other bytes."""
        own = super().seal(reservation, first_index, pages, hashes)
        arrival = Arrival(reservation, first_index, pages, hashes, own.digests)
        self._compare(arrival, asyncio.run_coroutine_threadsafe(self._ranks(arrival), self._group.loop).result())
        return own

    async def _ranks(self, arrival: Arrival) -> list[UInt64Array]:
        after = self._group.position
        return await self._group.all(lambda rank: rank.verify(arrival, after))

    def _compare(self, arrival: Arrival, theirs: list[UInt64Array]) -> None:
        for member, digests in zip(self._group.members, theirs, strict=True):
            wrong = digests != arrival.digests
            if not self.checks_digests or not wrong.any():
                continue
            bad = []
            for row in np.flatnonzero(wrong.any(axis=1)).tolist():
                caches = [cache.value for cache, differs in zip(Cache, wrong[row].tolist(), strict=True) if differs]
                where = "both" if len(caches) == len(Cache) else caches[0]
                page = int(arrival.pages.array[row])
                bad.append(BadPage(arrival.first_index + row, page, where, rank=str(member.name)))
            words = "; ".join(map(str, bad[:_NAMED_IN_TEXT]))
            raise DigestMismatch(
                f"bytes of {len(bad)} of {len(wrong)} pages are not what was announced: {words}", bad=bad
            )


class GroupEngine:
    """`node.ports.Engine` of ranks that don't step together by themselves: each computes the whole model over its own
    pages, and must get the leader's logits."""

    def __init__(self, local: Engine, group: Group) -> None:
        self._local = local
        self._group = group

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        step = RankStep(StepKind.FORWARD, self._group.position, tokens, start, pages.array)
        return self._together(step, lambda: self._local.forward(tokens, start, pages), logits_digest)

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        step = RankStep(StepKind.CHUNK, self._group.position, tokens, start, pages.array)
        return self._together(step, lambda: self._local.chunk(tokens, start, pages), lambda c: logits_digest(c.logits))

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        step = RankStep(StepKind.VERIFY, self._group.position, tokens, start, pages.array)
        return self._together(step, lambda: self._local.verify(tokens, start, pages), lambda c: logits_digest(c.logits))

    def _together(self, step: RankStep, compute: Callable[[], T], digest: Callable[[T], int]) -> T:
        asked = asyncio.run_coroutine_threadsafe(self._group.all(lambda rank: rank.step(step)), self._group.loop)
        try:
            mine = compute()
        finally:
            theirs = asked.result()
        for member, found in zip(self._group.members, theirs, strict=True):
            if found != digest(mine):
                raise IntegrityError(f"rank {member.name} computed other logits at {step.start}", rank=member.name)
        return mine
