"""The log of a decode group, its ranks, and who has carried out how much of it.

Guarantees: every rank gets every entry once, in order; `barrier` returns only when all have carried out all that was
written before it; a rank that can't be reached, doesn't answer in time or gives other results ends the group, also
while there is nothing to do, and everybody who waits for it hears so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdkv.errors import DeadlineExceeded, IntegrityError, PeerLost
from pdkv.ids import PeerName
from pdkv.node.flow import deadline
from pdkv.node.ranks import Entry, RankPort

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    answer_s: float = 30.0
    """A rank that takes longer for an entry of the log, a step, digests, or a read beyond its deadline, is lost."""
    idle_s: float = 2.0
    """A rank that had nothing to do for so long is asked whether it is still there."""


@dataclass(eq=False, slots=True)
class Member:
    port: RankPort
    name: PeerName
    acked: int = 0
    """Entries of the log that it has carried out."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Group:
    """The other ranks, the log, and who has carried out how much of it. Runs on the leader's loop."""

    def __init__(self, members: Sequence[Member], settings: GroupSettings) -> None:
        self.members = tuple(members)
        self.settings = settings
        self.position = 0
        """Entries written so far."""
        self.broken: PeerLost | None = None
        self.ended: Callable[[PeerLost], None] = lambda why: None
        """Called once, when the group is broken."""
        self.loop = asyncio.get_running_loop()
        self._log: list[Entry] = []
        """Those that some rank hasn't carried out yet: the last ones."""
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._senders = [asyncio.create_task(self._send(member)) for member in self.members]
        for sender, member in zip(self._senders, self.members, strict=True):
            sender.add_done_callback(lambda task, member=member: self._sender_ended(task, member))  # type: ignore[misc]

    def write(self, entry: Entry) -> None:
        """What the leader's manager has just done."""
        self._log.append(entry)
        self.position += 1
        for member in self.members:
            member.wake.set()

    def require_whole(self) -> None:
        """Raises `PeerLost` once a rank is lost."""
        if self.broken is not None:
            raise PeerLost(f"the group is broken: {self.broken}", reason=self.broken)

    async def barrier(self) -> None:
        """Until every rank has carried out all that the leader has. Raises `PeerLost` if one never will."""
        position = self.position
        while any(member.acked < position for member in self.members):
            self.require_whole()
            self._moved.clear()
            await self._moved.wait()
        self.require_whole()

    async def ask(self, member: Member, call: Awaitable[T], within_s: float) -> T:
        """What a rank answers; it is lost, and with it the group, if it doesn't or can't be used any more."""
        try:
            async with deadline(within_s, f"rank {member.name}"):
                return await call
        except (PeerLost, DeadlineExceeded, IntegrityError) as error:
            self.lose(member, error)
            raise

    async def all(self, call: Callable[[RankPort], Awaitable[T]]) -> list[T]:
        """Every rank's answer, in order. All have answered or failed before the first error is raised."""
        calls = (self.ask(member, call(member.port), self.settings.answer_s) for member in self.members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Nothing more is sent; waits for what is under way."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, *self._tasks, return_exceptions=True)

    async def _send(self, member: Member) -> None:
        """Entries in order, those that have gathered at once; none at all, when it was long idle, as a sign of life."""
        while True:
            batch = self._log[len(self._log) - (self.position - member.acked) :]
            await self.ask(member, member.port.apply(member.acked, batch), self.settings.answer_s)
            member.acked += len(batch)
            del self._log[: len(self._log) - (self.position - min(m.acked for m in self.members))]
            self._moved.set()
            if member.acked == self.position:
                await self._work_for(member)

    async def _work_for(self, member: Member) -> None:
        """There is, or it is time for a sign of life."""
        member.wake.clear()
        try:
            async with asyncio.timeout(self.settings.idle_s):
                await member.wake.wait()
        except TimeoutError:
            return

    def _sender_ended(self, task: asyncio.Task[None], member: Member) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.lose(member, error)

    def lose(self, member: Member, error: BaseException) -> None:
        """The rank is of no use any more; the first reason stays."""
        if self.broken is None:
            self.broken = PeerLost(f"rank {member.name}: {error}", rank=member.name, error=type(error).__name__)
            self.ended(self.broken)
        self._moved.set()
