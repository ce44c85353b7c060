"""Asks nodes what a request would find on them.

Guarantees: all are asked at once, and a request waits `limit_s` at most for their answers; a node that is late is not
asked again before it has answered or its call has ended, so one that hangs holds up one request a call; what isn't
known counts as nothing cached and the load that was said last, so without any answer requests go by load alone; a node
that promised more than requests then found is believed less, until it is in a new life. Nothing is remembered of
prompts: what is cached where is always a node's own word, in the life that it is in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from pdkv.errors import PdkvError, PeerLost
from pdkv.ids import PageHashes
from pdkv.node.flow import begin
from pdkv.node.messages import GenerateDone, GenerateRequest
from pdkv.node.prompt import Prompt, plan_prompt
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.registry import Node, Pair, Registry, Role
from pdkv.router.weights import Weights

LIMIT_S = 0.1
NOTHING = EstimateCall(PageHashes())
ANSWERED, LATE, FAILED, SPARED = "answered", "late", "failed", "spared"


class Asked(Protocol):
    """Whoever can be asked."""

    async def estimate(self, call: EstimateCall) -> Estimate: ...


class Directory(Protocol):
    """Turns an address into a node."""

    def decode(self, address: str) -> Asked: ...
    def peer(self, address: str) -> Asked: ...


class Asking:
    """Of one router."""

    def __init__(self, registry: Registry, nodes: Directory, limit_s: float = LIMIT_S) -> None:
        self._registry = registry
        self._nodes = nodes
        self._limit_s = limit_s
        self._out: dict[Node, asyncio.Task[Estimate | None]] = {}
        """Questions that wait for an answer, some of them later than any request."""
        self.counts: Counter[str] = Counter(dict.fromkeys((ANSWERED, LATE, FAILED, SPARED), 0))
        self.waited_s = 0.0
        """By all requests together."""

    async def weights(self, request: GenerateRequest) -> Weights:
        """What is known by the time that may be taken. Of a role with one node that is up, none is asked: there is
        nothing to choose."""
        began_s = self._registry.now()
        prompts: dict[bytes, Prompt | None] = {}
        asked: dict[Node, Prompt | None] = {}
        for role in Role:
            nodes = [node for node in self._registry.nodes(role) if node.kind is not None and not node.down]
            for node in nodes if len(nodes) > 1 else ():
                asked[node] = _planned(request, node, prompts)
        found = await self._answers(asked)
        self.waited_s += self._registry.now() - began_s
        return Weights(request, {node: _usable(node, asked[node], pages) for node, pages in found.items()})

    def ended(self, pair: Pair, weights: Weights, done: GenerateDone) -> None:
        """Compare what the prefill node promised with what the request found there, if that one did serve it."""
        served = done.shipment.prefill_address == pair.prefill.address
        if served and done.chunk_starts and not done.recomputed_tokens:
            pair.prefill.load.found(weights.cached.get(pair.prefill, 0), done.chunk_starts[0])

    async def _answers(self, asked: Mapping[Node, Prompt | None]) -> dict[Node, int]:
        """Pages of the prompt that each node that answers has."""
        tasks: dict[asyncio.Task[Estimate | None], Node] = {}
        for node, prompt in asked.items():
            if node in self._out:
                self.counts[SPARED] += 1
            else:
                tasks[self._ask(node, prompt)] = node
        if not tasks:
            return {}
        answered, late = await asyncio.wait(tasks, timeout=self._limit_s)
        self.counts.update(LATE for _ in late)
        found = {tasks[task]: task.result() for task in answered}
        return {node: estimate.pages for node, estimate in found.items() if estimate is not None}

    def _ask(self, node: Node, prompt: Prompt | None) -> asyncio.Task[Estimate | None]:
        """It goes on to its end, whether the request waits for it or not."""
        call = EstimateCall(prompt.hashes) if prompt else NOTHING
        task = self._out[node] = begin(self._answer(node, call))
        task.add_done_callback(lambda _: self._out.pop(node))
        return task

    async def _answer(self, node: Node, call: EstimateCall) -> Estimate | None:
        """None if it doesn't say."""
        ask = self._nodes.decode if node.role is Role.DECODE else self._nodes.peer
        try:
            estimate = await ask(node.address).estimate(call)
        except PdkvError as error:
            # What that says of the node, its watch and the requests find out.
            self.counts[FAILED] += 1
            if isinstance(error, PeerLost):
                self._registry.look_at(node)
            return None
        self.counts[ANSWERED] += 1
        node.load.said(estimate)
        if estimate.name != node.name:
            self._registry.look_at(node)
        return estimate


def _planned(request: GenerateRequest, node: Node, known: dict[bytes, Prompt | None]) -> Prompt | None:
    """The prompt's pages, as nodes of this kind name them; None if they would refuse it."""
    if node.kind is None:
        return None
    if node.kind.fingerprint not in known:
        try:
            known[node.kind.fingerprint] = plan_prompt(request.tokens, request.namespace, node.kind.contract)
        except PdkvError:
            known[node.kind.fingerprint] = None
    return known[node.kind.fingerprint]


def _usable(node: Node, prompt: Prompt | None, pages: int) -> int:
    """Tokens that a request would not need to have computed, or shipped."""
    if prompt is None:
        return 0
    most = prompt.prefill_hit_pages if node.role is Role.PREFILL else prompt.decode_hit_pages
    return max(min(pages, most) - prompt.drop_pages, 0) * prompt.page_tokens
