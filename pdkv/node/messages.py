"""What two nodes, and a client and a node, say to each other: plain values, no protobuf.

Guarantees: columns stay columns (tokens, hashes, page ids, generations, digests are arrays, never an object a page);
durations travel, points in time don't; what a peer sent is raw here and is checked by the node that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pdkv.contract import Contract
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import Int32Array, LeaseId, PageHashes, PeerName, RequestId, UInt32Array, UInt64Array

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NodeIntro:
    """One side of `Connect`: who I am, what I promise, where my memory is."""

    name: PeerName
    contract: Contract
    agent_metadata: bytes
    metadata_checksum: int
    """xxh3_64 of `agent_metadata`: cut-off metadata would poison the agent's name for its whole life."""
    pool: PoolMap


@dataclass(frozen=True, slots=True)
class Envelope:
    """On every message after `Connect`: both incarnations and the content fingerprint (32 bytes)."""

    sender: PeerName
    receiver: PeerName
    content_fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tenants with different values never share pages: both go into the hash seed."""

    extra_key: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy; otherwise seeded by (seed, position), so any node draws the same token."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PagesSealed:
    """Columns over consecutive pages of the request, the first being page `first_index` of the prompt."""

    first_index: int
    hashes: PageHashes
    page_ids: Int32Array
    generations: UInt64Array
    digests: UInt64Array
    """uint64 [pages, 2]: digest of the main bytes, digest of the index bytes."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    envelope: Envelope
    request_id: RequestId
    tokens: UInt32Array
    namespace: Namespace
    first_page_wanted: int
    """Pages before this index are in the caller's tree already: announce from here on."""
    sampling: Sampling
    remaining_s: float
    want_logits: bool = False
    priority: int = 0
    """For an eviction order that asks for it: pages of the highest stay longest."""
    offered: PagesSealed | None = None
    """The prompt's first pages, which the caller has and keeps for as long as the request runs: to be read from it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    lease_id: LeaseId
    ttl_s: float
    cached: PagesSealed | None = None
    """Pages of the prompt that are there already, from the first wanted one on: they come with the first message."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a node holds to be true of a request's prompt; admission compares prefill's with decode's own."""

    prompt_tokens: int
    recorded_tokens: int
    rollback_tokens: int
    resume_tokens: int
    eagle_rule: str
    pages: int
    last_page_hash: bytes
    tail_hash: bytes
    indexer_types: tuple[str, ...]
    draft_digest: int = 0
    """xxh3_64 of the draft hand-off, 0 without one: a part of it that got lost changes no token, so it is refused."""


@dataclass(frozen=True, slots=True)
class DraftHandoff:
    """Where drafting goes on: the draft head's state after the row of the last token whose successor is known.

    Damage to it leaves every token as it is and only lowers acceptance; so it travels under a digest.
    """

    hidden: Float32Array
    """float32 [width]: the draft head's own last hidden state, which its next row is made of."""
    tokens: UInt32Array
    """uint32 [draft_topk]: candidates for the token after the first one that decode says, best first."""
    probabilities: Float32Array
    """float32 [draft_topk], of those."""
    index_seed: Int32Array
    """int32 [index_topk + kpool - 1], positions that the head's indexer selected, -1 where there were fewer; [0] unless
    draft iterations share the index."""
    logits_digest: int = 0
    """xxh3_64 of the float32 draft logits that `tokens` came from."""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    first_token: int
    first_logprob: float
    logits_digest: int
    """xxh3_64 of the float32 logits the first token came from; 0 unless asked for."""
    tail: PagesSealed | None
    """The partly filled last page; its "hash" is the tail hash. None when the prompt ends on a page edge."""
    account: Account
    chunk_starts: tuple[int, ...]
    """First token of each chunk that was computed (not found in the cache), for a replay with equal shapes."""
    prefill_s: float
    draft: DraftHandoff | None = None
    """Of a model with a draft layer; its digest is in the account."""
    pages_pulled_back: int = 0
    """Pages that prefill read from the caller instead of computing them."""


PrefillEvent = Accepted | PagesSealed | PrefillDone


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """Renewal or release of a lease: an id, no data."""

    envelope: Envelope
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class LocateCall:
    """What has a node got of this prompt?"""

    envelope: Envelope
    hashes: PageHashes
    """Of the prompt's pages, from the first one on."""


@dataclass(frozen=True, slots=True)
class LendCall:
    """Keep what you have of this prompt, and say where it is."""

    envelope: Envelope
    hashes: PageHashes
    """Of the prompt's pages, from the first one on."""
    first_page_wanted: int
    """Pages before this index are in the caller's tree already."""


@dataclass(frozen=True, slots=True)
class Loan:
    lease: Accepted
    """It keeps the pages; nobody renews it: who has not read them when it ends can do without."""
    pages: PagesSealed


class FailurePolicy(StrEnum):
    """What a decode node does when a prefill node fails a request that it had accepted. A refusal before the first page
    is rerouted whatever the policy."""

    FAIL = "fail"
    """End the request with what happened."""
    RETRY = "retry"
    """Ask another prefill node for what is not verified yet."""
    RECOMPUTE = "recompute"
    """Compute on the decode node what is not verified yet."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """From a client or a router to a decode node."""

    request_id: RequestId
    tokens: UInt32Array
    sampling: Sampling = Sampling()
    namespace: Namespace = Namespace()
    prefill_address: str = ""
    """host:port of the prefill node to use; empty: the decode node's own choice."""
    prefill_alternates: tuple[str, ...] = ()
    """host:port of the nodes to turn to, in this order, if that one fails and the policy allows it."""
    remaining_s: float = 120.0
    want_logits: bool = False
    fault: str = ""
    """Name of a fault to inject after the read; refused unless the node was started to allow it."""
    priority: int = 0
    """For an eviction order that asks for it: pages of the highest stay longest."""
    on_failure: FailurePolicy | None = None
    """None: what the router or the decode node has for those that don't say."""


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    """0 is prefill's first token."""
    token: int
    logprob: float
    logits_digest: int = 0
    draft_digests: tuple[int, ...] = ()
    """On a speculative step's first token, if logits were asked for: xxh3_64 of each drafted token's logits, if any."""
    instead: str = ""
    """Of the first: who brought the prompt in place of the prefill node asked for, an address or this node's name."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """The account of one request's transfer, in pages, bytes and seconds."""

    prompt_tokens: int = 0
    pages_total: int = 0
    pages_hit: int = 0
    pages_shipped: int = 0
    bytes_main: int = 0
    bytes_index: int = 0
    bytes_tail: int = 0
    """Of the bytes above, those of the tail page."""
    bytes_backend: int = 0
    """What the transfer backend's own telemetry counted for the same reads (page bytes, not table rows)."""
    descriptors: int = 0
    digests_verified: int = 0
    chunks: int = 0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """Wall-clock time during which at least one read of this request was running."""
    exposed_transfer_s: float = 0.0
    """From prefill's end, as decode heard of it, to admission."""
    ttft_s: float = 0.0
    pages_pulled_back: int = 0
    """The other way: pages that prefill read from this node instead of computing them."""
    pages_borrowed: int = 0
    """Of those shipped, the ones that another node than prefill had."""
    prefill_address: str = ""
    """Of the prefill node that brought the prompt to its end; empty: it was computed on decode."""
    prefill_request: str = ""
    """What the request was called there."""
    decode_node: str = ""
    """Name of the node that answered."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What became of the drafts of one request."""

    steps: int = 0
    """Verifications of at least one draft."""
    drafted: int = 0
    accepted: int = 0
    rolled_back_tokens: int = 0
    """Tokens whose rows had been written to both caches and were taken back."""
    canary: str = ""
    """What is suspicious about the acceptance, empty if nothing is."""

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a step: those accepted, and the one that every verification gives. 0 without a step."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Of the drafted tokens; 0 without one."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class GenerateDone:
    finish_reason: str
    """"length" or "stop"."""
    output_tokens: int
    shipment: Shipment
    chunk_starts: tuple[int, ...] = ()
    speculation: Speculation | None = None
    """None where the decode node does not speculate."""
    preemptions: int = 0
    """How often the request gave its pages to another one and came back."""
    retries: int = 0
    """How often it turned to another prefill node after one had failed it."""
    recomputed_tokens: int = 0
    """Tokens of the prompt that the decode node computed itself, after a prefill node had failed it."""


GenerateEvent = Token | GenerateDone


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A peer as a node sees it."""

    state: str
    """CONNECTING, READY, SUSPECT or LOST."""
    since_s: float
    """For so long."""
    lane: str
    """What carries reads from it, as found out."""
    error: str = ""
    """What failed last between the two, also once it is over."""


LEASES_TOLD = 256


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A peer's right to read pages of one request."""

    peer: str
    left_s: float
    """Until it expires, if nobody renews it."""
    computing: bool
    """Its request still runs here; else its pages only wait to be read."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What an operator asks a node for."""

    name: PeerName
    role: str
    pages: dict[str, int]
    """free, reserved, cached, private, quarantined, total."""
    leases: int
    requests: int
    backend: str
    peers: dict[str, PeerStatus]
    """By peer name; a node that comes back stands beside its old life until that has gone."""
    contract: Contract
    quarantine: dict[str, str] = field(default_factory=dict)
    """Reservation to the reason why its pages are held back."""
    queued: int = 0
    """Requests that wait for pages, of those in `requests`."""
    preemptions: int = 0
    """How often a decoding request gave its pages to another one, since the start."""
    workspace: dict[str, int] = field(default_factory=dict)
    """Of a prefill node, as planned: max_batched_tokens, topk_bytes and, if there is a budget, scores_bytes."""
    unready: str = ""
    """Why the node can't serve now, whatever is asked; empty: it can."""
    draining: bool = False
    """It was told to end, and takes no new requests."""
    held_leases: dict[str, LeaseStatus] = field(default_factory=dict)
    """By lease id; the first `LEASES_TOLD` of `leases`, in the order in which they expire."""
    unsettled: dict[str, str] = field(default_factory=dict)
    """Peer to the reads from it that were given up without a proven end: what keeps pages in quarantine."""
    fences: int = 0
    """Agents that were destroyed to end such reads, since the start."""
    fence_error: str = ""
    """Why the last fence came to nothing, if it did."""
    borrowed_pages: int = 0
    """Pages that other nodes had and that were read from them, since the start, instead of being computed."""
    borrow_failures: dict[str, int] = field(default_factory=dict)
    """Kind of error to how often one put an end to that; then such pages were computed after all."""
    memory: dict[str, str] = field(default_factory=dict)
    """What became of the pool's memory, in words: kind, huge pages, numa, committed, registered."""
    rails: dict[str, str] = field(default_factory=dict)
    """Network device to what carries reads over it, and to which peers it is down; "any" where none is named."""
    claims: dict[str, int] = field(default_factory=dict)
    """Of a decode node's requests that have started: pages of their sequences that they have claimed, and held by now,
    those in the cache among them; growing: how many of these requests wait for more of theirs."""
    waiting_tokens: int = 0
    """Of a prefill node: tokens of prompts that it has taken on and not computed yet."""
    available_pages: int = 0
    """That a request could have at once: free or evictable; none while requests wait for some."""
    uses: dict[str, int] = field(default_factory=dict)
    """Of the cached pages: evictable, locked (by a request or a lease)."""
    totals: dict[str, int] = field(default_factory=dict)
    """Since the start, by name with the unit last: `node.base.Moved`, and what a served node's metrics count."""
    discovery: dict[str, str] = field(default_factory=dict)
    """Of a decode node: where it looks for prefill nodes, to how many are found there, and why none is now."""
