"""The prefill node: computes a prompt in chunks, seals full pages, announces them while it goes on computing.

Guarantees: a page is announced only when its bytes are final, digested, in the tree and under the request's lease; a
request that ends in any way gives back what it held, after the engine step that was running has ended; pages stay
readable until the lease is released or expires, whichever comes first, and are then ordinary cache.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from pdkv.errors import BoundsError, DuplicateRequest, LeaseExpired
from pdkv.ids import LeaseId, LocalPages, PageHashes, PeerName, RequestId
from pdkv.kvcache.manager import Reservation
from pdkv.node.backlog import Backlog, Share
from pdkv.node.base import NodeParts
from pdkv.node.compacting import compact_pages
from pdkv.node.computing import Computation
from pdkv.node.flow import Idle, deadline, streamed
from pdkv.node.keeper import KeeperSettings, PeerKeeper
from pdkv.node.messages import (
    Accepted,
    LeaseCall,
    LendCall,
    Loan,
    LocateCall,
    NodeIntro,
    NodeStatus,
    PagesSealed,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
)
from pdkv.node.page_queue import PageQueue
from pdkv.node.peers import PeerBook
from pdkv.node.prompt import Prompt, account_of, plan_prompt
from pdkv.node.pull_back import PullBack
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.node.sampling import logits_digest
from pdkv.node.source import Source
from pdkv.node.stages import Stage
from pdkv.node.workspace import Workspace
from pdkv.tracing.span import span

log = logging.getLogger(__name__)
Emit = Callable[[PrefillEvent], None]
COMPUTE = "pdkv.compute"
"""The span of all chunks of a prompt, with the proof of their pages."""


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    chunk_tokens: int
    """A multiple of the page size: tokens computed before the next pages are announced."""
    lease_ttl_s: float = 30.0
    max_batched_tokens: int | None = None
    """Most tokens of one engine step; None: a chunk."""
    scores_bytes: int | None = None
    """Most memory of one step's index scores; None: no limit."""
    leases_per_peer: int | None = None
    """Most leases of one decode node at once; None: as many as it asks for."""
    pages_wait_s: float = 2.0
    """Longest that a request waits for pages to be given back, before it is refused: shorter than a decode node waits
    for a sign of life."""
    pull_back_s: float | None = 10.0
    """Longest that a request waits for pages that decode has, before what has not come is computed; None: no page is
    read from decode."""
    keeper: KeeperSettings = field(default_factory=KeeperSettings)


class PrefillNode:
    """Has the methods of `node.ports.PrefillPeer`: a decode node can hold it directly, or over gRPC."""

    def __init__(self, parts: NodeParts, settings: PrefillSettings) -> None:
        """Raises `BoundsError` if a chunk is not whole pages."""
        if settings.chunk_tokens < 1 or settings.chunk_tokens % parts.contract.page_tokens:
            allowed = f"a multiple of {parts.contract.page_tokens}"
            raise BoundsError("chunk_tokens", settings.chunk_tokens, allowed)
        self.parts = parts
        self.settings = settings
        self.workspace = Workspace(
            page_tokens=parts.contract.page_tokens,
            index_topk=parts.contract.index_topk,
            max_batched_tokens=settings.max_batched_tokens or settings.chunk_tokens,
            scores_bytes=settings.scores_bytes,
        )
        log.info("workspace beside the pages: %s", self.workspace)
        self.peers = PeerBook(parts)
        # A peer that is silent for that long has no lease any more: they end by themselves.
        forget_s = max(settings.keeper.forget_s, settings.lease_ttl_s)
        self.keeper = PeerKeeper(self.peers, self.peers.prove, replace(settings.keeper, forget_s=forget_s))
        self.source = Source(parts, self.peers, ttl_s=settings.lease_ttl_s, per_peer=settings.leases_per_peer)
        self.pull_back = PullBack(parts, self.peers, limit_s=settings.pull_back_s)
        self.backlog = Backlog()
        self._running: set[tuple[PeerName, RequestId]] = set()
        self._idle = Idle(lambda: len(self._running) + len(self.source.leases))
        self.queue = PageQueue(settings.pages_wait_s)
        parts.manager.on_room = self.queue.changed
        self.source.ended = self._idle.changed

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        """Compare contracts, learn the peer's memory, answer with this node's own introduction."""
        await self.peers.admit(intro)
        return self.parts.intro()

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        """`Accepted`, then `PagesSealed` as pages become final, then `PrefillDone`. Closing it is the abort.

        The lease outlives only a stream that was taken to its end: the caller's last pull is still running.
        """
        lease_id = LeaseId(secrets.token_hex(16))
        events: AsyncGenerator[PrefillEvent, None] = streamed(lambda emit: self._serve(request, lease_id, emit))
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except BaseException:
            self.source.release(lease_id, request.envelope.sender)
            raise

    async def renew_lease(self, call: LeaseCall) -> float:
        """As `Source.renew_lease`."""
        return await self.source.renew_lease(call)

    async def release_lease(self, call: LeaseCall) -> None:
        """As `Source.release_lease`."""
        await self.source.release_lease(call)

    async def locate(self, call: LocateCall) -> int:
        """As `Source.locate`."""
        return await self.source.locate(call)

    async def lend(self, call: LendCall) -> Loan:
        """As `Source.lend`."""
        return await self.source.lend(call)

    def status(self) -> NodeStatus:
        status = self.peers.status(
            "prefill", self.parts.manager, leases=len(self.source.leases), requests=len(self._running)
        )
        return replace(
            status,
            queued=len(self.queue),
            workspace=self.workspace.plan(),
            draining=self.source.draining,
            held_leases=self.source.status(),
            borrowed_pages=self.pull_back.borrower.pages,
            borrow_failures=dict(self.pull_back.borrower.failures),
            waiting_tokens=self.backlog.tokens,
            uses=self.parts.uses,
            totals=self.parts.moved.bytes(self.parts.pool.fmt),
            available_pages=self._available_pages(),
        )

    def estimate(self, call: EstimateCall) -> Estimate:
        """What a request of this prompt would find now."""
        parts = self.parts
        held = parts.manager.tree.match(call.hashes).pages.size
        return Estimate(parts.name, held, self.backlog.tokens, self._available_pages())

    def _available_pages(self) -> int:
        """Not those that requests wait for."""
        return 0 if len(self.queue) else self.parts.available_pages

    async def watch_leases(self) -> None:
        """Runs for the node's life: ends leases when they expire. An expired lease ends its running request too."""
        await self.source.watch_leases()

    async def compact(self) -> int:
        """Move cached pages together, while requests run; returns how many. Raises `ConfigError` in a group."""
        return await compact_pages(self.parts)

    async def drain(self) -> None:
        """Take no new requests; return when running ones have ended and every lease with them."""
        self.source.draining = True
        await self._idle.wait()

    async def _serve(self, request: PrefillRequest, lease_id: LeaseId, emit: Emit) -> None:
        self.peers.check(request.envelope)
        self.source.require_serving()
        key = (request.envelope.sender, request.request_id)
        if key in self._running:
            raise DuplicateRequest(f"request {request.request_id} runs already", request=request.request_id)
        prompt = plan_prompt(request.tokens, request.namespace, self.parts.contract)
        if not 0 <= request.first_page_wanted <= prompt.recorded_pages:
            raise BoundsError("first_page_wanted", request.first_page_wanted, f"0 to {prompt.recorded_pages}")
        self.pull_back.check(request, prompt)
        self._running.add(key)
        self.source.computing[lease_id] = _this_task()
        try:
            with self.backlog.taken_on(self._expected_tokens(request, prompt)) as share:
                async with deadline(request.remaining_s, "prefill"):
                    await self._leased(request, prompt, share, lease_id, emit)
        finally:
            self._running.discard(key)
            del self.source.computing[lease_id]
            self._idle.changed()

    def _expected_tokens(self, request: PrefillRequest, prompt: Prompt) -> int:
        """To be computed, if what is cached or offered now is there when it is the request's turn."""
        held = min(self.parts.manager.tree.match(prompt.hashes).pages.size, prompt.prefill_hit_pages)
        lent = self.pull_back.lent(request, prompt)
        found = max(held - prompt.drop_pages, lent.stop if lent else 0)
        return len(prompt.tokens) - found * prompt.page_tokens

    async def _leased(
        self, request: PrefillRequest, prompt: Prompt, share: Share, lease_id: LeaseId, emit: Emit
    ) -> None:
        """Everything the request does under its lease; its pages are given back, or handed over to the lease."""
        self.source.leases.require_room(request.envelope.sender)
        manager = self.parts.manager
        reservation = await self.queue.take(
            lambda: manager.reserve(
                prompt.hashes,
                prompt.pages,
                max_hit_pages=prompt.prefill_hit_pages,
                drop_pages=prompt.drop_pages,
                priority=request.priority,
            )
        )
        reservation.public = prompt.public
        try:
            self.source.grant(lease_id, request.envelope.sender, request.request_id)
            self.parts.at(Stage.LEASED, request.request_id)
            announced = len(reservation.hit)
            cached = _announced(self.parts, request, prompt, 0, reservation.hit)
            emit(Accepted(lease_id, self.settings.lease_ttl_s, cached))
            pulled = await self.pull_back.run(request, prompt, reservation)
            reservation = pulled.reservation
            found = len(reservation.hit) * prompt.page_tokens
            steps = self.workspace.steps(found, len(prompt.tokens), self.settings.chunk_tokens)
            run = _PrefillRun(self.parts, steps, request, prompt, reservation)
            share.left(len(prompt.tokens) - found)
            with span(COMPUTE) as told:
                done = await run.run(emit, announced, share.computed)
                told.note({"pdkv.chunks": len(done.chunk_starts), "pdkv.tokens": len(prompt.tokens) - found})
            manager.hand_over(reservation, lease_id)
            self.parts.at(Stage.DONE, request.request_id)
            emit(replace(done, pages_pulled_back=pulled.pages))
        except asyncio.CancelledError:
            if lease_id in self.source.leases:
                raise
            raise LeaseExpired(f"lease {lease_id} ended while prefill ran", lease=lease_id) from None
        finally:
            manager.end(reservation)


class _PrefillRun:
    """One prompt on its way through the engine, and what is said of it meanwhile."""

    def __init__(
        self, parts: NodeParts, steps: list[slice], request: PrefillRequest, prompt: Prompt, reservation: Reservation
    ) -> None:
        self._parts = parts
        self._request = request
        self._prompt = prompt
        self._reservation = reservation
        self._computation = Computation(parts, steps, prompt, reservation, request.sampling)

    async def run(self, emit: Emit, announced: int, computed: Callable[[int], None]) -> PrefillDone:
        """`announced` pages, from the first, were told of before; `computed` hears of tokens that are done."""
        began = _now()
        computation = self._computation

        def announce(first: int, standing: LocalPages) -> None:
            if pages := _announced(self._parts, self._request, self._prompt, first, standing):
                emit(pages)

        def sealed(first: int, standing: LocalPages) -> None:
            self._parts.at(Stage.SEALED, self._request.request_id)
            computed(len(standing) * self._prompt.page_tokens)
            announce(first, standing)

        announce(announced, self._reservation.hit[announced:])

        logits = await computation.run(lambda: self._parts.at(Stage.COMPUTING, self._request.request_id), sealed)
        tail = await self._seal_tail()
        first = await computation.first(logits)
        return PrefillDone(
            first_token=first.token,
            first_logprob=first.logprob,
            logits_digest=logits_digest(logits) if self._request.want_logits else 0,
            tail=tail,
            account=account_of(self._prompt, self._parts.contract, computation.draft),
            chunk_starts=computation.starts,
            prefill_s=_now() - began,
            draft=computation.draft,
        )

    async def _seal_tail(self) -> PagesSealed | None:
        """The partly filled page: private, zero past its last token, digested and readable like the others."""
        prompt, parts = self._prompt, self._parts
        if not prompt.tail_tokens:
            return None
        page = self._reservation.sequence[prompt.recorded_pages : prompt.recorded_pages + 1]
        parts.manager.take_private(self._reservation, page)
        number = int(page.array[0])
        if prompt.tail_tokens < prompt.page_tokens:
            await parts.steps.run(parts.pool.zero_tail, number, prompt.tail_tokens)
        tail_hash = PageHashes(prompt.tail_hash)
        verified = await parts.digests.run(
            parts.verifier.seal, self._reservation.id, prompt.recorded_pages, page, tail_hash
        )
        parts.manager.seal_private(self._reservation, verified)
        return parts.announced(prompt.recorded_pages, page, tail_hash)


def _announced(
    parts: NodeParts, request: PrefillRequest, prompt: Prompt, first: int, standing: LocalPages
) -> PagesSealed | None:
    """Those of `standing`, which are the prompt's pages from `first` on, that the caller wants; None: it has them."""
    late = max(request.first_page_wanted - first, 0)
    if late >= len(standing):
        return None
    return parts.announced(first + late, standing[late:], prompt.hashes.part(first + late, first + len(standing)))


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a node's calls run inside a task")
    return task


def _now() -> float:
    return asyncio.get_running_loop().time()
