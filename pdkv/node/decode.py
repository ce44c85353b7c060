"""The decode node: pulls a prompt's missing pages, admits on proof, then decodes.

Guarantees: no token leaves this node before every page of the prompt is committed and prefill's account equals its
own; every page of a request is reserved, or sure to be, before anything is asked of a prefill node; a request always
ends, with tokens or with a named error, and gives back all it held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import count

from pdkv.errors import BoundsError, ConfigError, DeadlineExceeded, DuplicateRequest, UnknownRequest
from pdkv.ids import RequestId
from pdkv.node.answer import Enough
from pdkv.node.attempts import Attempts, Means
from pdkv.node.base import NodeParts
from pdkv.node.borrowing import Borrowing, Limits
from pdkv.node.compacting import compact_pages
from pdkv.node.decoding import Arrived, decode
from pdkv.node.faults import fault_named
from pdkv.node.flow import Idle, deadline, streamed
from pdkv.node.intake import Wanted
from pdkv.node.keeper import PeerKeeper
from pdkv.node.links import Links, SourceLinks
from pdkv.node.messages import GenerateEvent, GenerateRequest, NodeIntro, NodeStatus
from pdkv.node.peers import PeerBook
from pdkv.node.ports import PrefillDirectory, SourceDirectory
from pdkv.node.preemption import Preemption, PreemptPolicy
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.node.queue import AdmissionQueue, Ask
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.node.settings import DecodeSettings
from pdkv.node.source import Source
from pdkv.node.stages import Stage

Emit = Callable[[GenerateEvent], None]


__all__ = ["DecodeNode", "DecodeSettings"]

WHOLE = "the request"
"""What has a request's own deadline."""


@dataclass(slots=True)
class _Running:
    """A request."""

    enough: Enough
    reached: str = "none"
    """The last stage."""


class DecodeNode:
    """Has `generate`, the token stream of a request, and `status`."""

    def __init__(
        self,
        parts: NodeParts,
        directory: PrefillDirectory,
        settings: DecodeSettings,
        sources: SourceDirectory | None = None,
    ) -> None:
        """`sources` makes the connections to `source_addresses`; without it none of them is asked."""
        self._at = parts.at
        self.parts = parts = replace(parts, at=self._reached)
        self.settings = settings
        self.peers = PeerBook(parts)
        self.source = Source(parts, self.peers, ttl_s=settings.lease_ttl_s, per_peer=settings.leases_per_peer)
        share = int(settings.peer_pages_share * (parts.pool.num_pages - 1))
        _require_late_possible(parts, settings)
        self.queue = AdmissionQueue(
            parts.manager,
            limit=settings.queue_limit,
            peer_pages=share,
            window_pages=settings.reserve_window_pages,
        )
        self.preemption = Preemption(parts, self.queue, settings.preempt, settings.offload_bytes)
        self.links = Links(parts, self.peers, directory, settings.prefill_addresses, settings.prefill_allow)
        self.keeper = PeerKeeper(self.peers, self.links.probe, settings.keeper)
        self._running: dict[RequestId, _Running] = {}
        self._turn = 0
        self._asked = count()
        self.farewells: set[asyncio.Task[None]] = set()
        """Lease releases on their way: no request waits for them."""
        self.borrowing = None if sources is None else self._borrowing(sources)
        self._idle = Idle(lambda: len(self._running) + len(self.farewells) + len(self.source.leases))
        self.source.ended = self._idle.changed

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """`Token` by token, then `GenerateDone`. Closing it is the abort."""
        return streamed(lambda emit: self._serve(request, emit))

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        """Whoever asked has all it wants in the first `output_tokens` of the answer: its stream ends as one that came
        to its end, with the reason "stop", before the next step. Raises `UnknownRequest` for one that doesn't run, or
        whose answer has its end, `BoundsError` for more tokens than were said."""
        if request not in self._running:
            raise UnknownRequest(f"no request {request} runs here", request=request)
        self._running[request].enough.say(output_tokens)

    async def connect(self, address: str) -> NodeIntro:
        """Connect to the prefill node at `address`, unless that is done. Raises `ContractMismatch`, `PeerLost`."""
        return (await self.links.of(address)).intro

    def status(self) -> NodeStatus:
        status = self.peers.status(
            "decode", self.parts.manager, leases=len(self.source.leases), requests=len(self._running)
        )
        borrower = self.borrowing.borrower if self.borrowing else None
        return replace(
            status,
            queued=len(self.queue),
            preemptions=self.preemption.preemptions,
            draining=self.source.draining,
            held_leases=self.source.status(),
            borrowed_pages=borrower.pages if borrower else 0,
            borrow_failures=dict(borrower.failures) if borrower else {},
            claims=self.queue.started.claims(),
            uses=self.parts.uses,
            totals=self.parts.moved.bytes(self.parts.pool.fmt),
            available_pages=self._available_pages(),
        )

    def estimate(self, call: EstimateCall) -> Estimate:
        """What a request of this prompt would find now."""
        held = self.parts.manager.tree.match(call.hashes).pages.size
        return Estimate(self.parts.name, held, 0, self._available_pages())

    async def watch_leases(self) -> None:
        """Runs for the node's life: ends leases when they expire."""
        await self.source.watch_leases()

    async def compact(self) -> int:
        """Move cached pages together, while requests run; returns how many. Raises `ConfigError` in a group."""
        return await compact_pages(self.parts)

    async def drain(self) -> None:
        """Take no new requests; return when running ones have ended, prefill nodes were told, and nothing is lent."""
        self.source.draining = True
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
        self.source.require_serving()
        if request.request_id in self._running:
            raise DuplicateRequest(f"request {request.request_id} runs already", request=request.request_id)
        if request.sampling.max_tokens < 1:
            raise BoundsError("max_tokens", request.sampling.max_tokens, "at least 1")
        prompt = plan_prompt(request.tokens, request.namespace, self.parts.contract)
        self._running[request.request_id] = _Running(Enough(request.request_id))
        try:
            async with deadline(request.remaining_s, WHOLE):
                await self._generate(request, prompt, emit)
        except DeadlineExceeded as error:
            if error.fields.get("what") != WHOLE:
                raise
            reached = self._running[request.request_id].reached
            raise DeadlineExceeded(
                f"{error}; the last stage it reached: {reached}", **error.fields, reached=reached
            ) from None
        finally:
            del self._running[request.request_id]
            self._idle.changed()

    def _reached(self, stage: Stage, request: RequestId) -> None:
        if request in self._running:
            self._running[request].reached = stage.value
        self._at(stage, request)

    async def _generate(self, request: GenerateRequest, prompt: Prompt, emit: Emit) -> None:
        """Reserve what is needed, when it is the request's turn, bring the prompt in, decode; give everything back."""
        began_s = _now()
        parts = self.parts
        slots = len(prompt.tokens) + request.sampling.max_tokens + parts.contract.draft_tokens
        pages = -(-slots // prompt.page_tokens)
        ask = Ask(prompt.hashes, pages, prompt.decode_hit_pages, prompt.drop_pages, request.priority)
        self.queue.require_possible(ask)
        fault = fault_named(request.fault, allowed=self.settings.allow_fault_injection)
        wanted = Wanted(
            request_id=request.request_id,
            request=request,
            prompt=prompt,
            until_s=began_s + request.remaining_s,
            fault=fault,
            at=lambda stage: parts.at(stage, request.request_id),
            offer=self.settings.pull_back,
        )
        means = Means(
            parts,
            self.settings,
            self.links,
            self.peers,
            self.queue,
            self.borrowing,
            self.say_farewell,
            self.next_request_id,
        )
        attempts = Attempts(means, wanted, ask, self._own_addresses())
        try:
            brought = await attempts.run()
            arrived = Arrived(
                self.queue,
                request,
                prompt,
                ask,
                attempts.reserved,
                brought.done,
                attempts.shipment(brought, began_s),
                self._running[request.request_id].enough,
                self.settings.cache_answers,
                attempts.retries,
                attempts.recomputed_tokens,
            )
            await decode(parts, self.preemption, arrived, emit)
        finally:
            attempts.close()

    def _borrowing(self, directory: SourceDirectory) -> Borrowing:
        settings, addresses = self.settings, self.settings.source_addresses
        links = SourceLinks(self.parts, self.peers, directory, allowed=addresses)
        limits = Limits(settings.locate_s, settings.borrow_s)
        return Borrowing(self.parts, self.peers, links, addresses, limits)

    def _available_pages(self) -> int:
        """Not those that requests wait for, nor those that started ones will take yet."""
        if len(self.queue):
            return 0
        claims = self.queue.started.claims()
        return max(self.parts.available_pages - claims["claimed"] + claims["held"], 0)

    def _own_addresses(self) -> tuple[str, ...]:
        """All of them, another one first each time, those that failed last."""
        addresses = self.links.own
        self._turn += 1
        turn = self._turn % max(len(addresses), 1)
        return self.links.best_first(addresses[turn:] + addresses[:turn])


def _require_late_possible(parts: NodeParts, settings: DecodeSettings) -> None:
    """Raises `ConfigError` where pages that come later don't go with another setting."""
    if settings.reserve_window_pages is None:
        return
    if parts.barrier is not None:
        raise ConfigError(
            "reserve", "late", "all in a group of ranks: their log has no entry for pages that come later"
        )
    if settings.preempt is not PreemptPolicy.NONE:
        raise ConfigError("preempt", settings.preempt.value, "none where reserve is late: who started can end anyway")


def _now() -> float:
    return asyncio.get_running_loop().time()
