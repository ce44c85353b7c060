"""Envelopes, sampling, contracts and states there and back."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from pdkv.contract import RULES
from pdkv.errors import BoundsError, ProtocolError, WrongIncarnation
from pdkv.node.messages import Envelope, Namespace, Sampling
from pdkv.rpc.convert import common
from pdkv.v1 import common_pb2, contract_pb2
from tests.rpc import samples


@given(samples.envelopes)
def test_envelope(envelope: Envelope) -> None:
    assert common.envelope_from_pb(common.envelope_to_pb(envelope)) == envelope
    common.require_reply(envelope, common.envelope_to_pb(common.reply_envelope(envelope)))


@given(samples.samplings)
def test_sampling(sampling: Sampling) -> None:
    assert common.sampling_from_pb(common.sampling_to_pb(sampling)) == sampling


@given(samples.namespaces)
def test_namespace(namespace: Namespace) -> None:
    assert common.namespace_from_pb(common.namespace_to_pb(namespace)) == namespace


def test_state() -> None:
    state = samples.status("prefill")
    assert common.status_from_pb(common.status_to_pb(state)) == state


def test_a_state_can_be_sent_however_much_a_part_of_it_has_to_say() -> None:
    """Words of errors, of any length: an operator asks for the state because of them."""
    words = "no end within the deadline\n" * 1000
    said = dict.fromkeys(("unready", "fence_error"), words)
    told = {key: {"d0#1": words} for key in ("quarantine", "unsettled", "memory", "rails", "discovery")}
    sent = common.status_to_pb(dataclasses.replace(samples.status("decode"), **said, **told))  # type: ignore[arg-type]
    got = common.status_from_pb(sent)
    assert all(getattr(got, name).startswith("no end") for name in said)
    assert all(getattr(got, name)["d0#1"].startswith("no end") for name in told)


def test_contract_has_the_same_fields_on_the_wire() -> None:
    assert [f.name for f in contract_pb2.Contract.DESCRIPTOR.fields] == list(RULES)
    mine = samples.contract()
    there = contract_pb2.Contract.FromString(common.contract_to_pb(mine).SerializeToString())
    assert common.contract_from_pb(there) == mine
    assert common.contract_from_pb(there).fingerprint == mine.fingerprint


def test_an_empty_contract_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"contract\.topology"):
        common.contract_from_pb(contract_pb2.Contract())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sender": None}, "sender"),
        ({"receiver": None}, "receiver"),
        ({"sender": common_pb2.PeerName(node="a#b", incarnation="a" * 32)}, "node"),
        ({"sender": common_pb2.PeerName(node="", incarnation="a" * 32)}, "node"),
        ({"sender": common_pb2.PeerName(node="a", incarnation="a" * 31)}, "incarnation"),
        ({"content_fingerprint": b"f" * 31}, "content_fingerprint"),
    ],
)
def test_envelope_of_a_peer_is_checked(changes: dict[str, Any], field: str) -> None:
    message = common.envelope_to_pb(samples.ENVELOPE)
    for name, value in changes.items():
        message.ClearField(name)
        if isinstance(value, bytes):
            setattr(message, name, value)
        elif value is not None:
            getattr(message, name).CopyFrom(value)
    with pytest.raises((ProtocolError, BoundsError), match=rf"^{field}"):
        common.envelope_from_pb(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**32 - 1),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("stop_tokens", [1] * 257),
    ],
)
def test_sampling_of_a_peer_is_checked(field: str, value: Any) -> None:
    facts: dict[str, Any] = {**dataclasses.asdict(Sampling()), field: value}
    with pytest.raises(BoundsError, match=rf"^sampling\.{field}"):
        common.sampling_from_pb(common_pb2.Sampling(**facts))


def test_a_seed_that_cannot_travel_is_refused() -> None:
    with pytest.raises(BoundsError, match=r"sampling\.seed"):
        common.sampling_to_pb(Sampling(seed=-1))


def test_a_reply_of_another_life_is_refused() -> None:
    other = common.envelope_to_pb(common.reply_envelope(samples.ENVELOPE))
    other.sender.incarnation = "c" * 32
    with pytest.raises(WrongIncarnation, match="prefill-0#cccc"):
        common.require_reply(samples.ENVELOPE, other)
