"""Every metric that pdkv exports, with its words: the one place where a name is written.

Guarantees: units are in the names (seconds, bytes, pages, tokens); labels take values from closed lists (outcomes are
kinds of errors, stages and page classes are named here), so that no request or peer can make a new series.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
BYTES = tuple(float(1 << power) for power in range(20, 38))
"""1 MiB to 128 GiB: a request of 1M tokens is 57 GB."""
PAGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8)

DONE, ABORTED = "done", "aborted"
"""Outcomes beside the kinds of named errors; a client that goes away aborts."""
TTFT_STAGES = ("queue", "prefill", "exposed_transfer", "verify")
"""Of the time to the first token, in this order; they add up to it."""
FIRST_STEP = "first_step"
"""What comes after it: from admission to the second token, which is the first that decode computed."""

# Gauges and counters that are read from a node's status when it is scraped: name, words, labels.
NODE_PAGES = (
    "pdkv_pages",
    "Pages of the pool by class; free, reserved, cached, private and quarantined add up.",
    "class",
)
CACHED_PAGES = ("pdkv_cached_pages", "Cached pages: evictable, or locked by a request or a lease.", "use")
REQUESTS_RUNNING = ("pdkv_requests_running", "Requests that have not ended.", "")
QUEUED = ("pdkv_requests_queued", "Of those, the ones that wait for pages, or in a router for others to end.", "")
LEASES = ("pdkv_leases", "Leases that peers hold on pages here.", "")
PEERS = ("pdkv_peers", "Peers by state.", "state")
UNSETTLED = ("pdkv_unsettled_peers", "Peers with reads that were given up without a proven end.", "")
QUARANTINES = ("pdkv_quarantines", "Requests of the past whose pages are held back until a read has a proven end.", "")
READY = ("pdkv_ready", "1 while the process serves, 0 while it has a reason not to.", "")
DRAINING = ("pdkv_draining", "1 after the process was told to end.", "")
NODES = ("pdkv_router_nodes", "Nodes that a router knows, up or passed over.", "role state")
APART = ("pdkv_router_apart", "Pairs of nodes that refused each other or failed.", "")
CHOICES = ("pdkv_router_choices", "What prefill nodes were chosen by: prefix, load, turn.", "by")
ESTIMATES = (
    "pdkv_router_estimates",
    "What became of questions to nodes: answered, late, failed, spared (not asked, as the last one is still out).",
    "outcome",
)
CHOOSING = ("pdkv_router_choosing_seconds", "That requests waited for the answers, all together.", "")
DISCOVERY = (
    "pdkv_discovery_failing",
    "Places (dns:, k8s:) of a list of addresses where nothing is found now; the nodes that were found stay known.",
    "list",
)
WAITING_TOKENS = ("pdkv_waiting_tokens", "Of prompts that were taken on and are not computed yet.", "")
AVAILABLE = ("pdkv_available_pages", "That a request could have at once: free or evictable, none while some wait.", "")
WORKSPACE = ("pdkv_workspace_bytes", "Memory planned beside the pages on a prefill node.", "use")
INFO = ("pdkv_node", "The node's name, role, content fingerprint and backend, as labels.", "")
FENCES = ("pdkv_fences", "Transfer agents destroyed to end reads without an end.", "")
PREEMPTIONS = ("pdkv_preemptions", "Times that a decoding request gave its pages to another one (retractions).", "")
EVICTED = ("pdkv_evicted_pages", "Cached pages that made room.", "")


class Metrics:
    """Of one process, in a registry of its own: several in one process (tests) don't mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = self.registry
        self.requests = Counter(
            "pdkv_requests",
            "Requests by how they ended: done, aborted, or the kind of the error.",
            ("outcome",),
            registry=of,
        )
        self.refusals = Counter("pdkv_refusals", "Contract fields that peers were refused by.", ("field",), registry=of)
        self.digest_failures = Counter(
            "pdkv_digest_failures", "Requests that ended because bytes were not what was announced.", registry=of
        )
        self.ttft = Histogram("pdkv_ttft_seconds", "From the request to its first token.", buckets=SECONDS, registry=of)
        self.stages = Histogram(
            "pdkv_stage_seconds",
            "The time to a first token by stage: queue, prefill, exposed_transfer, verify; and first_step after it.",
            ("stage",),
            buckets=SECONDS,
            registry=of,
        )
        self.transfer = Histogram(
            "pdkv_transfer_seconds", "Time in which a request had a read running.", buckets=SECONDS, registry=of
        )
        self.exposed = Histogram(
            "pdkv_exposed_transfer_seconds",
            "From prefill's last word to admission: what a request waits for its transfer alone.",
            buckets=SECONDS,
            registry=of,
        )
        self.prefill = Histogram(
            "pdkv_prefill_seconds", "A prefill node's computation of one prompt.", buckets=SECONDS, registry=of
        )
        self.request_bytes = Histogram(
            "pdkv_request_bytes", "Bytes shipped for a request, both caches.", buckets=BYTES, registry=of
        )
        self.bytes = Counter("pdkv_transferred_bytes", "Bytes of pages read from peers.", ("cache",), registry=of)
        self.pages = Counter(
            "pdkv_prompt_pages",
            "Pages of prompts by where they came from: hit, shipped, pulled_back.",
            ("source",),
            registry=of,
        )
        self.hits = Histogram("pdkv_hit_pages", "Pages of a prompt that were in the tree.", buckets=PAGES, registry=of)
        self.verified = Counter("pdkv_verified_pages", "Pages whose digests were verified.", registry=of)
        self.tokens = Counter(
            "pdkv_tokens",
            "Tokens by kind: prompt, output, drafted, accepted, rolled_back, recomputed.",
            ("kind",),
            registry=of,
        )
        self.retries = Counter(
            "pdkv_retries", "Times that a request turned to another prefill node after one had failed it.", registry=of
        )
        self.lost_spans = Counter(
            "pdkv_lost_spans", "Spans of traces that could not be delivered, and were dropped.", registry=of
        )
        self.accepted = Histogram(
            "pdkv_accepted_length_tokens", "Mean tokens a speculative step, of a request.", buckets=LENGTHS, registry=of
        )
