"""Generate requests and token streams there and back, and what is refused of them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, PdkvError, ProtocolError
from pdkv.node.messages import GenerateEvent, GenerateRequest
from pdkv.rpc.convert import generate
from pdkv.v1 import decode_pb2
from tests.rpc import samples


@given(samples.generate_requests)
def test_request(request: GenerateRequest) -> None:
    wire = generate.generate_request_to_pb(request).SerializeToString()
    back = generate.generate_request_from_pb(decode_pb2.GenerateRequest.FromString(wire))
    assert samples.same(back, request)


@given(samples.generate_requests, st.integers(1, 1 << 20))
def test_that_an_answer_is_enough(request: GenerateRequest, tokens: int) -> None:
    wire = generate.finish_call_to_pb(request.request_id, tokens).SerializeToString()
    back = generate.finish_call_from_pb(decode_pb2.FinishCall.FromString(wire))
    assert back == (request.request_id, tokens)


def test_enough_of_nothing_and_of_nobody_are_refused() -> None:
    with pytest.raises(BoundsError, match="output_tokens: 0; allowed: 1 to"):
        generate.finish_call_from_pb(decode_pb2.FinishCall(request_id="a"))
    with pytest.raises(PdkvError, match="request_id"):
        generate.finish_call_from_pb(decode_pb2.FinishCall(output_tokens=1))


@given(st.one_of(samples.tokens, samples.generate_dones))
def test_event(event: GenerateEvent) -> None:
    wire = generate.generate_event_to_pb(event).SerializeToString()
    assert generate.generate_event_from_pb(decode_pb2.GenerateEvent.FromString(wire)) == event


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.ClearField("sampling"), "sampling"),
        (lambda r: setattr(r, "request_id", "a\nb"), "request_id"),
        (lambda r: setattr(r, "tokens", b""), "tokens"),
        (lambda r: setattr(r, "remaining_s", -1.0), "remaining_s"),
        (lambda r: setattr(r, "prefill_address", "unix:/run/x"), "prefill_address"),
        (lambda r: setattr(r, "prefill_address", "a"), "prefill_address"),
        (lambda r: setattr(r, "fault", "x" * 257), "fault"),
    ],
)
def test_a_clients_request_is_checked(change: Callable[[decode_pb2.GenerateRequest], object], named: str) -> None:
    message = generate.generate_request_to_pb(samples.generate_request())
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        generate.generate_request_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.ClearField("done"), "event"),
        (lambda m: m.done.ClearField("shipment"), "shipment"),
        (lambda m: setattr(m.done, "finish_reason", "whim"), "finish_reason"),
        (lambda m: setattr(m.done.shipment, "ttft_s", float("nan")), r"shipment\.ttft_s"),
        (lambda m: m.done.chunk_starts.append(0), "chunk_starts"),
        (lambda m: m.token.CopyFrom(decode_pb2.Token(logprob=float("nan"))), "logprob"),
        (lambda m: m.token.draft_digests.extend(range(4097)), "draft_digests"),
        (lambda m: setattr(m.token, "instead", "a\nb"), "instead"),
        (lambda m: setattr(m.done.speculation, "accepted", 1), r"speculation\.accepted"),
        (lambda m: setattr(m.done.speculation, "steps", 1), r"speculation\.drafted"),
        (lambda m: setattr(m.done.speculation, "canary", "a\nb"), r"speculation\.canary"),
    ],
)
def test_a_nodes_event_is_checked(change: Callable[[decode_pb2.GenerateEvent], object], named: str) -> None:
    message = generate.generate_event_to_pb(samples.GENERATE_DONE)
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        generate.generate_event_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)
