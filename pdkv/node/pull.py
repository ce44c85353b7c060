"""One attempt to bring a prompt from a prefill node into this node's tree.

Guarantees: it returns only when every page of the prompt is committed and prefill's account equals this node's own;
what prefill says is used only in its due order; its lease is renewed while it runs, and can be let go of however it
ended; it doesn't wait for a node that is not heard of any more, or that brings nothing for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from pdkv.errors import DeadlineExceeded, LeaseExpired, PeerLost, ProtocolError
from pdkv.ids import RequestId
from pdkv.kvcache.manager import Reservation
from pdkv.node.admission import require_admissible, require_end
from pdkv.node.base import NodeParts
from pdkv.node.faults import handoff_fault_named
from pdkv.node.flow import deadline, together
from pdkv.node.intake import Intake, Wanted
from pdkv.node.links import Link
from pdkv.node.messages import Accepted, LeaseCall, PagesSealed, PrefillDone, PrefillRequest
from pdkv.node.stages import Stage
from pdkv.node.traced import transfer_told

RENEWALS_PER_TTL = 6
"""A lease is renewed every sixth of its life, so that five lost renewals in a row don't end it."""
RENEWALS_PER_SILENCE = 3
"""And so often that a node which computes for long, without an event or a read, is still heard of."""
MAX_LEASE_S = 7 * 86_400.0
"""A peer that says more is not believed."""
FAREWELL_S = 5.0
"""Longest wait for a prefill node to hear that a lease may go; after that, it expires by itself."""
LATE_SHARE = 0.1
"""Of the allowed silence: a timer that is so late tells of this process, which was stopped or busy, not of peers."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an attempt waits for its prefill node."""

    read_s: float
    """For the end of a read."""
    silence_s: float
    """For a sign of life: an event, the end of a read, a renewed lease."""
    stall_s: float
    """For an event or the end of a read: a node may live, and get nothing done."""


@dataclass(frozen=True, slots=True)
class Brought:
    """A prompt that is on this node."""

    done: PrefillDone
    heard_s: float
    """When its last words came, in the loop's seconds."""
    request: str = ""
    """What it was called where it was computed; empty: that was here."""


class Pull:
    """One request's prompt on its way from a prefill node into this node's tree."""

    def __init__(
        self,
        parts: NodeParts,
        wanted: Wanted,
        reservation: Reservation,
        link: Link,
        patience: Patience,
        reach: Callable[[int], Awaitable[None]],
    ) -> None:
        """`reach` waits until the reservation has so many pages of its sequence."""
        self._parts = parts
        self._wanted = wanted
        self._reservation = reservation
        self._link = link
        self._patience = patience
        self._reach = reach
        self._short = 0
        """Announcements that wait for pages of this node."""
        self._envelope = parts.envelope(link.intro.name)
        self._lease: Accepted | None = None
        self._leased = asyncio.Event()
        self._listening = True
        """Events of prefill's are still to come."""
        self._heard_s = self._moved_s = _now()

    @property
    def accepted(self) -> bool:
        """Prefill took the request: what fails from here on is a failure, and before it a refusal."""
        return self._lease is not None

    async def run(self, request_id: RequestId) -> Brought:
        """Returns once every page is committed and both accounts are equal; `request_id` is what prefill is told."""
        prompt, parts = self._wanted.prompt, self._parts
        with transfer_told(parts, self._link.intro.name, self._wanted.count):
            brought = await self._brought(request_id)
        require_admissible(brought.done, prompt, parts.contract, proved=parts.verifier.checks_digests)
        return brought

    async def _brought(self, request_id: RequestId) -> Brought:
        async with together() as group:
            intake = Intake(
                self._parts,
                self._link.intro,
                self._wanted,
                self._reservation,
                group,
                self._patience.read_s,
                self._move,
                self._places,
            )
            aside = [group.create_task(self._renew()), group.create_task(self._watch(intake))]
            brought = await self._follow(request_id, intake)
            await intake.finish()
            for task in aside:
                task.cancel()
        return brought

    async def farewell(self) -> None:
        """Tell prefill that its pages may go. If it can't be told, the lease expires by itself.

        Raises what the call raises.
        """
        if self._lease is not None:
            async with deadline(min(self._lease.ttl_s, FAREWELL_S), "releasing the lease"):
                await self._link.peer.release_lease(LeaseCall(self._envelope, self._lease.lease_id))

    async def _follow(self, request_id: RequestId, intake: Intake) -> Brought:
        """Consume prefill's stream in its due order, Accepted, PagesSealed …, PrefillDone, until it ends."""
        brought: Brought | None = None
        self._wanted.at(Stage.ASKED)
        self._move()
        async with aclosing(self._link.peer.prefill(self._request(request_id))) as events:
            async for event in events:
                self._move()
                match event:
                    case Accepted() if self._lease is None:
                        require_ttl(event.ttl_s)
                        self._lease = event
                        self._leased.set()
                        self._wanted.at(Stage.ACCEPTED)
                        if event.cached is not None:
                            intake.announce(event.cached)
                    case PagesSealed() if self._lease is not None and brought is None:
                        intake.announce(event)
                    case PrefillDone() if self._lease is not None and brought is None:
                        brought = Brought(self._taken(event), _now(), request_id)
                        self._wanted.at(Stage.PREFILLED)
                        intake.announce_tail(event.tail)
                    case _:
                        raise ProtocolError(f"{type(event).__name__} out of order", event=type(event).__name__)
        self._listening = False
        if brought is None:
            raise PeerLost("prefill's stream ended without PrefillDone", peer=self._link.intro.name)
        return brought

    def _request(self, request_id: RequestId) -> PrefillRequest:
        asked = self._wanted.request
        return PrefillRequest(
            envelope=self._envelope,
            request_id=request_id,
            tokens=self._wanted.prompt.tokens,
            namespace=asked.namespace,
            first_page_wanted=len(self._reservation.hit),
            sampling=asked.sampling,
            remaining_s=self._wanted.until_s - _now(),
            want_logits=asked.want_logits,
            priority=asked.priority,
            offered=self._offered(),
        )

    def _offered(self) -> PagesSealed | None:
        """What prefill may read back: pages of this node, which the reservation keeps until the attempt has ended.

        None of a node that proves nothing of what it has.
        """
        hit = self._reservation.hit
        if not (self._wanted.offer and len(hit) and self._parts.verifier.checks_digests):
            return None
        return self._parts.columns(0, hit, self._wanted.prompt.hashes.part(0, len(hit)))

    def _taken(self, done: PrefillDone) -> PrefillDone:
        """Prefill's last words, checked; with the fault that the request asks for, if it is one of the hand-off."""
        drafter = self._parts.drafter
        require_end(done, self._wanted.prompt, self._parts.contract, drafter.hidden_width if drafter else 0)
        if done.draft is None:
            return done
        return replace(done, draft=handoff_fault_named(self._wanted.request.fault)(done.draft))

    async def _renew(self) -> None:
        """From its own task, so that a long engine step doesn't starve it; counts from the last acknowledged one."""
        await self._leased.wait()
        lease = self._lease
        if lease is None:
            return
        call, ttl_s = LeaseCall(self._envelope, lease.lease_id), lease.ttl_s
        ends_s = _now() + ttl_s
        while True:
            await asyncio.sleep(min(ttl_s / RENEWALS_PER_TTL, self._patience.silence_s / RENEWALS_PER_SILENCE))
            asked_s = _now()
            try:
                async with deadline(ends_s - asked_s, "renewing the lease"):
                    ttl_s = await self._link.peer.renew_lease(call)
                require_ttl(ttl_s)
                ends_s = asked_s + ttl_s
                self._heard_s = _now()
            except (PeerLost, DeadlineExceeded) as error:
                if _now() >= ends_s:
                    raise LeaseExpired("no renewal was acknowledged in time", lease=lease.lease_id) from error

    async def _watch(self, intake: Intake) -> None:
        """Give the node up when it is needed and nothing comes from it."""
        patience = self._patience
        while True:
            now_s = _now()
            if self._short:
                self._moved_s = now_s  # the node has to live, but it is not the one that is waited for
            elif not self._listening and not intake.reading:
                self._move()  # what is left to do is this node's
            left_s = min(self._heard_s + patience.silence_s, self._moved_s + patience.stall_s) - now_s
            if left_s <= 0:
                raise self._given_up(now_s)
            await asyncio.sleep(left_s)
            if _now() - now_s - left_s > LATE_SHARE * patience.silence_s:
                self._move()

    async def _places(self, pages: int) -> None:
        """Until this node has so many of the request's pages."""
        self._short += 1
        try:
            await self._reach(pages)
        finally:
            self._short -= 1
            self._moved_s = _now()

    def _given_up(self, now_s: float) -> PeerLost | DeadlineExceeded:
        silent_s, stalled_s = now_s - self._heard_s, now_s - self._moved_s
        facts = {"peer": self._link.intro.name, "address": self._link.address}
        if silent_s >= self._patience.silence_s:
            return PeerLost(f"prefill node {self._link.intro.name} was not heard of for {silent_s:.3g} s", **facts)
        words = f"prefill node {self._link.intro.name} lives, but brought nothing for {stalled_s:.3g} s"
        return DeadlineExceeded(words, **facts)

    def _move(self) -> None:
        """A sign of life, and of work."""
        self._heard_s = self._moved_s = _now()


def require_ttl(ttl_s: float) -> None:
    """A lease has to end, and must be renewed at times that a clock can show."""
    if not 0 < ttl_s <= MAX_LEASE_S:  # written so that NaN fails too
        raise ProtocolError(f"a lease of {ttl_s} s; allowed: above 0, at most {MAX_LEASE_S:g}", ttl_s=ttl_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
