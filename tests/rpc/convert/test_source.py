"""What is said to a source of pages, there and back, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, PdkvError, ProtocolError
from pdkv.node.messages import Accepted, Envelope, LendCall, Loan, LocateCall, PagesSealed
from pdkv.rpc.convert import common, source
from pdkv.v1 import source_pb2
from tests.rpc import samples


@given(samples.envelopes, samples.sealed)
def test_locate(envelope: Envelope, pages: PagesSealed) -> None:
    call = LocateCall(envelope, pages.hashes)
    wire = source.locate_call_to_pb(call).SerializeToString()
    assert source.locate_call_from_pb(source_pb2.LocateCall.FromString(wire)) == call
    reply = source.locate_reply_to_pb(envelope, len(pages.hashes))
    assert source.located_from_pb(reply, len(pages.hashes)) == len(pages.hashes)
    with pytest.raises(BoundsError, match="pages"):
        source.located_from_pb(reply, len(pages.hashes) - 1)


@given(samples.envelopes, samples.sealed, st.data())
def test_lend(envelope: Envelope, pages: PagesSealed, data: st.DataObject) -> None:
    call = LendCall(envelope, pages.hashes, data.draw(st.integers(0, len(pages.hashes) - 1)))
    wire = source.lend_call_to_pb(call).SerializeToString()
    assert source.lend_call_from_pb(source_pb2.LendCall.FromString(wire)) == call


@given(samples.sealed)
def test_loan(pages: PagesSealed) -> None:
    loan = Loan(Accepted(samples.LOAN.lease.lease_id, 30.0), pages)
    message = source_pb2.Loan.FromString(source.loan_to_pb(loan, samples.ENVELOPE).SerializeToString())
    assert samples.same(source.loan_from_pb(message), loan)
    assert common.envelope_from_pb(message.envelope) == samples.ENVELOPE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.ClearField("envelope"), "envelope"),
        (lambda m: setattr(m, "hashes", b""), "hashes"),
        (lambda m: setattr(m, "hashes", bytes(33)), "page hashes"),
        (lambda m: setattr(m, "first_page_wanted", 3), "first_page_wanted"),
    ],
)
def test_a_peers_call_is_checked(change: Callable[[source_pb2.LendCall], object], named: str) -> None:
    message = source.lend_call_to_pb(samples.LEND_CALL)
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        source.lend_call_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.ClearField("lease"), "lease"),
        (lambda m: m.ClearField("pages"), "pages"),
        (lambda m: setattr(m.lease, "ttl_s", 0.0), "ttl_s"),
        (lambda m: setattr(m.lease, "lease_id", ""), "lease_id"),
        (lambda m: setattr(m.pages, "hashes", bytes(32)), "page_ids"),
    ],
)
def test_a_peers_loan_is_checked(change: Callable[[source_pb2.Loan], object], named: str) -> None:
    message = source.loan_to_pb(samples.LOAN, samples.ENVELOPE)
    change(message)
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        source.loan_from_pb(message)
    assert isinstance(caught.value, ProtocolError | BoundsError)
