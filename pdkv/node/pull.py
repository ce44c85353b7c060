"""One attempt to bring a prompt from a prefill node into this node's tree.

Guarantees: it returns only when every page of the prompt is committed and prefill's account equals this node's own;
its lease is renewed while it runs, and let go of however it ends; what prefill says is used only in its due order.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdkv.errors import DeadlineExceeded, LeaseExpired, PdkvError, PeerLost, ProtocolError
from pdkv.kvcache.manager import Reservation
from pdkv.node.admission import require_admissible, require_end
from pdkv.node.faults import fault_named, handoff_fault_named
from pdkv.node.flow import deadline, together
from pdkv.node.intake import Intake, IntakeCount
from pdkv.node.links import Link
from pdkv.node.messages import (
    Accepted,
    GenerateRequest,
    LeaseCall,
    PagesSealed,
    PrefillDone,
    PrefillRequest,
    Shipment,
)
from pdkv.node.peers import PeerState
from pdkv.node.prompt import Prompt

if TYPE_CHECKING:
    from pdkv.node.decode import DecodeNode

RENEWALS_PER_TTL = 6
"""A lease is renewed every sixth of its life, so that five lost renewals in a row don't end it."""
MAX_LEASE_S = 7 * 86_400.0
"""A peer that says more is not believed."""


@dataclass(slots=True)
class Admitted:
    """What admission hands to the decode loop."""

    done: PrefillDone
    shipment: Shipment


class Pull:
    """One request's prompt on its way from a prefill node into this node's tree."""

    def __init__(
        self, node: DecodeNode, request: GenerateRequest, prompt: Prompt, reservation: Reservation, link: Link
    ) -> None:
        self._node = node
        self._parts = node.parts
        self._request = request
        self._prompt = prompt
        self._reservation = reservation
        self._link = link
        self._envelope = node.parts.envelope(link.intro.name)
        self._lease: Accepted | None = None
        self._leased = asyncio.Event()
        self._fault = fault_named(request.fault, allowed=node.settings.allow_fault_injection)

    @property
    def accepted(self) -> bool:
        """Prefill took the request: from here on it is never asked twice."""
        return self._lease is not None

    async def run(self, began_s: float) -> Admitted:
        """Returns once every page is committed and both accounts are equal. The lease is let go of, either way."""
        until_s = began_s + self._request.remaining_s
        try:
            async with together() as group:
                intake = Intake(
                    self._parts,
                    self._link.intro,
                    self._prompt,
                    self._reservation,
                    group,
                    self._node.settings.read_deadline_s,
                    self._fault,
                )
                renewing = group.create_task(self._renew())
                done, heard_s = await self._follow(intake, until_s - _now())
                await intake.finish()
                renewing.cancel()
            require_admissible(done, self._prompt, self._parts.contract, proved=self._parts.verifier.checks_digests)
        finally:
            if self._lease is not None:
                self._node.say_farewell(self._release(self._lease))
        admitted_s = _now()
        shipment = self._shipment(intake.count, done, exposed_s=admitted_s - heard_s, ttft_s=admitted_s - began_s)
        return Admitted(done, shipment)

    async def _follow(self, intake: Intake, remaining_s: float) -> tuple[PrefillDone, float]:
        """Consume prefill's stream in its due order, Accepted, PagesSealed …, PrefillDone, until it ends.

        Returns the last event and when it came, in the loop's seconds.
        """
        request = PrefillRequest(
            envelope=self._envelope,
            request_id=self._node.next_request_id(),
            tokens=self._prompt.tokens,
            namespace=self._request.namespace,
            first_page_wanted=len(self._reservation.hit),
            sampling=self._request.sampling,
            remaining_s=remaining_s,
            want_logits=self._request.want_logits,
            priority=self._request.priority,
        )
        done: PrefillDone | None = None
        heard_s = 0.0
        async with aclosing(self._link.peer.prefill(request)) as events:
            async for event in events:
                match event:
                    case Accepted() if self._lease is None:
                        _require_ttl(event.ttl_s)
                        self._lease = event
                        self._leased.set()
                    case PagesSealed() if self._lease is not None and done is None:
                        intake.announce(event)
                    case PrefillDone() if self._lease is not None and done is None:
                        done, heard_s = self._taken(event), _now()
                        intake.announce_tail(done.tail)
                    case _:
                        raise ProtocolError(f"{type(event).__name__} out of order", event=type(event).__name__)
        if done is None:
            raise PeerLost("prefill's stream ended without PrefillDone", peer=self._link.intro.name)
        return done, heard_s

    def _taken(self, done: PrefillDone) -> PrefillDone:
        """Prefill's last words, checked; with the fault that the request asks for, if it is one of the hand-off."""
        drafter = self._parts.drafter
        require_end(done, self._prompt, self._parts.contract, drafter.hidden_width if drafter else 0)
        if done.draft is None:
            return done
        return replace(done, draft=handoff_fault_named(self._request.fault)(done.draft))

    async def _renew(self) -> None:
        """From its own task, so that a long engine step doesn't starve it; counts from the last acknowledged one."""
        await self._leased.wait()
        lease = self._lease
        if lease is None:
            return
        call, ttl_s = LeaseCall(self._envelope, lease.lease_id), lease.ttl_s
        ends_s = _now() + ttl_s
        while True:
            await asyncio.sleep(ttl_s / RENEWALS_PER_TTL)
            asked_s = _now()
            try:
                async with deadline(ends_s - asked_s, "renewing the lease"):
                    ttl_s = await self._link.peer.renew_lease(call)
                _require_ttl(ttl_s)
                ends_s = asked_s + ttl_s
            except (PeerLost, DeadlineExceeded) as error:
                if _now() >= ends_s:
                    raise LeaseExpired("no renewal was acknowledged in time", lease=lease.lease_id) from error

    async def _release(self, lease: Accepted) -> None:
        """Tell prefill that its pages may go. If it can't be told, the lease expires by itself."""
        try:
            async with deadline(lease.ttl_s, "releasing the lease"):
                await self._link.peer.release_lease(LeaseCall(self._envelope, lease.lease_id))
        except PdkvError:
            self._node.peers.mark(self._link.intro.name, PeerState.SUSPECT)

    def _shipment(self, count: IntakeCount, done: PrefillDone, *, exposed_s: float, ttft_s: float) -> Shipment:
        fmt = self._parts.pool.fmt
        return Shipment(
            prompt_tokens=len(self._prompt.tokens),
            pages_total=self._prompt.pages,
            pages_hit=len(self._reservation.hit),
            pages_shipped=count.pages,
            bytes_main=count.pages * fmt.main_bytes,
            bytes_index=count.pages * fmt.index_bytes,
            bytes_tail=fmt.page_bytes if done.tail else 0,
            bytes_backend=count.bytes_backend,
            descriptors=count.descriptors,
            digests_verified=count.digests_verified,
            chunks=len(done.chunk_starts),
            prefill_s=done.prefill_s,
            transfer_s=count.busy_s,
            exposed_transfer_s=exposed_s,
            ttft_s=ttft_s,
        )


def _require_ttl(ttl_s: float) -> None:
    """A lease has to end, and must be renewed at times that a clock can show."""
    if not 0 < ttl_s <= MAX_LEASE_S:  # written so that NaN fails too
        raise ProtocolError(f"a lease of {ttl_s} s; allowed: above 0, at most {MAX_LEASE_S:g}", ttl_s=ttl_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
