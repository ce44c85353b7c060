"""What is said to a node as a source of pages.

Guarantees: a column of hashes has whole hashes, as many as a prompt may have pages; a loan's pages are columns as those
of a prefill node.
"""

from __future__ import annotations

from pdkv.ids import PageHashes
from pdkv.node.messages import Envelope, LendCall, Loan, LocateCall
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import envelope_from_pb, envelope_to_pb
from pdkv.rpc.convert.prefill import accepted_from_pb, accepted_to_pb, sealed_from_pb, sealed_to_pb
from pdkv.v1 import source_pb2


def locate_call_to_pb(call: LocateCall) -> source_pb2.LocateCall:
    return source_pb2.LocateCall(envelope=envelope_to_pb(call.envelope), hashes=call.hashes.raw)


def locate_call_from_pb(message: source_pb2.LocateCall) -> LocateCall:
    checks.present(message, "envelope")
    return LocateCall(envelope_from_pb(message.envelope), _hashes(message.hashes))


def locate_reply_to_pb(envelope: Envelope, pages: int) -> source_pb2.LocateReply:
    return source_pb2.LocateReply(envelope=envelope_to_pb(envelope), pages=pages)


def located_from_pb(message: source_pb2.LocateReply, asked: int) -> int:
    """At most as many as were `asked` for."""
    checks.within("pages", message.pages, 0, asked)
    return message.pages


def lend_call_to_pb(call: LendCall) -> source_pb2.LendCall:
    return source_pb2.LendCall(
        envelope=envelope_to_pb(call.envelope), hashes=call.hashes.raw, first_page_wanted=call.first_page_wanted
    )


def lend_call_from_pb(message: source_pb2.LendCall) -> LendCall:
    checks.present(message, "envelope")
    hashes = _hashes(message.hashes)
    checks.within("first_page_wanted", message.first_page_wanted, 0, len(hashes) - 1)
    return LendCall(envelope_from_pb(message.envelope), hashes, message.first_page_wanted)


def loan_to_pb(loan: Loan, envelope: Envelope) -> source_pb2.Loan:
    return source_pb2.Loan(
        envelope=envelope_to_pb(envelope), lease=accepted_to_pb(loan.lease), pages=sealed_to_pb(loan.pages)
    )


def loan_from_pb(message: source_pb2.Loan) -> Loan:
    checks.present(message, "lease", "pages")
    return Loan(accepted_from_pb(message.lease), sealed_from_pb(message.pages))


def _hashes(raw: bytes) -> PageHashes:
    hashes = PageHashes(raw)
    checks.within("hashes", len(hashes), 1, checks.MAX_PAGES)
    return hashes
