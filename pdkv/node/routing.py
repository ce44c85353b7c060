"""What a router asks nodes, and says of itself: plain values, no protobuf.

Guarantees: an estimate binds nobody; it is what a node had and had to do at the moment when it was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.ids import PageHashes, PeerName


@dataclass(frozen=True, slots=True)
class EstimateCall:
    """What would a request of this prompt find here? Comes from whoever may ask for the status."""

    hashes: PageHashes
    """Of the prompt's pages, from the first one on; may be empty."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A node's answer, in the life that it is in."""

    name: PeerName
    pages: int
    """The prompt's first pages that are in its tree."""
    waiting_tokens: int
    """Of prompts that it has taken on and not computed yet."""
    available_pages: int
    """That a request could have at once: free or evictable; none while requests wait for some."""


@dataclass(frozen=True, slots=True)
class RoutedNode:
    """A node as its router weighs it."""

    role: str
    requests: int
    """Of this router, that run there."""
    waiting_tokens: int
    """Of a prefill node: tokens that it has to compute before a new request's."""
    available_pages: int
    """Of a decode node: pages that a new request could have."""
    pages: int
    """Of the pool."""
    trust: float
    """Of a prefill node: the part of the pages that it says it has which requests then found, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What an operator asks a router for: address to "up", or to the reason why it was passed over last."""

    prefill: dict[str, str]
    decode: dict[str, str]
    requests: int
    """Those that wait among them."""
    contents: dict[str, str] = field(default_factory=dict)
    """Address to the beginning of its content fingerprint, once it is known: unequal ones are never paired."""
    apart: dict[str, str] = field(default_factory=dict)
    """Pairs that refused each other or failed, "DECODE with PREFILL", to the reason."""
    waiting: int = 0
    """Requests that no node was asked for yet, as too many run."""
    policy: str = ""
    nodes: dict[str, RoutedNode] = field(default_factory=dict)
    """By address."""
    choices: dict[str, int] = field(default_factory=dict)
    """What a request's prefill node was chosen by, to how often, since the start: prefix, load, turn."""
    estimates: dict[str, int] = field(default_factory=dict)
    """What became of the questions to nodes: answered, late, failed, spared (not asked: the last one is still out)."""
    choosing_s: float = 0.0
    """That requests waited for such answers, all together."""
    discovery: dict[str, str] = field(default_factory=dict)
    """List and place, "prefill dns:NAME:PORT", to how many nodes are found there, and why none is now."""
