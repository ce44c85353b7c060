"""Generate requests and the token stream.

Guarantees: an address in a request is host:port and nothing that a resolver would take for another scheme.
"""

from __future__ import annotations

import dataclasses
import math

from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import RequestId
from pdkv.node.messages import (
    FailurePolicy,
    GenerateDone,
    GenerateEvent,
    GenerateRequest,
    Shipment,
    Speculation,
    Token,
)
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import namespace_from_pb, namespace_to_pb, sampling_from_pb, sampling_to_pb
from pdkv.v1 import decode_pb2

FINISH_REASONS = ("length", "stop")
FAILURE_POLICIES = tuple(policy.value for policy in FailurePolicy)


def generate_request_to_pb(request: GenerateRequest) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=request.request_id,
        tokens=checks.tokens_raw(request.tokens),
        sampling=sampling_to_pb(request.sampling),
        namespace=namespace_to_pb(request.namespace),
        prefill_address=request.prefill_address,
        remaining_s=checks.duration_s("remaining_s", request.remaining_s),
        want_logits=request.want_logits,
        fault=request.fault,
        priority=request.priority,
        on_failure=request.on_failure or "",
        prefill_alternates=request.prefill_alternates,
    )


def generate_request_from_pb(message: decode_pb2.GenerateRequest) -> GenerateRequest:
    checks.present(message, "sampling")
    if message.prefill_address:
        checks.matching("prefill_address", message.prefill_address, checks.ADDRESS)
    checks.bounded("prefill_alternates", message.prefill_alternates)
    return GenerateRequest(
        request_id=RequestId(checks.name("request_id", message.request_id)),
        tokens=checks.tokens_from(message.tokens),
        sampling=sampling_from_pb(message.sampling),
        namespace=namespace_from_pb(message.namespace),
        prefill_address=message.prefill_address,
        remaining_s=checks.duration_s("remaining_s", message.remaining_s),
        want_logits=message.want_logits,
        fault=checks.text("fault", message.fault, most=checks.MAX_NAME),
        priority=message.priority,
        on_failure=_policy_from_pb(message.on_failure),
        prefill_alternates=tuple(
            checks.matching("prefill_alternates", address, checks.ADDRESS) for address in message.prefill_alternates
        ),
    )


def _policy_from_pb(name: str) -> FailurePolicy | None:
    return FailurePolicy(checks.one_of("on_failure", name, FAILURE_POLICIES)) if name else None


def finish_call_to_pb(request: RequestId, output_tokens: int) -> decode_pb2.FinishCall:
    return decode_pb2.FinishCall(request_id=request, output_tokens=output_tokens)


def finish_call_from_pb(message: decode_pb2.FinishCall) -> tuple[RequestId, int]:
    checks.within("output_tokens", message.output_tokens, 1, checks.MAX_TOKENS)
    return RequestId(checks.name("request_id", message.request_id)), message.output_tokens


def generate_event_to_pb(event: GenerateEvent) -> decode_pb2.GenerateEvent:
    match event:
        case Token():
            return decode_pb2.GenerateEvent(token=decode_pb2.Token(**dataclasses.asdict(event)))
        case GenerateDone():
            return decode_pb2.GenerateEvent(done=decode_pb2.GenerateDone(**dataclasses.asdict(event)))


def generate_event_from_pb(message: decode_pb2.GenerateEvent) -> GenerateEvent:
    match message.WhichOneof("event"):
        case "token":
            token = message.token
            if math.isnan(token.logprob):
                raise BoundsError("logprob", token.logprob, "a number")
            checks.bounded("draft_digests", token.draft_digests)
            digests, instead = tuple(token.draft_digests), checks.text("instead", token.instead, most=checks.MAX_NAME)
            return Token(token.index, token.token, token.logprob, token.logits_digest, digests, instead)
        case "done":
            done = message.done
            checks.present(done, "shipment")
            return GenerateDone(
                finish_reason=checks.one_of("finish_reason", done.finish_reason, FINISH_REASONS),
                output_tokens=done.output_tokens,
                shipment=_shipment_from_pb(done.shipment),
                chunk_starts=checks.rising("chunk_starts", done.chunk_starts, checks.MAX_TOKENS),
                speculation=_speculation_from_pb(done.speculation) if done.HasField("speculation") else None,
                preemptions=done.preemptions,
                retries=done.retries,
                recomputed_tokens=done.recomputed_tokens,
            )
        case _:
            raise ProtocolError("event is missing, or of a kind that is unknown here", field="event")


def _shipment_from_pb(message: decode_pb2.Shipment) -> Shipment:
    values = {f.name: getattr(message, f.name) for f in dataclasses.fields(Shipment)}
    for name, value in values.items():
        if name.endswith("_s"):
            checks.elapsed_s(f"shipment.{name}", value)
        elif isinstance(value, str):
            checks.text(f"shipment.{name}", value, most=checks.MAX_NAME)
    return Shipment(**values)


def _speculation_from_pb(message: decode_pb2.Speculation) -> Speculation:
    checks.within("speculation.accepted", message.accepted, 0, message.drafted)
    checks.within("speculation.drafted", message.drafted, message.steps, 2**64 - 1)
    return Speculation(
        steps=message.steps,
        drafted=message.drafted,
        accepted=message.accepted,
        rolled_back_tokens=message.rolled_back_tokens,
        canary=checks.text("speculation.canary", message.canary),
    )
