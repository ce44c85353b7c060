"""What can be set on a decode node: plain values.

Guarantees: every default is one that a node can serve with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.node.keeper import KeeperSettings
from pdkv.node.messages import FailurePolicy
from pdkv.node.preemption import PreemptPolicy


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    prefill_addresses: tuple[str, ...] = ()
    """Of this node's own prefill nodes."""
    prefill_allow: tuple[str, ...] = ()
    """Patterns of other addresses that requests may name."""
    keeper: KeeperSettings = field(default_factory=KeeperSettings)
    read_deadline_s: float = 30.0
    allow_fault_injection: bool = False
    queue_limit: int = 64
    """Requests that may wait for pages."""
    reserve_window_pages: int | None = None
    """A request takes so many of its pages ahead of their need, and is sure to get the rest; None: it takes all when
    it starts."""
    preempt: PreemptPolicy = PreemptPolicy.NONE
    """How a decoding request gives its pages to one that waits."""
    offload_bytes: int = 1 << 30
    """Host memory for the pages of requests that gave way."""
    cache_answers: bool = True
    """Put an answer's full pages into the tree, for the next turn of its conversation."""
    source_addresses: tuple[str, ...] = ()
    """Other nodes, of either role, that are asked whether they have pages of a prompt."""
    locate_s: float = 0.1
    """Longest that a request waits for what they say."""
    borrow_s: float = 10.0
    """Longest that it waits for pages that one of them lends."""
    lease_ttl_s: float = 30.0
    """How long this node keeps what it lends to others."""
    leases_per_peer: int | None = None
    """Most leases of one other node at once; None: as many as it asks for."""
    pull_back: bool = True
    """Let prefill nodes read pages of a prompt that this node has and they lack."""
    on_failure: FailurePolicy = FailurePolicy.FAIL
    """For requests that name no policy."""
    silence_s: float = 5.0
    """A prefill node that is needed and not heard of for so long is given up: no event, no end of a read, no renewal
    of the lease."""
    recompute_chunk_tokens: int = 2048
    """Most tokens of one step when this node computes a prompt itself; taken as whole pages, at least one."""
    peer_pages_share: float = 0.5
    """Most pages of the pool that are reserved for prompts from one prefill node, as a part of all."""
