"""What the services share: peers, envelopes, namespaces, sampling, the state of a node.

Guarantees: a reply's envelope is compared with the request's, so that nothing of another life of a peer is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

from google.protobuf import json_format

from pdkv.contract import Contract
from pdkv.errors import BoundsError, WrongIncarnation
from pdkv.ids import Incarnation, NodeId, PeerName
from pdkv.node.messages import Envelope, LeaseStatus, Namespace, NodeStatus, PeerStatus, Sampling
from pdkv.rpc.convert import checks
from pdkv.v1 import common_pb2, contract_pb2

MAX_SEED = 2**64 - 1
MAX_STOP_TOKENS = 256
MAX_TEMPERATURE = 100.0


def peer_to_pb(name: PeerName) -> common_pb2.PeerName:
    return common_pb2.PeerName(node=name.node, incarnation=name.incarnation)


def peer_from_pb(message: common_pb2.PeerName) -> PeerName:
    return PeerName(
        NodeId(checks.matching("node", message.node, checks.NODE_NAME)),
        Incarnation(checks.matching("incarnation", message.incarnation, checks.INCARNATION)),
    )


def envelope_to_pb(envelope: Envelope) -> common_pb2.Envelope:
    return common_pb2.Envelope(
        sender=peer_to_pb(envelope.sender),
        receiver=peer_to_pb(envelope.receiver),
        content_fingerprint=envelope.content_fingerprint,
    )


@lru_cache(maxsize=256)
def kept_envelope(envelope: Envelope) -> common_pb2.Envelope:
    """`envelope_to_pb` of what two nodes say in every message of a stream: to be copied or compared, never changed."""
    return envelope_to_pb(envelope)


def envelope_from_pb(message: common_pb2.Envelope) -> Envelope:
    checks.present(message, "sender", "receiver")
    fingerprint = checks.sized("content_fingerprint", message.content_fingerprint, 32)
    return Envelope(peer_from_pb(message.sender), peer_from_pb(message.receiver), fingerprint)


def reply_envelope(request: Envelope) -> Envelope:
    return Envelope(request.receiver, request.sender, request.content_fingerprint)


def require_reply(request: Envelope, reply: common_pb2.Envelope) -> None:
    """Raises `WrongIncarnation` unless `reply` goes the way back of `request`."""
    due = reply_envelope(request)
    if reply == kept_envelope(due):
        return
    have = envelope_from_pb(reply)
    if have != due:
        raise WrongIncarnation(
            f"a reply from {have.sender} to {have.receiver}; due from {due.sender} to {due.receiver}",
            have=have.sender,
            due=due.sender,
        )


def namespace_to_pb(namespace: Namespace) -> common_pb2.Namespace:
    return common_pb2.Namespace(extra_key=namespace.extra_key, cache_salt=namespace.cache_salt)


def namespace_from_pb(message: common_pb2.Namespace) -> Namespace:
    """Unset means the empty namespace."""
    for field, value in (("extra_key", message.extra_key), ("cache_salt", message.cache_salt)):
        checks.within(f"namespace.{field}, characters", len(value), 0, checks.MAX_TEXT)
    return Namespace(message.extra_key, message.cache_salt)


def sampling_to_pb(sampling: Sampling) -> common_pb2.Sampling:
    checks.within("sampling.seed", sampling.seed, 0, MAX_SEED)
    checks.within("sampling.max_tokens", sampling.max_tokens, 1, checks.MAX_TOKENS)
    for token in sampling.stop_tokens:
        checks.within("sampling.stop_tokens", token, 0, 2**32 - 1)
    return common_pb2.Sampling(**dataclasses.asdict(sampling))


def sampling_from_pb(message: common_pb2.Sampling) -> Sampling:
    checks.within("sampling.max_tokens", message.max_tokens, 1, checks.MAX_TOKENS)
    checks.within("sampling.temperature", message.temperature, 0.0, MAX_TEMPERATURE)
    checks.within("sampling.top_p", message.top_p, 0.0, 1.0)
    if message.top_p == 0.0:
        raise BoundsError("sampling.top_p", 0.0, "above 0")
    checks.bounded("sampling.stop_tokens", message.stop_tokens, MAX_STOP_TOKENS)
    return Sampling(message.max_tokens, message.temperature, message.top_p, message.seed, tuple(message.stop_tokens))


def contract_to_pb(contract: Contract) -> contract_pb2.Contract:
    return json_format.ParseDict(contract.to_dict(), contract_pb2.Contract())


def contract_from_pb(message: contract_pb2.Contract) -> Contract:
    return Contract.from_dict(
        json_format.MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def status_to_pb(status: NodeStatus) -> common_pb2.NodeStatus:
    return common_pb2.NodeStatus(
        name=peer_to_pb(status.name),
        role=status.role,
        pages=status.pages,
        leases=status.leases,
        requests=status.requests,
        backend=status.backend,
        peers={name: _peer_status_to_pb(peer) for name, peer in status.peers.items()},
        contract=contract_to_pb(status.contract),
        quarantine={of: checks.cut(why) for of, why in status.quarantine.items()},
        queued=status.queued,
        preemptions=status.preemptions,
        workspace=status.workspace,
        unready=checks.cut(status.unready),
        draining=status.draining,
        held_leases={i: common_pb2.LeaseStatus(**dataclasses.asdict(lease)) for i, lease in status.held_leases.items()},
        unsettled={peer: checks.cut(words) for peer, words in status.unsettled.items()},
        fences=status.fences,
        fence_error=checks.cut(status.fence_error),
        borrowed_pages=status.borrowed_pages,
        borrow_failures=status.borrow_failures,
        memory={key: checks.cut(words) for key, words in status.memory.items()},
        rails={device: checks.cut(words) for device, words in status.rails.items()},
        claims=status.claims,
        waiting_tokens=status.waiting_tokens,
        available_pages=status.available_pages,
        uses=status.uses,
        totals=status.totals,
        discovery={place: checks.cut(words) for place, words in status.discovery.items()},
    )


def status_from_pb(message: common_pb2.NodeStatus) -> NodeStatus:
    checks.present(message, "name", "contract")
    checks.bounded("pages", message.pages)
    checks.bounded("peers", message.peers)
    checks.bounded("workspace", message.workspace)
    checks.bounded("held_leases", message.held_leases)
    checks.bounded("borrow_failures", message.borrow_failures)
    checks.bounded("claims", message.claims)
    return NodeStatus(
        name=peer_from_pb(message.name),
        role=checks.name("role", message.role),
        pages={checks.name("pages", key): count for key, count in message.pages.items()},
        leases=message.leases,
        requests=message.requests,
        backend=checks.text("backend", message.backend),
        peers={checks.name("peers", name): _peer_status_from_pb(peer) for name, peer in message.peers.items()},
        contract=contract_from_pb(message.contract),
        quarantine=texts("quarantine", message.quarantine),
        queued=message.queued,
        preemptions=message.preemptions,
        workspace={checks.name("workspace", key): count for key, count in message.workspace.items()},
        unready=checks.text("unready", message.unready),
        draining=message.draining,
        held_leases={checks.name("held_leases", i): _lease_from_pb(v) for i, v in message.held_leases.items()},
        unsettled=texts("unsettled", message.unsettled),
        fences=message.fences,
        fence_error=checks.text("fence_error", message.fence_error),
        borrowed_pages=message.borrowed_pages,
        borrow_failures={checks.name("borrow_failures", k): n for k, n in message.borrow_failures.items()},
        memory=texts("memory", message.memory),
        rails=texts("rails", message.rails),
        claims={checks.name("claims", key): count for key, count in message.claims.items()},
        waiting_tokens=message.waiting_tokens,
        available_pages=message.available_pages,
        uses=counts("uses", message.uses),
        totals=counts("totals", message.totals),
        discovery=texts("discovery", message.discovery),
    )


def _peer_status_to_pb(peer: PeerStatus) -> common_pb2.PeerStatus:
    return common_pb2.PeerStatus(state=peer.state, since_s=peer.since_s, lane=peer.lane, error=checks.cut(peer.error))


def _peer_status_from_pb(message: common_pb2.PeerStatus) -> PeerStatus:
    state, lane = checks.name("state", message.state), checks.text("lane", message.lane)
    return PeerStatus(state, message.since_s, lane, checks.text("error", message.error))


def _lease_from_pb(message: common_pb2.LeaseStatus) -> LeaseStatus:
    return LeaseStatus(checks.name("peer", message.peer), message.left_s, message.computing)


def counts(field: str, values: Mapping[str, int]) -> dict[str, int]:
    checks.bounded(field, values)
    return {checks.name(field, key): count for key, count in values.items()}


def texts(field: str, values: Mapping[str, str]) -> dict[str, str]:
    checks.bounded(field, values)
    for key, value in values.items():
        checks.within(f"{field}, characters of an entry", len(key) + len(value), 1, 8 * checks.MAX_TEXT)
    return dict(values)
