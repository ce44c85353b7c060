"""Prefill requests, events and lease calls there and back, and what is refused of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, PdkvError, ProtocolError
from pdkv.node.messages import Accepted, PrefillEvent, PrefillRequest
from pdkv.rpc.convert import common, prefill
from pdkv.v1 import prefill_pb2
from tests.rpc import samples


@given(samples.prefill_requests)
def test_request(request: PrefillRequest) -> None:
    wire = prefill.prefill_request_to_pb(request).SerializeToString()
    back = prefill.prefill_request_from_pb(prefill_pb2.PrefillRequest.FromString(wire))
    assert samples.same(back, request)


accepted = st.builds(Accepted, st.just(samples.ACCEPTED.lease_id), st.just(30.0), st.none() | samples.sealed)


@given(st.one_of(samples.sealed, samples.dones, accepted))
def test_event(event: PrefillEvent) -> None:
    wire = prefill.prefill_event_to_pb(event, samples.ENVELOPE).SerializeToString()
    message = prefill_pb2.PrefillEvent.FromString(wire)
    assert samples.same(prefill.prefill_event_from_pb(message), event)
    assert common.envelope_from_pb(message.envelope) == samples.ENVELOPE


def test_lease_call() -> None:
    assert prefill.lease_call_from_pb(prefill.lease_call_to_pb(samples.LEASE_CALL)) == samples.LEASE_CALL


def test_columns_stay_small_on_the_wire() -> None:
    """60 bytes a page (hash, generation, two digests, id) and no sub-message a page."""
    message = prefill.prefill_event_to_pb(samples.pages(16384), samples.ENVELOPE)
    assert 0 < message.ByteSize() - 16384 * (32 + 8 + 16 + 4) < 300


Change = Callable[[prefill_pb2.PrefillEvent], object]


def _fill(column: object, values: list[int]) -> None:
    column[:] = values  # type: ignore[index]


def _cached(pages: prefill_pb2.PagesSealed) -> prefill_pb2.Accepted:
    return prefill_pb2.Accepted(lease_id="l", ttl_s=1.0, cached=pages)


def _longer(name: str) -> Callable[[prefill_pb2.PagesSealed], None]:
    return lambda pages: setattr(pages, name, getattr(pages, name) + bytes(4))


def _ids(*ids: int) -> Callable[[prefill_pb2.PagesSealed], None]:
    return lambda pages: setattr(pages, "page_ids", np.array(ids, "<i4").tobytes())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.sealed, "hashes", m.sealed.hashes[:-1]), "page hashes"),
        (lambda m: setattr(m.sealed, "hashes", b""), "hashes"),
        (lambda m: _longer("page_ids")(m.sealed), "page_ids"),
        (lambda m: _longer("generations")(m.sealed), "generations"),
        (lambda m: _longer("digests")(m.sealed), "digests"),
        (lambda m: _ids(1, 2, 0)(m.sealed), "page_ids"),
        (lambda m: _ids(1, 2, -3)(m.sealed), "page_ids"),
        (lambda m: setattr(m.sealed, "first_index", 1 << 20), "first_index"),
        (lambda m: m.ClearField("sealed"), "event"),
        (lambda m: m.accepted.CopyFrom(prefill_pb2.Accepted(ttl_s=1.0)), "lease_id"),
        (lambda m: m.accepted.CopyFrom(prefill_pb2.Accepted(lease_id="l")), "ttl_s"),
        (lambda m: m.accepted.CopyFrom(_cached(prefill_pb2.PagesSealed(hashes=bytes(33)))), "page hashes"),
        (lambda m: m.done.CopyFrom(prefill_pb2.PrefillDone()), "account"),
    ],
)
def test_a_peers_event_is_checked(change: Change, named: str) -> None:
    message = prefill.prefill_event_to_pb(samples.pages(3), samples.ENVELOPE)
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        prefill.prefill_event_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: setattr(d, "first_logprob", float("nan")), "first_logprob"),
        (lambda d: setattr(d, "prefill_s", float("inf")), "prefill_s"),
        (lambda d: _fill(d.chunk_starts, [64, 0]), "chunk_starts"),
        (lambda d: _fill(d.chunk_starts, [0, 200]), "chunk_starts"),
        (lambda d: setattr(d.tail, "hashes", d.tail.hashes * 2), "page_ids"),
        (lambda d: setattr(d.account, "eagle_rule", "other"), r"account\.eagle_rule"),
        (lambda d: setattr(d.account, "tail_hash", b"short"), r"account\.tail_hash"),
        (lambda d: setattr(d.account, "last_page_hash", b"short"), r"account\.last_page_hash"),
        (lambda d: setattr(d.account, "recorded_tokens", 201), r"account\.recorded_tokens"),
        (lambda d: setattr(d.account, "resume_tokens", 201), r"account\.resume_tokens"),
        (lambda d: setattr(d.account, "prompt_tokens", 0), r"account\.prompt_tokens"),
        (lambda d: setattr(d.account, "pages", 0), r"account\.pages"),
        (lambda d: d.account.indexer_types.append("half"), r"account\.indexer_types"),
    ],
)
def test_a_peers_end_of_prefill_is_checked(change: Callable[[prefill_pb2.PrefillDone], object], named: str) -> None:
    message = prefill.prefill_event_to_pb(samples.prefill_done(samples.pages(1, 3)), samples.ENVELOPE)
    change(message.done)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        prefill.prefill_event_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


def test_a_tail_is_one_page() -> None:
    message = prefill.prefill_event_to_pb(samples.prefill_done(samples.pages(2, 3)), samples.ENVELOPE)
    with pytest.raises(BoundsError, match="tail"):
        prefill.prefill_event_from_pb(message)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.ClearField("envelope"), "envelope"),
        (lambda r: r.ClearField("sampling"), "sampling"),
        (lambda r: setattr(r, "request_id", ""), "request_id"),
        (lambda r: setattr(r, "request_id", "x" * 257), "request_id"),
        (lambda r: setattr(r, "tokens", b""), "tokens"),
        (lambda r: setattr(r, "tokens", b"123"), "tokens"),
        (lambda r: setattr(r, "first_page_wanted", 2**32 - 1), "first_page_wanted"),
        (lambda r: setattr(r, "remaining_s", 0.0), "remaining_s"),
        (lambda r: setattr(r, "remaining_s", float("nan")), "remaining_s"),
        (lambda r: setattr(r.namespace, "extra_key", "x" * 1025), r"namespace\.extra_key"),
    ],
)
def test_a_peers_request_is_checked(change: Callable[[prefill_pb2.PrefillRequest], object], named: str) -> None:
    message = prefill.prefill_request_to_pb(samples.prefill_request())
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        prefill.prefill_request_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: setattr(o, "hashes", b""), "hashes"),
        (_ids(1, 2, 0), "page_ids"),
        (_longer("generations"), "generations"),
        (_longer("digests"), "digests"),
    ],
)
def test_a_callers_offer_is_checked(change: Callable[[prefill_pb2.PagesSealed], object], named: str) -> None:
    message = prefill.prefill_request_to_pb(replace(samples.prefill_request(), offered=samples.pages(3)))
    change(message.offered)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        prefill.prefill_request_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: setattr(d, "hidden", d.hidden[:-1]), r"draft\.hidden, bytes"),
        (lambda d: setattr(d, "hidden", b"\0" * 4 * (prefill.MAX_HIDDEN + 1)), r"draft\.hidden, values"),
        (lambda d: setattr(d, "hidden", b"\xff" * 8), r"draft\.hidden holds"),
        (lambda d: _fill(d.tokens, []), r"draft\.tokens"),
        (lambda d: _fill(d.tokens, list(range(65))), r"draft\.tokens"),
        (lambda d: _fill(d.tokens, [1, 2, 3]), r"draft\.probabilities"),
        (lambda d: _fill(d.probabilities, [0.5, 1.5]), r"draft\.probabilities"),
        (lambda d: _fill(d.probabilities, [0.5, float("nan")]), r"draft\.probabilities"),
        (lambda d: setattr(d, "index_seed", d.index_seed[:-2]), r"draft\.index_seed, bytes"),
        (lambda d: setattr(d, "index_seed", np.array([-2], "<i4").tobytes()), r"draft\.index_seed"),
        (lambda d: setattr(d, "index_seed", np.array([1 << 30], "<i4").tobytes()), r"draft\.index_seed"),
    ],
)
def test_a_peers_draft_is_checked(change: Callable[[prefill_pb2.DraftHandoff], object], named: str) -> None:
    done = replace(samples.prefill_done(), draft=samples.handoff())
    message = prefill.prefill_event_to_pb(done, samples.ENVELOPE)
    change(message.done.draft)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        prefill.prefill_event_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)
