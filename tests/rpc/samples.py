"""Messages for the tests of rpc: samples, and hypothesis strategies for all that may be sent."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format, page_major, pool_map
from pdkv.ids import HASH_BYTES, Incarnation, LeaseId, NodeId, PageHashes, PeerName, RequestId
from pdkv.node.messages import (
    Accepted,
    Account,
    DraftHandoff,
    Envelope,
    FailurePolicy,
    GenerateDone,
    GenerateRequest,
    LeaseCall,
    LeaseStatus,
    LendCall,
    Loan,
    LocateCall,
    Namespace,
    NodeIntro,
    NodeStatus,
    PagesSealed,
    PeerStatus,
    PrefillDone,
    PrefillRequest,
    Sampling,
    Shipment,
    Speculation,
    Token,
)

SHAPE = model_shape(load_config("tiny"))
FORMAT = page_format(SHAPE)
P = PeerName(NodeId("prefill-0"), Incarnation("a" * 32))
D = PeerName(NodeId("decode-0"), Incarnation("b" * 32))
ENVELOPE = Envelope(D, P, b"f" * 32)


def contract(weights_id: str = "revision-1") -> Contract:
    return build_contract(SHAPE, FORMAT, identity=ContractFacts(weights_id))


def intro(name: PeerName = P, weights_id: str = "revision-1") -> NodeIntro:
    pool = pool_map(FORMAT, page_major(FORMAT, 16), [1 << 40], 1 << 41, 64, "DRAM", 0)
    return NodeIntro(name, contract(weights_id), b"\x00agent\xff", 2**64 - 1, pool)


def status(role: str, name: PeerName = P) -> NodeStatus:
    pages = {"free": 10, "reserved": 1, "cached": 2, "private": 1, "quarantined": 1, "total": 15}
    held = {"7": "no end of its read"}
    peers = {str(D): PeerStatus("SUSPECT", 1.5, "cma", "PeerLost: gone")}
    return NodeStatus(
        name,
        role,
        pages,
        1,
        2,
        "loopback",
        peers,
        contract(),
        held,
        1,
        5,
        {"topk_bytes": 9},
        "no rank",
        draining=True,
        held_leases={"lease-1": LeaseStatus(str(D), 12.5, computing=True)},
        unsettled={str(D): "1 reads of 3 pages"},
        fences=2,
        fence_error="no room",
        borrowed_pages=7,
        borrow_failures={"StalePages": 1},
        memory={"huge pages": "granted on touch"},
        rails={"eth0": "tcp", "eth1": "tcp; down to p0#1: nothing came on it for 2 s"},
        claims={"claimed": 12, "held": 5, "growing": 1},
        waiting_tokens=1280,
        available_pages=11,
        uses={"evictable": 3, "locked": 1},
        totals={"read_main_bytes": 1 << 40, "hit_pages": 12},
        discovery={"prefill dns:p:1": "0 found; now finds nobody"},
    )


def pages(count: int, first_index: int = 0) -> PagesSealed:
    rng = np.random.default_rng(count)
    return PagesSealed(
        first_index=first_index,
        hashes=PageHashes(rng.bytes(count * HASH_BYTES)),
        page_ids=np.arange(1, count + 1, dtype=np.int32),
        generations=rng.integers(0, 2**64, count, np.uint64),
        digests=rng.integers(0, 2**64, (count, 2), np.uint64),
    )


def account(tokens: int = 200) -> Account:
    full = tokens // 64
    return Account(tokens, full * 64, 0, full * 64, "none", full + 1, b"l" * 32, b"t" * 32, SHAPE.indexer_types)


def prefill_request(tokens: int = 200, *, remaining_s: float = 30.0, request_id: str = "r-1") -> PrefillRequest:
    column = np.arange(tokens, dtype=np.uint32)
    return PrefillRequest(ENVELOPE, RequestId(request_id), column, Namespace("k", "s"), 1, Sampling(), remaining_s)


def prefill_done(tail: PagesSealed | None = None) -> PrefillDone:
    return PrefillDone(7, -0.5, 2**63 + 1, tail, account(), (0, 64, 128), 0.25)


def handoff(width: int = 3, topk: int = 2, seed: int = 5) -> DraftHandoff:
    return DraftHandoff(
        hidden=np.linspace(-1, 1, width, dtype=np.float32),
        tokens=np.arange(topk, dtype=np.uint32),
        probabilities=np.full(topk, 0.25, np.float32),
        index_seed=np.arange(-1, seed - 1, dtype=np.int32),
        logits_digest=2**63 + seed,
    )


def generate_request(tokens: int = 200, *, remaining_s: float = 30.0, request_id: str = "r-1") -> GenerateRequest:
    return GenerateRequest(RequestId(request_id), np.arange(tokens, dtype=np.uint32), remaining_s=remaining_s)


ACCEPTED = Accepted(LeaseId("lease-1"), 30.0)
LEASE_CALL = LeaseCall(ENVELOPE, LeaseId("lease-1"))
LOCATE_CALL = LocateCall(ENVELOPE, pages(3).hashes)
LEND_CALL = LendCall(ENVELOPE, pages(3).hashes, 1)
LOAN = Loan(ACCEPTED, pages(2, first_index=1))
SHIPMENT = Shipment(prompt_tokens=200, bytes_main=2**40, ttft_s=0.5, prefill_request="d0-1", decode_node="d0#1")
GENERATE_DONE = GenerateDone("stop", 3, SHIPMENT, (0, 64), preemptions=2)
TOKEN = Token(0, 5, -0.25, 2**64 - 1)
TOKEN_INSTEAD = Token(0, 5, -0.25, instead="p1:7000")

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(1e-6, 7 * 86400.0)
names = st.from_regex(r"[A-Za-z0-9._:-]{1,40}", fullmatch=True)
texts = st.text(max_size=40)
columns = st.lists(u32, min_size=1, max_size=50).map(lambda t: np.array(t, np.uint32))
node_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True).map(NodeId)
peers = st.builds(PeerName, node_ids, st.from_regex(r"[0-9a-f]{32}", fullmatch=True).map(Incarnation))
envelopes = st.builds(Envelope, peers, peers, st.binary(min_size=32, max_size=32))
namespaces = st.builds(Namespace, texts, texts)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 1 << 22),
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-9, 1),
    seed=u64,
    stop_tokens=st.lists(u32, max_size=5).map(tuple),
)
sealed = st.builds(pages, st.integers(1, 40), st.integers(0, 1000))
prefill_requests = st.builds(
    PrefillRequest,
    envelope=envelopes,
    request_id=names.map(RequestId),
    tokens=columns,
    namespace=namespaces,
    first_page_wanted=st.integers(0, 1 << 20),
    sampling=samplings,
    remaining_s=seconds,
    want_logits=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
    offered=st.none() | sealed,
)
generate_requests = st.builds(
    GenerateRequest,
    request_id=names.map(RequestId),
    tokens=columns,
    sampling=samplings,
    namespace=namespaces,
    prefill_address=st.sampled_from(["", "host-1.pool:8000", "127.0.0.1:1", "[::1]:9"]),
    remaining_s=seconds,
    want_logits=st.booleans(),
    fault=st.sampled_from(["", "bit_flip"]),
    priority=st.integers(-(2**31), 2**31 - 1),
    on_failure=st.none() | st.sampled_from(FailurePolicy),
    prefill_alternates=st.lists(st.sampled_from(["host-2:8000", "[::1]:9"]), max_size=3).map(tuple),
)
rising = st.sets(st.integers(0, 199), max_size=6).map(lambda s: tuple(sorted(s)))
dones = st.builds(
    PrefillDone,
    first_token=u32,
    first_logprob=st.floats(-1e6, 0),
    logits_digest=u64,
    tail=st.none() | st.builds(pages, st.just(1), st.integers(0, 1000)),
    account=st.builds(lambda digest: replace(account(), draft_digest=digest), u64),
    chunk_starts=rising,
    prefill_s=st.floats(0, 1e4),
    draft=st.none() | st.builds(handoff, st.integers(0, 8), st.integers(1, 4), st.integers(0, 8)),
    pages_pulled_back=st.integers(0, 1 << 20),
)
digests = st.lists(u64, max_size=4).map(tuple)
tokens = st.builds(Token, u32, u32, st.floats(-1e6, 0), u64, digests, st.just("") | names)
speculations = st.builds(
    Speculation, st.integers(0, 5), st.integers(5, 20), st.integers(0, 5), u64, st.text("abc 0.4", max_size=9)
)
shipments = st.builds(
    Shipment, prompt_tokens=u64, bytes_main=u64, transfer_s=st.floats(0, 1e4), pages_pulled_back=u64, pages_borrowed=u64
)
generate_dones = st.builds(
    GenerateDone, st.sampled_from(["length", "stop"]), u32, shipments, rising, st.none() | speculations
)


def same(a: object, b: object) -> bool:
    """Equality of two messages, their numpy columns and dtypes included."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if type(a) is not type(b):
        return False
    fields = getattr(a, "__dataclass_fields__", None)
    return a == b if fields is None else all(same(getattr(a, f), getattr(b, f)) for f in fields)
