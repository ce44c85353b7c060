"""Brings a request's prompt to this node: from one prefill node after another, or from this node's own engine.

Guarantees: the request has all its pages, or is sure to get them, before anything is asked of a prefill node; what was
verified and committed in one attempt is kept for the next, and nothing else: first token, tail and draft state come
from the attempt that ended well; pages that a failed attempt may still write to are replaced, and not waited for. A
prefill node that refuses, or can't be reached, hands the request on to the next one whatever the policy; one that fails
it after it had accepted ends it (`fail`), hands it on (`retry`), or leaves the rest to this node (`recompute`). Each
node is asked once; once more only if it began a new life, if its pages were reused while they were read, or if its
lease ran out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from pdkv.errors import (
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    LeaseExpired,
    PdkvError,
    PeerLost,
    ReservationDead,
    StalePages,
    TransferError,
    WrongIncarnation,
)
from pdkv.ids import RequestId
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.borrowing import Borrowing, usable
from pdkv.node.flow import deadline
from pdkv.node.intake import Wanted
from pdkv.node.links import Link, Links
from pdkv.node.messages import FailurePolicy, GenerateRequest, Shipment
from pdkv.node.peers import PeerBook, PeerState
from pdkv.node.pull import Brought, Patience, Pull
from pdkv.node.queue import AdmissionQueue, Ask
from pdkv.node.recompute import recompute
from pdkv.node.settings import DecodeSettings
from pdkv.node.stages import Stage
from pdkv.tracing.span import span

log = logging.getLogger(__name__)

ATTEMPT = "pdkv.attempt"
VOID = (StalePages, LeaseExpired)
"""What a request was promised is gone; the node that promised it may be well."""
SAME_NODE_AGAIN = 1
"""How often a node is asked again that began a new life, or whose pages were reused."""
OF_THIS_NODE = (ConfigError, IntegrityError, ReservationDead)
"""Raised here, they say that another prefill node would not help."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the requests of a node share."""

    parts: NodeParts
    settings: DecodeSettings
    links: Links
    peers: PeerBook
    queue: AdmissionQueue
    borrowing: Borrowing | None
    say_farewell: Callable[[Coroutine[None, None, None]], None]
    next_request_id: Callable[[], RequestId]


def sources(request: GenerateRequest, policy: FailurePolicy, own: Sequence[str]) -> list[str]:
    """Addresses of prefill nodes in the order in which a request turns to them, each once.

    A request that names nodes is served by them, and by this node's `own` only if it is to be saved from failing.
    Raises `PeerLost` if there are none.
    """
    named = [address for address in (request.prefill_address, *request.prefill_alternates) if address]
    spare = own if not named or policy is not FailurePolicy.FAIL else ()
    if not named and not spare:
        raise PeerLost("no prefill node: the request names none, and of prefill_addresses of this node none is known")
    return list(dict.fromkeys((*named, *spare)))


class Attempts:
    """One request, from its place in the queue until its prompt is on this node."""

    def __init__(self, means: Means, wanted: Wanted, ask: Ask, own: Sequence[str]) -> None:
        """`own` are this node's prefill nodes, the one whose turn it is first. Raises as `sources`."""
        self._means = means
        self._wanted = wanted
        self._ask = ask
        self._policy = wanted.request.on_failure or means.settings.on_failure
        self._sources = deque(sources(wanted.request, self._policy, own))
        self._again: Counter[str] = Counter()
        self._first_hit: int | None = None
        self.reservation: Reservation | None = None
        self.retries = 0
        self.borrowed = 0
        """Pages that came from another node than prefill."""
        self.recomputed_tokens = 0
        self.brought_by = ""
        """Address of the prefill node that brought the prompt to its end."""

    async def run(self) -> Brought:
        """Raises the last failure if nobody brings it, and what is this node's own: no room, a broken engine."""
        await self._borrow()
        outcome = await self._from_prefill()
        if isinstance(outcome, PdkvError):
            if self._policy is not FailurePolicy.RECOMPUTE:
                raise outcome
            outcome = await self._recompute()
        self._means.queue.settle(self.reserved)
        self._wanted.at(Stage.ADMITTED)
        return outcome

    @property
    def reserved(self) -> Reservation:
        """The request's pages."""
        if self.reservation is None:
            raise IntegrityError("a prompt that was brought has no pages", request=self._wanted.request.request_id)
        return self.reservation

    def close(self) -> None:
        """Everything it holds is given back. Idempotent."""
        if self.reservation is not None:
            self._means.queue.settle(self.reservation)
            self._means.parts.manager.end(self.reservation)

    async def _borrow(self) -> None:
        """What another node has and the prefill node whose turn it is hasn't is brought from there."""
        means, wanted = self._means, self._wanted
        if means.borrowing is None:
            return
        have = usable(wanted.prompt, means.parts.manager.tree.match(wanted.prompt.hashes).pages.size)
        source = await means.borrowing.find(wanted, have, means.links.met(self._sources[0]))
        if source is not None:
            reservation = await self._reserve(replace(self._ask, peer=source.address))
            self.borrowed = await means.borrowing.borrow(wanted, reservation, source, self._room, means.say_farewell)

    async def _from_prefill(self) -> Brought | PdkvError:
        """The prompt; or how the last node that took it on failed, or else why the last one refused it."""
        failure: PdkvError | None = None
        refusal: PdkvError = PeerLost("no prefill node was tried")
        failed = False
        while self._sources:
            address = self._sources.popleft()
            with span(ATTEMPT, {"pdkv.prefill.address": address}) as told:
                patience = self._patience()
                try:
                    link = await self._reach(address, patience)
                except PdkvError as error:
                    refusal = self._theirs(error)
                    told.fail(error)
                    continue
                reservation = await self._reserve(replace(self._best_ask(), peer=address))
                self.retries += failed
                pull = Pull(self._means.parts, self._wanted, reservation, link, patience, self._reach_page)
                try:
                    return await self._pull(pull, link)
                except PdkvError as error:
                    outcome = self._theirs(error)
                    told.fail(error)
                told.note({"pdkv.accepted": pull.accepted})
            self._note(link, pull, outcome)
            failed = pull.accepted
            if failed:
                failure = outcome
                if self._policy is not FailurePolicy.RETRY:
                    break
            else:
                refusal = outcome
            if self._worth_another(address, pull, outcome):
                # Whose lease ran out may have been this node, that stood still: but others come first.
                add = self._sources.append if isinstance(outcome, LeaseExpired) else self._sources.appendleft
                add(address)
        return failure or refusal

    async def _pull(self, pull: Pull, link: Link) -> Brought:
        try:
            brought = await pull.run(self._means.next_request_id())
        finally:
            if pull.accepted:
                self._means.say_farewell(self._farewell(pull, link))
        self._means.peers.mark(link.intro.name, PeerState.READY)
        self.brought_by = link.address
        return brought

    async def _farewell(self, pull: Pull, link: Link) -> None:
        try:
            await pull.farewell()
        except PdkvError as error:
            self._means.peers.mark(link.intro.name, PeerState.SUSPECT, f"{error.kind}: {error}")

    async def _recompute(self) -> Brought:
        means, prompt = self._means, self._wanted.prompt
        reservation = await self._reserve(replace(self._ask, max_hit_pages=prompt.prefill_hit_pages))
        means.queue.settle(reservation)
        # Steps work on all of its pages, also on those of the prompt that others may have brought by then.
        await means.queue.started.reach(reservation, reservation.total_pages, until=reservation.total_pages)
        self.recomputed_tokens = len(prompt.tokens) - len(reservation.hit) * prompt.page_tokens
        done = await recompute(means.parts, self._wanted, reservation, means.settings.recompute_chunk_tokens)
        return Brought(done, _now())

    # --- who is waited for, and how long ----------------------------------------------------------------------------

    def _patience(self) -> Patience:
        """Of what time is left, no attempt may stand idle for more than its share, if others could be made."""
        settings, left_s = self._means.settings, self._wanted.until_s - _now()
        others = len(self._sources) + (self._policy is FailurePolicy.RECOMPUTE)
        # where there is nobody else, the request's own deadline is enough, and its error says more
        share_s = left_s / (others + 1) if others else math.inf
        return Patience(
            read_s=settings.read_deadline_s,
            silence_s=min(settings.silence_s, share_s),
            stall_s=math.inf if self._policy is FailurePolicy.FAIL else share_s,
        )

    async def _reach(self, address: str, patience: Patience) -> Link:
        """Raises `PeerLost` if that takes too long while another node could be turned to, and `TransferError` if the
        new connection brought no bytes in its own time: the request may have more of it."""
        others = bool(self._sources) or self._policy is FailurePolicy.RECOMPUTE
        try:
            async with deadline(patience.silence_s, f"reaching {address}") if others else nullcontext():
                return await self._connected(address)
        except DeadlineExceeded as error:
            raise PeerLost(str(error), address=address) from error

    async def _connected(self, address: str) -> Link:
        try:
            return await self._means.links.of(address)
        except DeadlineExceeded as error:
            raise TransferError(str(error), **{**error.fields, "address": address}) from error

    # --- pages ------------------------------------------------------------------------------------------------------

    def _best_ask(self) -> Ask:
        """What this request has committed itself is of this very prompt: no page of it needs to be dropped again."""
        ask, held = self._ask, self.reservation
        if held is None or not ask.drop_pages:
            return ask
        return replace(ask, max_hit_pages=held.committed, drop_pages=0)

    async def _reserve(self, ask: Ask) -> Reservation:
        """Pages of the request: those that are committed by now, and fresh ones for the others, or for some of them."""
        queue, held, self.reservation = self._means.queue, self.reservation, None
        if held is None:
            self._wanted.at(Stage.QUEUED)
            made = await queue.admit(ask)
        else:
            made = await queue.exchange(held, ask)
        self.reservation, made.public = made, self._wanted.prompt.public
        if self._first_hit is None:
            self._first_hit = len(made.hit)
        self._wanted.at(Stage.RESERVED)
        return made

    def _room(self, pages: int) -> int:
        """Of so many of the prompt's, those that it has or can have at once."""
        self._means.queue.started.take(self.reserved, pages)
        return len(self.reserved.sequence)

    async def _reach_page(self, pages: int) -> None:
        """Until it has so many of the prompt's."""
        await self._means.queue.started.reach(self.reserved, pages, until=self._wanted.prompt.pages)

    # --- what an attempt came to ------------------------------------------------------------------------------------

    def _theirs(self, error: PdkvError) -> PdkvError:
        """Raises it if it is this node's own. An error that came over the wire names the address that it came from."""
        if isinstance(error, OF_THIS_NODE) and "address" not in error.fields:
            raise error
        return error

    def _note(self, link: Link, pull: Pull, error: PdkvError) -> None:
        if isinstance(error, PeerLost | TransferError | WrongIncarnation):
            self._means.peers.mark(link.intro.name, PeerState.SUSPECT, f"{error.kind}: {error}")
            self._means.links.forget(link)
        if pull.accepted:
            # A router hands on what was refused; what was accepted has its policy here.
            error.fields = {**error.fields, "accepted_by": link.address}
        log.warning(
            "request %s: %s %s it: %s: %s",
            self._wanted.request.request_id,
            link.intro.name,
            "failed" if pull.accepted else "refused",
            error.kind,
            error,
        )

    def _worth_another(self, address: str, pull: Pull, error: PdkvError) -> bool:
        """The same node again: it is there, and only what it said before is void."""
        void = isinstance(error, VOID if pull.accepted else WrongIncarnation)
        if not void or self._again[address] >= SAME_NODE_AGAIN:
            return False
        self._again[address] += 1
        return True

    def shipment(self, brought: Brought, began_s: float) -> Shipment:
        """The account of the request so far, over all attempts."""
        parts, prompt, count, done = self._means.parts, self._wanted.prompt, self._wanted.count, brought.done
        fmt, now_s = parts.pool.fmt, _now()
        return Shipment(
            prompt_tokens=len(prompt.tokens),
            pages_total=prompt.pages,
            pages_hit=self._first_hit or 0,
            pages_shipped=count.pages,
            bytes_main=count.pages * fmt.main_bytes,
            bytes_index=count.pages * fmt.index_bytes,
            bytes_tail=fmt.page_bytes if done.tail else 0,
            bytes_backend=count.bytes_backend,
            descriptors=count.descriptors,
            digests_verified=count.digests_verified,
            chunks=len(done.chunk_starts),
            prefill_s=done.prefill_s,
            transfer_s=count.busy.total_s,
            exposed_transfer_s=now_s - brought.heard_s,
            ttft_s=now_s - began_s,
            pages_pulled_back=done.pages_pulled_back,
            pages_borrowed=self.borrowed,
            prefill_request=brought.request,
            decode_node=str(parts.name),
            prefill_address=self.brought_by,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
