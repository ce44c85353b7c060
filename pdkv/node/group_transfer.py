"""Reads of a decode group: the same remote pages into the same local ones, on every rank.

Guarantees: a read has ended when every rank's has, and its end is the worst of them; it is settled when nothing can
land on any rank; a prefill node is known to all ranks before the first read from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdkv.errors import DeadlineExceeded, PdkvError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import PeerName
from pdkv.node.group_log import Group, Member
from pdkv.node.ports import Transfer
from pdkv.node.ranks import NewPeer, RankOutcome, RankPort, RankRead
from pdkv.transfer.engine import Probe, ReadOrder, ReadOutcome, ReadStatus, TransferStatus


@dataclass(slots=True)
class _GroupRead:
    read_id: int
    local: Future[ReadOutcome]


class GroupTransfer:
    """`node.ports.Transfer` of all ranks: a read has ended when every rank's has."""

    def __init__(self, local: Transfer, group: Group) -> None:
        self._local = local
        self._group = group
        self._running: dict[Future[ReadOutcome], _GroupRead] = {}
        self._last_id = 0

    @property
    def metadata(self) -> bytes:
        return self._local.metadata

    @property
    def metadata_checksum(self) -> int:
        return self._local.metadata_checksum

    @property
    def backend_name(self) -> str:
        return self._local.backend_name

    def add_peer(self, peer: PeerName, metadata: bytes, checksum: int, pool: PoolMap) -> Future[None]:
        """Raises `PeerLost` at once, as `read`, if the group is broken."""
        self._group.require_whole()
        new = NewPeer(peer, metadata, checksum, pool)
        local = self._local.add_peer(peer, metadata, checksum, pool)
        return self._joined(local, [self._group.all(lambda rank: rank.add_peer(new))])

    def remove_peer(self, peer: PeerName) -> Future[None]:
        local, members = self._local.remove_peer(peer), self._group.members
        return self._joined(local, [self._patient(member, lambda rank: rank.remove_peer(peer)) for member in members])

    def read(self, order: ReadOrder) -> Future[ReadOutcome]:
        """Numbers of the outcome are this rank's own, its status is the group's."""
        self._group.require_whole()
        joined: Future[ReadOutcome] = Future()
        joined.set_running_or_notify_cancel()
        self._last_id += 1
        running = self._running[joined] = _GroupRead(self._last_id, self._local.read(order))
        self._group.spawn(self._join(RankRead(self._last_id, self._group.position, order), running, joined))
        return joined

    def cancel(self, read: Future[ReadOutcome]) -> None:
        if running := self._running.get(read):
            self._local.cancel(running.local)
            self._group.spawn(self._cancel_ranks(running.read_id))

    def probe(self, peer: PeerName) -> Future[Probe]:
        return self._local.probe(peer)

    def expect_reads(self, *, peers_may: bool) -> None:
        self._local.expect_reads(peers_may=peers_may)

    def lane(self, peer: PeerName) -> str:
        return self._local.lane(peer)

    def copies(self, peer: PeerName) -> bool:
        return False  # ranks prove pages when they are asked to

    def status(self) -> TransferStatus:
        """Of this rank's own engine."""
        return self._local.status()

    def close(self) -> None:
        self._local.close()

    def _joined(self, local: Future[None], theirs: Sequence[Awaitable[Any]]) -> Future[None]:
        joined: Future[None] = Future()
        joined.set_running_or_notify_cancel()

        async def join() -> None:
            own: asyncio.Future[None] = asyncio.wrap_future(local)
            ended = await asyncio.gather(own, *theirs, return_exceptions=True)
            error = next((end for end in ended if isinstance(end, BaseException)), None)
            if error is not None:
                joined.set_exception(error)
            else:
                joined.set_result(None)

        self._group.spawn(join())
        return joined

    async def _cancel_ranks(self, read_id: int) -> None:
        try:
            await self._group.all(lambda rank: rank.cancel(read_id))
        except PdkvError:
            return  # a lost rank: the group is broken, and its read has ended as far as anybody here can know

    async def _join(self, read: RankRead, running: _GroupRead, joined: Future[ReadOutcome]) -> None:
        limit_s = read.order.deadline_s + self._group.settings.answer_s
        asked = [self._group.ask(m, m.port.read(read), limit_s) for m in self._group.members]
        own, *theirs = await asyncio.gather(asyncio.wrap_future(running.local), *asked, return_exceptions=True)
        del self._running[joined]
        if isinstance(own, BaseException):
            own = _never_posted(own, len(read.order))
        outcome, unsettled = own, []
        for member, answer in zip(self._group.members, theirs, strict=True):
            outcome = _worse(outcome, answer, member)
            if isinstance(answer, RankOutcome) and answer.status is ReadStatus.UNSETTLED:
                unsettled.append(member)
        if outcome.status is ReadStatus.UNSETTLED:
            settled: Future[None] = Future()
            settled.set_running_or_notify_cancel()
            self._group.spawn(self._settle(read.read_id, own.settled, unsettled, settled))
            outcome = replace(outcome, settled=settled)
        joined.set_result(outcome)

    async def _settle(
        self, read_id: int, own: Future[None] | None, members: list[Member], settled: Future[None]
    ) -> None:
        waits = [self._patient(member, lambda rank: rank.settled(read_id)) for member in members]
        await asyncio.gather(*([asyncio.wrap_future(own)] if own else []), *waits)
        settled.set_result(None)

    async def _patient(self, member: Member, call: Callable[[RankPort], Awaitable[None]]) -> None:
        """Until reads of this rank have settled, which may take long. A rank that is lost has no pages that matter: no
        log reaches it, so nobody is given pages there."""
        while True:
            try:
                return await call(member.port)
            except DeadlineExceeded:
                continue  # a call has one; what it waits for may take longer
            except PdkvError as error:
                return self._group.lose(member, error)


def _never_posted(error: BaseException, pages: int) -> ReadOutcome:
    if not isinstance(error, PdkvError):
        raise error
    return ReadOutcome(ReadStatus.FAILED, np.zeros(pages, np.bool_), 0, 0, 0, 0.0, 0.0, str(error))


_RANKING = (ReadStatus.DONE, ReadStatus.FAILED, ReadStatus.UNSETTLED)


def _worse(outcome: ReadOutcome, answer: RankOutcome | BaseException, member: Member) -> ReadOutcome:
    """`outcome` with what one rank says: the worst end is the group's; a page is stale if it was for anybody."""
    if isinstance(answer, BaseException):
        answer = RankOutcome(ReadStatus.FAILED, np.zeros_like(outcome.stale), str(answer))
    if _RANKING.index(answer.status) > _RANKING.index(outcome.status):
        outcome = replace(outcome, status=answer.status, reason=f"rank {member.name}: {answer.reason}")
    if outcome.status is ReadStatus.DONE:
        return replace(outcome, stale=outcome.stale | answer.stale)
    return replace(outcome, stale=np.zeros_like(outcome.stale))
