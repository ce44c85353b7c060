"""What a request would cost on which nodes.

Guarantees: follows from what was found and from the nodes' loads alone, so equal states give equal choices. Pure.

A prefill node costs the tokens that it would compute for the request, and those that it has to compute before them: so
a cached prefix attracts requests until the queue at its node is as long as computing it once more elsewhere, where it
is cached as well from then on. Of the decode nodes that have room for the request those are taken whose pools are
emptiest, by eighths; within one, the longest prefix decides, then the fewest requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdkv.node.messages import GenerateRequest
from pdkv.router.load import Given
from pdkv.router.registry import Node, Pair

REQUEST_TOKENS = 256
"""What a request costs a prefill node beside the tokens that it computes: a step takes at least as long as the weights
take to be read, which is as long as some 200 tokens take to be computed (docs/decisions/0025-routing.md)."""
CLASSES = 8
"""Of full pools: within one, two decode nodes are equally full."""
UNKNOWN = CLASSES + 1
"""Of a node that hasn't said: it may have room, but those come first that are known to."""

Cost = tuple[bool, float, int, int, int]


@dataclass(slots=True)
class Weights:
    """Of one request."""

    request: GenerateRequest
    cached: Mapping[Node, int] = field(default_factory=dict)
    """Tokens of its prompt that it would find there; of nodes that are known to have some."""
    _prefill: dict[Node, float] = field(default_factory=dict)
    _decode: dict[Node, tuple[bool, int, int, int]] = field(default_factory=dict)

    def of(self, pair: Pair) -> Cost:
        """The least is the best: room on decode, then prefill's cost, then decode's fullness, prefix and requests."""
        lacks_room, *rest = self.of_decode(pair.decode)
        return lacks_room, self.of_prefill(pair.prefill), rest[0], rest[1], rest[2]

    def of_prefill(self, node: Node) -> float:
        """Tokens to be computed before the request's first one is said."""
        cost = self._prefill.get(node)
        if cost is None:
            cost = self._prefill[node] = self.expected(node) + node.load.waiting_tokens
        return cost

    def of_decode(self, node: Node) -> tuple[bool, int, int, int]:
        """Lacks room, class of fullness, less the prefix, requests."""
        cost = self._decode.get(node)
        if cost is None:
            load, total = node.load, node.load.total_pages
            lacks = bool(total) and load.available_pages < self.pages(node)
            fullness = CLASSES * (total - load.available_pages) // total if total else UNKNOWN
            cost = self._decode[node] = lacks, fullness, -self.cached.get(node, 0), load.requests
        return cost

    def expected(self, node: Node) -> float:
        """Tokens of the prompt that a prefill node would compute, as far as it is to be believed."""
        return len(self.request.tokens) - node.load.trust * self.cached.get(node, 0)

    def pages(self, node: Node) -> int:
        """That the request needs on a decode node beside those of its prompt that are there; 0 of one that hasn't said
        how large its pages are."""
        if node.kind is None:
            return 0
        contract = node.kind.contract
        slots = len(self.request.tokens) + self.request.sampling.max_tokens + contract.draft_tokens
        return -(-(slots - self.cached.get(node, 0)) // contract.page_tokens)

    def given(self, pair: Pair) -> Given:
        """The request's share of a pair."""
        return Given(int(self.expected(pair.prefill)) + REQUEST_TOKENS, self.pages(pair.decode))
