"""The router: picks a pair of nodes for a request and passes the token stream on.

Guarantees: no more requests run, or wait, than may; a request that a pair refuses, or can't be reached for, *before it
was taken on* goes to another pair, each at most once and within the request's remaining time, as long as there is one
that may serve it; what a prefill node took on and failed is the decode node's to mend, by the request's policy, and it
is told of others for that; after the first token nothing is asked twice; a node that was down is tried by one request,
for which the others wait if they have nowhere else to go; closing the stream closes the one behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdkv.errors import (
    AccountMismatch,
    AddressRefused,
    CapacityError,
    ContractMismatch,
    DeadlineExceeded,
    Draining,
    LaneRefused,
    NeverFits,
    NotAuthorised,
    PdkvError,
    PeerLost,
    ProtocolError,
    RemoteError,
    TransferError,
    UnknownRequest,
    WrongIncarnation,
)
from pdkv.ids import RequestId
from pdkv.node.flow import Idle
from pdkv.node.messages import FailurePolicy, GenerateDone, GenerateEvent, GenerateRequest, Token
from pdkv.node.routing import RouterStatus
from pdkv.router.asking import LIMIT_S, Asking
from pdkv.router.load import computed, given
from pdkv.router.lobby import Lobby
from pdkv.router.outlook import hindrance
from pdkv.router.pairing import Pairing
from pdkv.router.policy import Policy, Turns
from pdkv.router.registry import UP, Node, Pair, Registry, Role, Trial
from pdkv.router.watch import NodeDirectory, named
from pdkv.router.weights import Weights
from pdkv.tracing.span import current, ending, span

log = logging.getLogger(__name__)

DOWN = (PeerLost, Draining)
"""The node itself can't serve now: pass it over for later requests too."""
APART = (ContractMismatch, LaneRefused, AddressRefused, NotAuthorised)
"""Both nodes can serve, but not together."""
UNMET = (TransferError, DeadlineExceeded)
"""Of a prefill node's address, before it took the request on: the two can't reach each other, or not in time."""
REROUTED = (*DOWN, *APART, CapacityError, WrongIncarnation)
"""Another pair may serve the request. Not what the request itself is wrong about, and not what failed on the way."""
FINAL = (NeverFits, AccountMismatch)
"""Not rerouted though their parent class is: the one holds on every node, the other came after prefill's end."""
PICK, ROUTE = "pdkv.pick", "pdkv.route"
"""Spans: of asking nodes what they have, and of a pair from its choice to the end of its stream."""
TRIAL_S = 1.0
"""A node that refuses does so at once: whoever waits for another request's trial of it waits no longer."""
REASONS = ("prefix", "load", "turn")
"""What a prefill node is chosen by: it has some of the prompt, or costs least without, or it is its turn."""
ALTERNATES = 2
"""Other prefill nodes that a decode node is told of."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    on_failure: FailurePolicy | None = None
    """For requests that name no policy; None: each decode node's own."""
    policy: Policy = Policy.PREFIX
    locate_s: float = LIMIT_S
    """Longest that a request waits for what nodes say of it."""
    running_limit: int = 512
    """Most requests that run at once."""
    waiting_limit: int = 512
    """Most that wait for that."""


class Router:
    """Has `generate` and `status`, as a decode node does."""

    def __init__(self, registry: Registry, nodes: NodeDirectory, settings: RouterSettings | None = None) -> None:
        self._registry = registry
        self._settings = settings or RouterSettings()
        self.pairing = Pairing(registry)
        self._turns = Turns(registry, self.pairing)
        self._asking = Asking(registry, nodes, self._settings.locate_s)
        self._lobby = Lobby(self._settings.running_limit, self._settings.waiting_limit, registry.now)
        self._choices: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._nodes = nodes
        self._requests = 0
        self._begun: dict[RequestId, _Route] = {}
        """Of each request that has a first token, its way; of two with one id, the younger's."""
        self._idle = Idle(lambda: self._requests)
        self.draining = False
        registry.left = self._left

    def status(self) -> RouterStatus:
        prefill, decode = (
            {node.address: node.down or UP for node in self._registry.nodes(role)}
            for role in (Role.PREFILL, Role.DECODE)
        )
        contents = {
            node.address: node.kind.contract.content_fingerprint.hex()[:12]
            for node in self._registry
            if node.kind is not None
        }
        return RouterStatus(
            prefill,
            decode,
            self._requests,
            contents,
            self.pairing.status(),
            waiting=self._lobby.waiting,
            policy=self._settings.policy,
            nodes={node.address: node.routed() for node in self._registry},
            choices=dict(self._choices),
            estimates=dict(self._asking.counts),
            choosing_s=self._asking.waited_s,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """The stream of the first pair that takes the request. Raises the last refusal if none does, `RouterFull`, and
        `ProtocolError` if the request names a prefill node: that is the router's to choose."""
        for field_ in ("prefill_address", "prefill_alternates"):
            if getattr(request, field_):
                raise ProtocolError(f"{field_} is the router's to set", field=field_)
        if self.draining:
            raise Draining("this router is draining")
        ends_s = asyncio.get_running_loop().time() + request.remaining_s
        self._requests += 1
        try:
            async with self._lobby.place(request.remaining_s), aclosing(self._routed(request, ends_s)) as events:
                async for event in events:
                    yield event
        finally:
            self._requests -= 1
            self._idle.changed()

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        """As `DecodeNode.finish`, which is told. Raises `UnknownRequest` for one that has no token yet too, and what
        the call ends with."""
        if (route := self._begun.get(request)) is None:
            raise UnknownRequest(f"no request {request} runs here that has a token", request=request)
        await self._nodes.decode(route.pair.decode.address).finish(request, output_tokens)

    async def drain(self) -> None:
        """Take no new requests; return when the running ones have ended."""
        self.draining = True
        await self.ended()

    async def ended(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    async def _routed(self, request: GenerateRequest, ends_s: float) -> AsyncGenerator[GenerateEvent, None]:
        loop = asyncio.get_running_loop()
        refusals = _Refusals()
        with span(PICK):
            weights = await self._weights(request)
        while pair := self._turns.pick(refusals.cover, weights):
            remaining_s = ends_s - loop.time()
            if remaining_s <= 0:
                words = f"no pair of nodes took request {request.request_id} within {request.remaining_s:.3g} s"
                raise DeadlineExceeded(words, request=request.request_id, last=refusals.last)
            if await self._tried_by_others(pair, refusals, remaining_s):
                continue
            route = _Route(pair, self._alternates(pair, weights), weights or Weights(request))
            asked = dataclasses.replace(
                request,
                prefill_address=pair.prefill.address,
                prefill_alternates=tuple(node.address for node in route.others),
                remaining_s=remaining_s,
                on_failure=request.on_failure or self._settings.on_failure,
            )
            self._choices[route.reason(weights)] += 1
            told = current().child(ROUTE, {"pdkv.reason": route.reason(weights), **pair.facts})
            with self._registry.trying(pair) as trial, ending(told):
                if pair.decode.trial is trial:
                    # It may be back: the old connection would go on saying that nobody is there until it tries again.
                    self._nodes.drop(pair.decode.address)
                try:
                    async with aclosing(self._followed(route, asked)) as events:
                        async for event in events:
                            yield event
                    return
                except (*REROUTED, *UNMET, RemoteError) as failed:
                    error = named(pair.decode, failed)
                    told.fail(error)
                    if not isinstance(error, REROUTED) and not route.unmet(error):
                        raise
                    self._note(pair, route.others, error, refusals)
                    if route.started or isinstance(error, FINAL) or "accepted_by" in error.fields:
                        raise error from None
                    # where there is no room, every pair may say so to every request
                    level = logging.DEBUG if isinstance(error, CapacityError) else logging.WARNING
                    log.log(level, "%s: %s: %s; trying another pair", pair, error.kind, error)
        raise self._last_word(refusals)

    async def _weights(self, request: GenerateRequest) -> Weights | None:
        """None: in turn."""
        return await self._asking.weights(request) if self._settings.policy is Policy.PREFIX else None

    async def _followed(self, route: _Route, asked: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """The pair's stream, and what it tells of the pair."""
        pair = route.pair
        with given(route.weights.given(pair), pair.prefill.load, pair.decode.load) as share:
            async with aclosing(self._nodes.decode(pair.decode.address).generate(asked)) as events:
                try:
                    async for event in events:
                        if not route.started:
                            route.started = True
                            self._begun[asked.request_id] = route
                            computed(share, pair.prefill.load)
                            self._came_through(pair, route.others, event)
                        if isinstance(event, GenerateDone):
                            self._asking.ended(pair, route.weights, event)
                        yield event
                finally:
                    if self._begun.get(asked.request_id) is route:
                        del self._begun[asked.request_id]

    async def _tried_by_others(self, pair: Pair, refusals: _Refusals, remaining_s: float) -> bool:
        """A node of the pair is on trial: wait for how that goes, once. What failed for one has failed for all."""
        trials = {node.trial for node in pair.nodes if node.trial is not None} - refusals.awaited
        for trial in trials:
            refusals.awaited.add(trial)
            try:
                async with asyncio.timeout(min(remaining_s, TRIAL_S)):
                    await trial.over.wait()
            except TimeoutError:
                continue
            for node, error in trial.failed.items():
                refusals.nodes.add(node)
                refusals.last = error
        return bool(trials)

    def _alternates(self, pair: Pair, weights: Weights | None) -> list[Node]:
        """None where it must show whether these two serve: one is down, or hasn't said what it is."""
        if any(node.down or node.kind is None for node in pair.nodes):
            return []
        return self._turns.alternates(pair, ALTERNATES, weights)

    def _came_through(self, pair: Pair, others: Sequence[Node], first: GenerateEvent) -> None:
        """To its first token, which says who brought the prompt: under some policies that need not be who was asked."""
        self._registry.mark_up(pair.decode)
        instead = first.instead if isinstance(first, Token) else ""
        for node in (pair.prefill, *others):
            if node.address == (instead or pair.prefill.address):
                self._registry.mark_up(node)
        if instead and pair.prefill.down:
            self._registry.done_without(pair.prefill)

    def _note(self, pair: Pair, others: Sequence[Node], error: PdkvError, refusals: _Refusals) -> None:
        """What a failure says of the nodes. An error names the address of the one that it is about."""
        refusals.last = error
        refusals.pairs.update(Pair(node, pair.decode) for node in (pair.prefill, *others))
        at = error.fields.get("accepted_by") or error.fields.get("address")
        prefill = next((node for node in (pair.prefill, *others) if node.address == at), None)
        if isinstance(error, APART):
            self.pairing.refused(Pair(prefill or pair.prefill, pair.decode), error)
        elif isinstance(error, (*DOWN, *UNMET)) and (prefill or at in (None, pair.decode.address)):
            if prefill is not None:
                self.pairing.failed(Pair(prefill, pair.decode), error)
            # a prefill node that says it can't reach its peer is there itself
            if isinstance(error, DOWN) and error.fields.get("peer") != str(pair.decode.name):
                refusals.nodes.add(prefill or pair.decode)
                self._registry.mark_down(prefill or pair.decode, error)

    def _last_word(self, refusals: _Refusals) -> PdkvError:
        """Why nobody took the request; with the time after which to come again, if that is for want of room."""
        error = refusals.last or self._nobody()
        if isinstance(error, CapacityError):
            error.fields = {**error.fields, "retry_after_s": f"{self._lobby.again_s:.3g}"}
        return error

    def _nobody(self) -> PdkvError:
        """Why there was no pair to try at all. That nodes are down is newer than what they refused before."""
        found = hindrance(self._registry, self.pairing, lambda node: not node.down)
        return found.error if found else PeerLost("the router knows of no pair of nodes")

    def _left(self, node: Node) -> None:
        self.pairing.left(node)
        self._nodes.drop(node.address)


@dataclass(slots=True)
class _Route:
    """A request on its way over one pair."""

    pair: Pair
    others: list[Node]
    weights: Weights
    started: bool = False
    """A first token has come."""

    def unmet(self, error: PdkvError) -> bool:
        """It is of a prefill node that the decode node tried to meet; its own time has its own error."""
        tried = any(node.address == error.fields.get("address") for node in (self.pair.prefill, *self.others))
        return isinstance(error, UNMET) and tried and "accepted_by" not in error.fields

    def reason(self, weights: Weights | None) -> str:
        """What it was chosen by."""
        by_prefix, by_load, by_turn = REASONS
        if weights is None:
            return by_turn
        return by_prefix if weights.cached.get(self.pair.prefill) else by_load


@dataclass(slots=True)
class _Refusals:
    """What one request was refused by."""

    pairs: set[Pair] = field(default_factory=set)
    nodes: set[Node] = field(default_factory=set)
    awaited: set[Trial] = field(default_factory=set)
    last: PdkvError | None = None

    def cover(self, pair: Pair) -> bool:
        return pair in self.pairs or pair.prefill in self.nodes or pair.decode in self.nodes
