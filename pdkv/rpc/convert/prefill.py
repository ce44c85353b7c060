"""Prefill requests, their events, and lease calls.

Guarantees: the columns of a `PagesSealed` are of one length, and none of its page ids is the write sink or negative.
"""

from __future__ import annotations

import math

import numpy as np

from pdkv.contract import EAGLE_RULES
from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import HASH_BYTES, SINK_PAGE, LeaseId, PageHashes, RequestId
from pdkv.node.messages import (
    Accepted,
    Account,
    DraftHandoff,
    Envelope,
    LeaseCall,
    PagesSealed,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
)
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import (
    envelope_from_pb,
    envelope_to_pb,
    kept_envelope,
    namespace_from_pb,
    namespace_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from pdkv.v1 import prefill_pb2

INDEXER_TYPES = ("full", "shared")
MAX_HIDDEN = 1 << 16
"""Values of a draft hidden state: GLM-5.3's has 6,144."""
MAX_DRAFT_TOPK = 64
MAX_INDEX_SEED = 1 << 16
"""Positions that an indexer selects: GLM-5.3's selects 2,048."""


def prefill_request_to_pb(request: PrefillRequest) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        envelope=envelope_to_pb(request.envelope),
        request_id=request.request_id,
        tokens=checks.tokens_raw(request.tokens),
        namespace=namespace_to_pb(request.namespace),
        first_page_wanted=request.first_page_wanted,
        sampling=sampling_to_pb(request.sampling),
        remaining_s=request.remaining_s,
        want_logits=request.want_logits,
        priority=request.priority,
        offered=None if request.offered is None else sealed_to_pb(request.offered),
    )


def prefill_request_from_pb(message: prefill_pb2.PrefillRequest) -> PrefillRequest:
    checks.present(message, "envelope", "sampling")
    checks.within("first_page_wanted", message.first_page_wanted, 0, checks.MAX_PAGES)
    return PrefillRequest(
        envelope=envelope_from_pb(message.envelope),
        request_id=RequestId(checks.name("request_id", message.request_id)),
        tokens=checks.tokens_from(message.tokens),
        namespace=namespace_from_pb(message.namespace),
        first_page_wanted=message.first_page_wanted,
        sampling=sampling_from_pb(message.sampling),
        remaining_s=checks.duration_s("remaining_s", message.remaining_s),
        want_logits=message.want_logits,
        priority=message.priority,
        offered=sealed_from_pb(message.offered) if message.HasField("offered") else None,
    )


def prefill_event_to_pb(event: PrefillEvent, envelope: Envelope) -> prefill_pb2.PrefillEvent:
    head = kept_envelope(envelope)
    match event:
        case Accepted():
            return prefill_pb2.PrefillEvent(envelope=head, accepted=accepted_to_pb(event))
        case PagesSealed():
            return prefill_pb2.PrefillEvent(envelope=head, sealed=sealed_to_pb(event))
        case PrefillDone():
            return prefill_pb2.PrefillEvent(envelope=head, done=_done_to_pb(event))


def prefill_event_from_pb(message: prefill_pb2.PrefillEvent) -> PrefillEvent:
    match message.WhichOneof("event"):
        case "accepted":
            return accepted_from_pb(message.accepted)
        case "sealed":
            return sealed_from_pb(message.sealed)
        case "done":
            return _done_from_pb(message.done)
        case _:
            raise ProtocolError("event is missing, or of a kind that is unknown here", field="event")


def lease_call_to_pb(call: LeaseCall) -> prefill_pb2.LeaseCall:
    return prefill_pb2.LeaseCall(envelope=envelope_to_pb(call.envelope), lease_id=call.lease_id)


def lease_call_from_pb(message: prefill_pb2.LeaseCall) -> LeaseCall:
    checks.present(message, "envelope")
    lease_id = LeaseId(checks.name("lease_id", message.lease_id))
    return LeaseCall(envelope_from_pb(message.envelope), lease_id)


def lease_reply_to_pb(envelope: Envelope, ttl_s: float) -> prefill_pb2.LeaseReply:
    return prefill_pb2.LeaseReply(envelope=envelope_to_pb(envelope), ttl_s=ttl_s)


def accepted_to_pb(accepted: Accepted) -> prefill_pb2.Accepted:
    cached = None if accepted.cached is None else sealed_to_pb(accepted.cached)
    return prefill_pb2.Accepted(lease_id=accepted.lease_id, ttl_s=accepted.ttl_s, cached=cached)


def accepted_from_pb(message: prefill_pb2.Accepted) -> Accepted:
    lease_id = LeaseId(checks.name("lease_id", message.lease_id))
    cached = sealed_from_pb(message.cached) if message.HasField("cached") else None
    return Accepted(lease_id, checks.duration_s("ttl_s", message.ttl_s), cached)


def sealed_to_pb(pages: PagesSealed) -> prefill_pb2.PagesSealed:
    return prefill_pb2.PagesSealed(
        first_index=pages.first_index,
        hashes=pages.hashes.raw,
        page_ids=checks.raw(pages.page_ids),
        generations=checks.raw(pages.generations),
        digests=checks.raw(pages.digests),
    )


def sealed_from_pb(message: prefill_pb2.PagesSealed) -> PagesSealed:
    hashes = PageHashes(message.hashes)
    count = len(hashes)
    checks.within("hashes", count, 1, checks.MAX_PAGES)
    checks.within("first_index", message.first_index, 0, checks.MAX_PAGES - count)
    page_ids = checks.raw_column("page_ids", message.page_ids, np.int32, count)
    if (lowest := int(page_ids.min())) <= SINK_PAGE:
        raise BoundsError("page_ids", lowest, "1 or more: page 0 is the write sink")
    return PagesSealed(
        first_index=message.first_index,
        hashes=hashes,
        page_ids=page_ids,
        generations=checks.raw_column("generations", message.generations, np.uint64, count),
        digests=checks.raw_column("digests", message.digests, np.uint64, 2 * count).reshape(count, 2),
    )


def _done_to_pb(done: PrefillDone) -> prefill_pb2.PrefillDone:
    account = done.account
    return prefill_pb2.PrefillDone(
        first_token=done.first_token,
        first_logprob=done.first_logprob,
        logits_digest=done.logits_digest,
        tail=None if done.tail is None else sealed_to_pb(done.tail),
        account=prefill_pb2.Account(
            prompt_tokens=account.prompt_tokens,
            recorded_tokens=account.recorded_tokens,
            rollback_tokens=account.rollback_tokens,
            resume_tokens=account.resume_tokens,
            eagle_rule=account.eagle_rule,
            pages=account.pages,
            last_page_hash=account.last_page_hash,
            tail_hash=account.tail_hash,
            indexer_types=account.indexer_types,
            draft_digest=account.draft_digest,
        ),
        chunk_starts=done.chunk_starts,
        prefill_s=done.prefill_s,
        draft=None if done.draft is None else _draft_to_pb(done.draft),
        pages_pulled_back=done.pages_pulled_back,
    )


def _done_from_pb(message: prefill_pb2.PrefillDone) -> PrefillDone:
    checks.present(message, "account")
    account = _account_from_pb(message.account)
    if math.isnan(message.first_logprob):
        raise BoundsError("first_logprob", message.first_logprob, "a number")
    tail = sealed_from_pb(message.tail) if message.HasField("tail") else None
    if tail is not None and len(tail.hashes) != 1:
        raise BoundsError("tail, bytes of its hash", len(tail.hashes.raw), HASH_BYTES)
    return PrefillDone(
        first_token=message.first_token,
        first_logprob=message.first_logprob,
        logits_digest=message.logits_digest,
        tail=tail,
        account=account,
        chunk_starts=checks.rising("chunk_starts", message.chunk_starts, account.prompt_tokens),
        prefill_s=checks.elapsed_s("prefill_s", message.prefill_s),
        draft=_draft_from_pb(message.draft) if message.HasField("draft") else None,
        pages_pulled_back=message.pages_pulled_back,
    )


def _draft_to_pb(draft: DraftHandoff) -> prefill_pb2.DraftHandoff:
    return prefill_pb2.DraftHandoff(
        hidden=draft.hidden.astype("<f4").tobytes(),
        tokens=draft.tokens.tolist(),
        probabilities=draft.probabilities.tolist(),
        index_seed=draft.index_seed.astype("<i4").tobytes(),
        logits_digest=draft.logits_digest,
    )


def _draft_from_pb(message: prefill_pb2.DraftHandoff) -> DraftHandoff:
    """What contract and draft head say of its lengths is the node's to check."""
    hidden = checks.words("draft.hidden", message.hidden, "<f4", MAX_HIDDEN).astype(np.float32)
    if not np.isfinite(hidden).all():
        raise ProtocolError("draft.hidden holds values that are not finite", field="draft.hidden")
    checks.within("draft.tokens, entries", len(message.tokens), 1, MAX_DRAFT_TOPK)
    for probability in message.probabilities:
        checks.within("draft.probabilities", probability, 0.0, 1.0)
    seed = checks.words("draft.index_seed", message.index_seed, "<i4", MAX_INDEX_SEED).astype(np.int32)
    if seed.size:
        checks.within("draft.index_seed", int(seed.min()), -1, checks.MAX_TOKENS)
        checks.within("draft.index_seed", int(seed.max()), -1, checks.MAX_TOKENS)
    return DraftHandoff(
        hidden=hidden,
        tokens=np.array(message.tokens, np.uint32),
        probabilities=checks.column("draft.probabilities", message.probabilities, np.float32, len(message.tokens)),
        index_seed=seed,
        logits_digest=message.logits_digest,
    )


def _account_from_pb(message: prefill_pb2.Account) -> Account:
    checks.within("account.prompt_tokens", message.prompt_tokens, 1, checks.MAX_TOKENS)
    checks.within("account.recorded_tokens", message.recorded_tokens, 0, message.prompt_tokens)
    checks.within("account.resume_tokens", message.resume_tokens, 0, message.prompt_tokens)
    checks.within("account.rollback_tokens", message.rollback_tokens, 0, checks.MAX_TOKENS)
    checks.within("account.pages", message.pages, 1, checks.MAX_PAGES)
    checks.bounded("account.indexer_types", message.indexer_types)
    return Account(
        prompt_tokens=message.prompt_tokens,
        recorded_tokens=message.recorded_tokens,
        rollback_tokens=message.rollback_tokens,
        resume_tokens=message.resume_tokens,
        eagle_rule=checks.one_of("account.eagle_rule", message.eagle_rule, EAGLE_RULES),
        pages=message.pages,
        last_page_hash=checks.optional_hash("account.last_page_hash", message.last_page_hash),
        tail_hash=checks.optional_hash("account.tail_hash", message.tail_hash),
        indexer_types=tuple(
            checks.one_of("account.indexer_types", kind, INDEXER_TYPES) for kind in message.indexer_types
        ),
        draft_digest=message.draft_digest,
    )
