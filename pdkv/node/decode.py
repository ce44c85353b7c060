"""The decode node: pulls a prompt's missing pages, admits on proof, then decodes.

Guarantees: no token leaves this node before every page of the prompt is committed and prefill's account equals its
own; every page of a request is reserved before anything is asked of a prefill node; a request always ends, with tokens
or with a named error, and gives back all it held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count

from pdkv.errors import (
    BoundsError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    LeaseExpired,
    PdkvError,
    PeerLost,
    ProtocolError,
    WrongIncarnation,
)
from pdkv.ids import RequestId
from pdkv.kvcache.manager import Reservation
from pdkv.node.admission import require_admissible, require_end
from pdkv.node.base import NodeParts, PeerBook, PeerState
from pdkv.node.decoding import Arrived, decode
from pdkv.node.faults import fault_named, handoff_fault_named
from pdkv.node.flow import Idle, deadline, streamed, together
from pdkv.node.intake import Intake, IntakeCount
from pdkv.node.links import Link, Links
from pdkv.node.messages import (
    Accepted,
    GenerateEvent,
    GenerateRequest,
    LeaseCall,
    NodeIntro,
    NodeStatus,
    PagesSealed,
    PrefillDone,
    PrefillRequest,
    Shipment,
)
from pdkv.node.ports import PrefillDirectory
from pdkv.node.preemption import Preemption, PreemptPolicy
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.node.queue import AdmissionQueue, Ask

Emit = Callable[[GenerateEvent], None]
RENEWALS_PER_TTL = 6
"""A lease is renewed every sixth of its life, so that five lost renewals in a row don't end it."""
MAX_LEASE_S = 7 * 86_400.0
"""A peer that says more is not believed."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    prefill_addresses: tuple[str, ...] = ()
    read_deadline_s: float = 30.0
    allow_fault_injection: bool = False
    queue_limit: int = 64
    """Requests that may wait for pages."""
    preempt: PreemptPolicy = PreemptPolicy.NONE
    """How a decoding request gives its pages to one that waits."""
    offload_bytes: int = 1 << 30
    """Host memory for the pages of requests that gave way."""


@dataclass(slots=True)
class _Admitted:
    """What admission hands to the decode loop."""

    done: PrefillDone
    shipment: Shipment


class DecodeNode:
    """Has `generate`, the token stream of a request, and `status`."""

    def __init__(self, parts: NodeParts, directory: PrefillDirectory, settings: DecodeSettings) -> None:
        self.parts = parts
        self.settings = settings
        self.peers = PeerBook(parts)
        self.queue = AdmissionQueue(parts.manager, limit=settings.queue_limit)
        self.preemption = Preemption(parts, self.queue, settings.preempt, settings.offload_bytes)
        self.links = Links(parts, self.peers, directory)
        self._running: set[RequestId] = set()
        self._turn = 0
        self._asked = count()
        self.farewells: set[asyncio.Task[None]] = set()
        """Lease releases on their way: no request waits for them."""
        self.draining = False
        self._idle = Idle(lambda: len(self._running) + len(self.farewells))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """`Token` by token, then `GenerateDone`. Closing it is the abort."""
        return streamed(lambda emit: self._serve(request, emit))

    async def connect(self, address: str) -> NodeIntro:
        """Connect to the prefill node at `address`, unless that is done. Raises `ContractMismatch`, `PeerLost`."""
        return (await self.links.of(address)).intro

    def status(self) -> NodeStatus:
        status = self.peers.status("decode", leases=0, requests=len(self._running))
        return replace(status, queued=len(self.queue), preemptions=self.preemption.preemptions)

    async def drain(self) -> None:
        """Take no new requests; return when running ones have ended and prefill nodes were told so."""
        self.draining = True
        await self._idle.wait()

    def next_request_id(self) -> RequestId:
        """This node's own, new each time that it asks: prefill may still be ending an aborted request when the client
        comes again with the same id."""
        return RequestId(f"{self.parts.name.node}-{next(self._asked)}")

    def say_farewell(self, farewell: Coroutine[None, None, None]) -> None:
        """Run it beside the requests; `drain` waits for it."""
        task = asyncio.create_task(farewell)
        self.farewells.add(task)
        task.add_done_callback(self.farewells.discard)
        task.add_done_callback(lambda _: self._idle.changed())

    async def _serve(self, request: GenerateRequest, emit: Emit) -> None:
        if self.draining:
            raise Draining("this node is draining", node=self.parts.name)
        if request.request_id in self._running:
            raise DuplicateRequest(f"request {request.request_id} runs already", request=request.request_id)
        if request.sampling.max_tokens < 1:
            raise BoundsError("max_tokens", request.sampling.max_tokens, "at least 1")
        prompt = plan_prompt(request.tokens, request.namespace, self.parts.contract)
        self._running.add(request.request_id)
        try:
            async with deadline(request.remaining_s, "the request"):
                await self._generate(request, prompt, emit)
        finally:
            self._running.discard(request.request_id)
            self._idle.changed()

    async def _generate(self, request: GenerateRequest, prompt: Prompt, emit: Emit) -> None:
        """Reserve everything, when it is the request's turn, bring the prompt in, decode; give everything back."""
        began = _now()
        parts = self.parts
        slots = len(prompt.tokens) + request.sampling.max_tokens + parts.contract.draft_tokens
        ask = Ask(prompt.hashes, -(-slots // prompt.page_tokens), prompt.decode_hit_pages, prompt.drop_pages)
        self.queue.require_possible(ask)
        address = request.prefill_address or self._next_address()
        link = await self.links.of(address)
        reservation = await self.queue.admit(ask)
        reservation.public = prompt.public
        try:
            pull = _Pull(self, request, prompt, reservation, link)
            try:
                admitted = await pull.run(began)
            except WrongIncarnation:
                if pull.accepted:
                    raise
                # The node behind the address has begun a new life and refused before its first page: meet it anew.
                self.links.forget(link)
                link = await self.links.of(address)
                admitted = await _Pull(self, request, prompt, reservation, link).run(began)
            self.peers.mark(link.intro.name, PeerState.READY)
            arrived = Arrived(request, prompt, ask, reservation, admitted.done, admitted.shipment)
            await decode(parts, self.preemption, arrived, emit)
        except PeerLost:
            self.links.forget(link)
            raise
        finally:
            parts.manager.end(reservation)

    def _next_address(self) -> str:
        addresses = self.settings.prefill_addresses
        if not addresses:
            raise ConfigError("prefill_address", "", "an address in the request, or prefill_addresses of this node")
        self._turn += 1
        return addresses[self._turn % len(addresses)]


class _Pull:
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

    async def run(self, began_s: float) -> _Admitted:
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
        return _Admitted(done, shipment)

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
