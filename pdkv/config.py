"""Everything that can be set on a node, in one place.

Guarantees: a config that exists is valid in itself; what only the model can tell (page size) is checked by the node.
"""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdkv.errors import ConfigError
from pdkv.fields import (
    Address,
    Addresses,
    Bind,
    Bytes,
    CollectorUrl,
    Count,
    DnsServer,
    FilePath,
    Listed,
    NodeName,
    NodePlaces,
    Seconds,
    Takes,
    ZmqEndpoint,
    host_of,
)
from pdkv.geometry.byte_ledger import usable_pages
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS
from pdkv.geometry.row_format import MAIN_ROWS
from pdkv.rpc.convert.checks import MAX_DURATION_S
from pdkv.rpc.security import Gate, MutualTls, Security, security_of

ENV_PREFIX = "PDKV_"
MIB = 1 << 20
_GATE = Gate()


class ServiceConfig(BaseModel):
    """What a router and a node have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    node_id: NodeName = Field(default_factory=lambda: host_name())
    """Name of this node in its fleet, unique there; not given: the host's name."""
    bind: Address = "127.0.0.1:0"
    """Where to listen; port 0 takes a free one."""
    advertise: Annotated[str, Takes("HOST[:PORT]", "host or host:port")] = ""
    """host or host:port that peers dial; empty: what was bound."""
    tls_ca: FilePath = ""
    """PEM file of the CA whose certificates are taken, for mutual TLS; changes are seen without a restart."""
    tls_certificate: FilePath = ""
    """PEM file of this process's certificate, with its chain; a node's must name its node_id."""
    tls_key: FilePath = ""
    """PEM file of that certificate's key, without a password."""
    insecure: bool = False
    """Serve and dial gRPC in plain text instead: whoever reaches a port may use it. Has to be said."""
    allow_names: Annotated[tuple[str, ...], Listed] = ()
    """Names in certificates that may call, as patterns such as decode-*,spiffe://fleet/*; none: all of the CA."""
    allow_status: Annotated[tuple[str, ...], Listed] = ()
    """Names that may ask for the status beside those, such as router-*,admin: a router watches its nodes."""
    allow_admin: Annotated[tuple[str, ...], Listed] = ()
    """Names that may tell this process to drain or compact; none: nobody. In plain text everybody may."""
    calls_per_peer: Annotated[int, Field(ge=1)] = _GATE.calls_per_peer
    """Most calls of one peer (a certificate's names; in plain text an IP address) that run at once."""
    connections_per_peer: Annotated[int, Field(ge=1)] = _GATE.connections_per_peer
    """Most connections that calls of one peer run over at once."""
    connections: Annotated[int, Field(ge=1)] = _GATE.connections
    """Most connections at once, of all peers together."""
    metrics_bind: Annotated[str, Takes("HOST:PORT", "host:port")] = ""
    """Where Prometheus finds metrics, over plain HTTP: 0.0.0.0:9400; empty: nowhere."""
    drain_grace_s: Seconds = 30.0
    """Longest that pages stay readable after the node was told to end."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines that are logged, to stderr."""
    trace_endpoint: CollectorUrl = ""
    """Where traces go, over OTLP/gRPC: http://collector:4317; empty: where OpenTelemetry's own variables say, or
    nowhere. See docs/tracing.md."""
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the traces that begin here, those that are kept; others are as whoever began them decided."""
    log_format: Literal["text", "json"] = "text"
    """How: for people, or one JSON object a line; docs/logs.md has the fields."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        for field, host in (
            ("advertise", host_of(self.advertise)),
            ("bind", host_of(self.bind) if not self.advertise else ""),
        ):
            if host in ("0.0.0.0", "[::]", "::", "*"):
                raise ValueError(f"{field}: no peer can dial {host}; name the address that peers dial in advertise")
        if self.metrics_bind and not re.fullmatch(r".+:\d{1,5}", self.metrics_bind):
            raise ValueError("metrics_bind: host:port, such as 0.0.0.0:9400")
        for field, patterns in (("allow_names", self.allow_names), ("allow_admin", self.allow_admin)):
            if patterns and self.insecure:
                raise ValueError(f"{field}: only under mutual TLS; in plain text nobody has a name")
        if self.allow_status and not self.allow_names:
            raise ValueError("allow_status: only with allow_names; without, all may ask")
        return self

    def security(self) -> Security:
        """Raises `ConfigError` unless either key files or plain text were asked for."""
        return security_of(ca=self.tls_ca, certificate=self.tls_certificate, key=self.tls_key, insecure=self.insecure)

    def gate(self) -> Gate:
        return Gate(
            allow_names=self.allow_names,
            allow_status=self.allow_status,
            allow_admin=self.allow_admin,
            calls_per_peer=self.calls_per_peer,
            connections_per_peer=self.connections_per_peer,
            connections=self.connections,
        )


class NodeConfig(ServiceConfig):
    """A rank with a pool: prefill or decode."""

    model: Annotated[str, Takes("MODEL", "a preset or a path")] = "tiny"
    """Preset, directory of a checkpoint, or path of a config.json."""
    engine: Literal["reference", "synthetic"] = "reference"
    """What computes: transformers' model, or nothing: rows that follow from the tokens, for measuring all the rest."""
    synthetic_token_us: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Microseconds that a synthetic engine takes for a token at least, as a device's step would."""
    seed: Count = 0
    """Of random weights, where the model has none."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of the engine; none: its own choice."""
    main_row: Annotated[str, Takes("|".join(MAIN_ROWS), f"one of {', '.join(MAIN_ROWS)}")] = "fp8_ds_mla"
    """Row format of main KV."""
    draft_layers: Count = 0
    """MTP layers with rows of their own in the pages."""
    indexer_types: Annotated[tuple[Literal["full", "shared"], ...], Listed] | None = None
    """Overrides the model's list, to show that a peer with another list is refused."""
    pool_bytes: Bytes = 256 * MIB
    """Memory of the pool, such as 2GiB; takes whole pages of it."""
    pool_pages: Annotated[int, Field(ge=2)] | None = None
    """Pages with the write sink; instead of `pool_bytes`."""
    memory: Literal["anonymous", "hugetlb", "shared", "file", "torch"] = "anonymous"
    """Kind of memory: private on transparent huge pages, or on reserved ones, a memfd, a file, or torch's own."""
    memory_path: FilePath = ""
    """Of the file, for memory "file"."""
    touch_pool: bool = True
    """Have the system find the pool's memory at the start, so that what it hasn't got is an error then and not later;
    nothing is done about a file and a device."""
    device: Annotated[str, Takes("DEVICE", "a device of torch")] = "cpu"
    """Where the pool lies, as torch names it."""
    numa_node: Annotated[str, Takes("auto|none|N", "auto, none or the number of a node")] = "auto"
    """Where the pool's memory and the transfer thread are, on a machine of several NUMA nodes: with the NIC, if that is
    clear, anywhere, or on that node."""
    placement: Literal["page_major", "layer_major"] = "page_major"
    """A page in one piece, or one buffer a layer."""
    digest: Literal["xxh3_64", "none"] = "xxh3_64"
    """Proof of a page's bytes; none switches it off, for measuring only."""
    eviction: Literal["lru", "lfu", "fifo", "priority"] = "lru"
    """Which cached pages go first when room is needed: unused for longest, of fewest requests, oldest, least important;
    an answer's always before a prompt's of equal priority."""
    eagle_rule: Literal["none", "bigram", "drop_page"] = "none"
    """How a prefix hit falls back for a draft head; the same on both nodes."""
    rollback_tokens: Count = 0
    """Most tokens a rejected draft rolls back, where an engine drafts by itself; the same on both nodes."""
    speculation: Literal["none", "mtp", "oracle"] = "none"
    """How decode drafts: mtp by the model's draft layer, whose rows are in the pages; oracle by asking the model
    beforehand, for tests and demonstrations only. The same on both nodes."""
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Most tokens drafted, and rolled back, in a step of speculation; the same on both nodes."""
    draft_topk: Annotated[int, Field(ge=1, le=64)] = 1
    """Candidates of the draft layer that prefill hands over; the first is what is drafted."""
    index_sharing: bool = False
    """Let the rows of one draft share what the indexer selected at its beginning; without effect above draft_topk 1."""
    oracle_acceptance: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Share of its drafts that an oracle gets right."""
    backend: Literal["nixl", "loopback"] = "nixl"
    """What carries the pages; loopback works within one process only."""
    ucx_tls: str = ""
    """UCX transports to allow, as in UCX_TLS; empty: all."""
    net_devices: str = ""
    """Network devices to use, as in UCX_NET_DEVICES; empty: all."""
    rails: Annotated[tuple[str, ...], Listed] = ()
    """Network devices instead, as UCX names them: a rail each, over which every read is spread; none: one rail."""
    require_rdma: bool = False
    """Refuse a peer that is reached over another lane."""
    read_max_bytes: Bytes = 512 * MIB
    """Most bytes of one READ: it bounds what a fence has to give up."""
    read_deadline_s: Seconds = 30.0
    """Longest that one read may take before its pages are held back."""
    fence_after_s: Seconds = 10.0
    """How long pages are held back by a read without an end before its transfer agent is replaced to get them again."""
    lease_ttl_s: Annotated[Seconds, Field(le=MAX_DURATION_S)] = 30.0
    """How long another node may read pages that this one keeps for it, without renewing its lease; at most a week."""
    leases_per_peer: Annotated[int, Field(ge=1)] = 1024
    """Most requests of one other node whose pages are kept for it at once."""
    pull_back: bool = True
    """Pages that decode has and prefill lacks are read, not computed: read them, on decode let them be read."""
    borrow_s: Seconds = 10.0
    """Longest that a request waits for pages that another node lends; what has not come by then is computed."""
    peer_probe_s: Seconds = 5.0
    """A peer that nothing was heard of for so long is asked whether it is still there."""
    peer_lost_s: Seconds = 15.0
    """A peer that can't be reached for so long is lost."""
    peer_forget_s: Seconds = 60.0
    """A lost peer that is silent for so long is forgotten, with its connection."""
    events_address: ZmqEndpoint = ""
    """Where KV events are published, as ZMQ writes it: tcp://*:5557; empty: nowhere."""
    events_replay: ZmqEndpoint = ""
    """Where subscribers ask for events that they missed: tcp://*:5558; empty: nowhere."""
    events_topic: str = ""
    """First frame of published events; empty: kv@NODE_ID@MODEL, from which llm-d reads whose they are."""
    events_encoding: Literal["array", "map"] = "array"
    """Fields of an event by position, which every router reads, or by name, as vLLM and SGLang write them of late."""
    allow_fault_injection: bool = False
    """Let faults be put in on purpose, to show that they are found: by `fault_plan`, and on a decode node by a request
    that damages what was read for it."""
    fault_plan: Annotated[str, Takes("PLAN", "rules and a seed")] = ""
    """Faults of this process, its calls and its reads, such as kill@decode.reading:nth=3,corrupt:p=0.01;seed=7; see
    docs/faults.md."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pool_pages is not None and "pool_bytes" in self.model_fields_set:
            raise ValueError("pool_pages: either pool_pages or pool_bytes, not both")
        if self.synthetic_token_us and self.engine != "synthetic":
            raise ValueError('synthetic_token_us: only when engine is "synthetic"')
        if (self.memory == "file") != bool(self.memory_path):
            raise ValueError('memory_path: a path when memory is "file", and only then')
        if self.draft_layers != 0 and (self.draft_layers, self.speculation) != (1, "mtp"):
            raise ValueError('draft_layers: 0, or 1 when speculation is "mtp", which implies it')
        if self.speculation == "mtp" and self.eagle_rule == "drop_page":
            raise ValueError("eagle_rule: bigram, which speculation mtp implies")
        if self.speculation != "none" and self.rollback_tokens:
            raise ValueError("rollback_tokens: 0, as with speculation it is draft_tokens")
        if self.events_replay and not self.events_address:
            raise ValueError("events_replay: only with an events_address")
        if self.fault_plan and not self.allow_fault_injection:
            raise ValueError("fault_plan: only with allow_fault_injection")
        return self

    def security(self) -> Security:
        """As a service's; the certificate must name the node."""
        found = super().security()
        return replace(found, node=self.node_id) if isinstance(found, MutualTls) else found

    def total_pages(self, page_bytes: int) -> int:
        """Pages of the pool, the write sink among them. Raises `ConfigError` if there is no room for two."""
        total = self.pool_pages or usable_pages(self.pool_bytes, page_bytes) + 1
        if total < 2:
            raise ConfigError("pool_bytes", self.pool_bytes, f"at least {2 * page_bytes}: two pages of {page_bytes}")
        return total


class HttpConfig(ServiceConfig):
    """A service with an OpenAI-compatible HTTP port, if it is given an address."""

    http_bind: Bind = ""
    """Where completions are served over HTTP, beside gRPC: 0.0.0.0:8080; empty: nowhere. See docs/http.md."""
    http_tokenizer: Annotated[str, Takes("DIR|bytes", "bytes, or a directory with tokenizer.json")] = ""
    """What turns text into tokens there: bytes, as the presets take it, or a checkpoint's directory; empty: prompts are
    token ids, and so are answers."""
    http_models: Annotated[tuple[str, ...], Listed, Field(min_length=1)] = ("pdkv",)
    """Names that requests may call the model by."""
    http_api_keys: FilePath = ""
    """File of keys, one a line, of which a request has to bear one; changes are seen without a restart. Empty: under
    mutual TLS a client's certificate counts, in plain text everybody may ask."""
    http_body_bytes: Bytes = 32 * MIB
    """Largest body of a request: a prompt of 1M token ids takes some 8 MB."""
    http_request_s: Annotated[Seconds, Field(le=MAX_DURATION_S)] = 600.0
    """Longest that a request may take there."""


class PrefillConfig(NodeConfig):
    """A prefill node."""

    chunk_tokens: Annotated[int, Field(gt=0, multiple_of=INDEX_PAGE_ROWS)] = 32_768
    """Tokens computed before the next pages are announced: whole pages."""
    max_batched_tokens: Annotated[int, Field(gt=0, multiple_of=INDEX_PAGE_ROWS)] | None = None
    """Most tokens of one engine step, which sizes the buffer of selected tokens; none: a chunk."""
    scores_bytes: Bytes | None = None
    """Most memory of one step's index scores, rows x columns x 4 B: later steps of a long prompt get shorter to stay
    within it; none: no limit."""
    pages_wait_s: Seconds = 2.0
    """Longest that a request waits here for pages that others give back, before it is refused: shorter than decode's
    peer_silence_s."""


class DecodeConfig(NodeConfig, HttpConfig):
    """A decode node."""

    prefill_addresses: NodePlaces = ()
    """Used in turn for requests that name none; requests may name these. Addresses, or where some are found: see
    docs/operations.md."""
    dns_server: DnsServer = ""
    """Who is asked where prefill_addresses says dns:; empty: whom this machine asks."""
    prefill_allow: Annotated[tuple[str, ...], Listed] = ()
    """Other prefill nodes that a request or router may name, as patterns of host:port: 10.1.*:7000, *.prefill.svc:7000,
    or * for any. Whatever is named gets the prompt and is believed about its pages."""
    source_addresses: Addresses = ()
    """Other nodes of either role that are asked for pages which neither this node nor its prefill node has."""
    locate_s: Seconds = 0.1
    """Longest that a request waits for their answers."""
    queue_limit: Count = 64
    """Requests that may wait for pages; one more is refused."""
    reserve: Literal["all", "late"] = "all"
    """When a request gets its pages: all when it starts, or late: some ahead of what arrives, and it starts as soon as
    it is sure to get the rest. Late, more requests run at once in a small pool, and wait for each other on the way."""
    reserve_window_pages: Annotated[int, Field(ge=1)] = 1024
    """Pages that a request takes ahead of its need where reserve is late: best two of prefill's chunks."""
    preempt: Literal["none", "offload", "recompute"] = "none"
    """What a decoding request does for one that waits at the head: nothing, or give its pages and bring them back from
    host memory, or compute them again."""
    offload_bytes: Bytes = 1 << 30
    """Host memory for the pages of requests that gave way; one that finds no room there keeps its pages."""
    cache_answers: bool = True
    """Keep the full pages of answers as cache too, for the next turn of a conversation; prompts' pages outlast them."""
    on_failure: Literal["fail", "retry", "recompute"] = "fail"
    """What becomes of a request that a prefill node took on and failed, if it doesn't say: end it by name, ask another
    prefill node for what is missing, or compute that here. One that was refused goes to another node in any case."""
    peer_silence_s: Seconds = 5.0
    """A prefill node that is needed and not heard of for so long, by event, read or renewed lease, is given up."""
    peer_pages_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Most pages reserved for prompts that one prefill node is to bring, as a part of the pool: a stopped node holds no
    more. A request that is the only one for its node may take all."""
    recompute_chunk_tokens: Annotated[int, Field(gt=0, multiple_of=INDEX_PAGE_ROWS)] = 2048
    """Most tokens of a step when this node computes a prompt: whole pages. Between two steps other requests decode."""
    rank_addresses: Addresses = ()
    """The other ranks of a decode group that this node leads (`pdkv rank`), with settings as its own."""

    @model_validator(mode="after")
    def _late_possible(self) -> Self:
        if self.reserve == "late" and self.preempt != "none":
            raise ValueError("preempt: none where reserve is late: who has started can always end")
        if self.reserve == "late" and self.rank_addresses:
            raise ValueError("reserve: all where rank_addresses are given: ranks reserve together")
        return self


class RankConfig(NodeConfig):
    """A rank of a decode group, which is not its leader."""


class RouterConfig(HttpConfig):
    """A router."""

    prefill_addresses: NodePlaces = Field(min_length=1)
    """Prefill nodes to send prompts to: addresses, or where some are found, such as dns:_grpc._tcp.prefill; see
    docs/operations.md."""
    decode_addresses: NodePlaces = Field(min_length=1)
    """Decode nodes to send requests to, likewise."""
    dns_server: DnsServer = ""
    """Who is asked where a list of addresses says dns:; empty: whom this machine asks."""
    on_failure: Literal["fail", "retry", "recompute"] | None = None
    """For requests that don't say: see decode; none: each decode node's own."""
    connection_age_s: Seconds = 20.0
    """A client's connection ends after so long, its calls when they end, and the next one goes to whichever router is
    there by then: so they spread over new ones, and leave one that is about to go."""
    policy: Literal["prefix", "round-robin"] = "prefix"
    """How nodes are chosen: prefill by where most of the prompt is cached and how much it has to compute before, decode
    by free pages; or all in turn."""
    locate_s: Seconds = 0.1
    """Longest that a request waits for nodes to say what they have of its prompt."""
    running_limit: Annotated[int, Field(ge=1)] = 512
    """Most requests that are given to nodes at once."""
    waiting_limit: Count = 512
    """Most requests that wait for that, in the order in which they came; one more is refused."""

    def gate(self) -> Gate:
        return replace(super().gate(), connection_age_s=self.connection_age_s)


ROLES: tuple[type[ServiceConfig], ...] = (PrefillConfig, DecodeConfig, RankConfig, RouterConfig)


def host_name() -> str:
    """A pod's or machine's own name, as far as a node may be called so."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:63].lstrip("._-") or "node"
