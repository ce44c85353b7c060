"""What a router asks, is told, and says of itself.

Guarantees: a node can't say that it has more pages of a prompt than it was asked about; texts, names and numbers are
bounded as everywhere.
"""

from __future__ import annotations

import dataclasses

from pdkv.ids import PageHashes
from pdkv.node.routing import Estimate, EstimateCall, RoutedNode, RouterStatus
from pdkv.rpc.convert import checks
from pdkv.rpc.convert.common import peer_from_pb, peer_to_pb, texts
from pdkv.v1 import common_pb2, router_pb2

TEXTS = ("prefill", "decode", "contents", "apart", "discovery")


def estimate_call_to_pb(call: EstimateCall) -> common_pb2.EstimateCall:
    return common_pb2.EstimateCall(hashes=call.hashes.raw)


def estimate_call_from_pb(message: common_pb2.EstimateCall) -> EstimateCall:
    hashes = PageHashes(message.hashes)
    checks.within("hashes", len(hashes), 0, checks.MAX_PAGES)
    return EstimateCall(hashes)


def estimate_to_pb(estimate: Estimate) -> common_pb2.NodeEstimate:
    return common_pb2.NodeEstimate(
        name=peer_to_pb(estimate.name),
        pages=estimate.pages,
        waiting_tokens=estimate.waiting_tokens,
        available_pages=estimate.available_pages,
    )


def estimate_from_pb(message: common_pb2.NodeEstimate, asked: int) -> Estimate:
    """Of at most as many pages as were `asked` for."""
    checks.present(message, "name")
    checks.within("pages", message.pages, 0, asked)
    return Estimate(peer_from_pb(message.name), message.pages, message.waiting_tokens, message.available_pages)


def router_status_to_pb(status: RouterStatus) -> router_pb2.RouterStatus:
    cut = {name: {k: checks.cut(value) for k, value in getattr(status, name).items()} for name in TEXTS}
    return router_pb2.RouterStatus(
        requests=status.requests,
        waiting=status.waiting,
        policy=status.policy,
        nodes={k: router_pb2.RoutedNode(**dataclasses.asdict(node)) for k, node in status.nodes.items()},
        choices=status.choices,
        estimates=status.estimates,
        choosing_s=status.choosing_s,
        **cut,
    )


def router_status_from_pb(message: router_pb2.RouterStatus) -> RouterStatus:
    for field in ("nodes", "choices", "estimates"):
        checks.bounded(field, getattr(message, field))
    return RouterStatus(
        requests=message.requests,
        waiting=message.waiting,
        policy=checks.text("policy", message.policy),
        nodes={checks.name("nodes", key): _routed_from_pb(node) for key, node in message.nodes.items()},
        choices={checks.name("choices", key): count for key, count in message.choices.items()},
        estimates={checks.name("estimates", key): count for key, count in message.estimates.items()},
        choosing_s=message.choosing_s,
        **{name: texts(name, getattr(message, name)) for name in TEXTS},
    )


def _routed_from_pb(message: router_pb2.RoutedNode) -> RoutedNode:
    return RoutedNode(
        checks.text("role", message.role),
        message.requests,
        message.waiting_tokens,
        message.available_pages,
        message.pages,
        message.trust,
    )
