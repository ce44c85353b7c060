"""What a router asks, is told, and says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import PageHashes
from pdkv.node.routing import Estimate, EstimateCall, RoutedNode, RouterStatus
from pdkv.rpc.convert import routing
from pdkv.v1 import common_pb2
from tests.rpc import samples

estimates = st.builds(Estimate, samples.peers, st.integers(0, 2**32 - 1), samples.u64, samples.u64)


@given(estimates)
def test_an_estimate(estimate: Estimate) -> None:
    assert routing.estimate_from_pb(routing.estimate_to_pb(estimate), estimate.pages) == estimate


def test_nobody_has_more_of_a_prompt_than_there_is() -> None:
    message = routing.estimate_to_pb(Estimate(samples.P, 4, 0, 0))
    with pytest.raises(BoundsError, match="pages: 4; allowed: 0 to 3"):
        routing.estimate_from_pb(message, 3)
    with pytest.raises(ProtocolError, match="name is missing"):
        routing.estimate_from_pb(common_pb2.NodeEstimate(pages=1), 3)


@given(st.integers(0, 40))
def test_a_question(pages: int) -> None:
    call = EstimateCall(PageHashes(b"h" * 32 * pages))
    assert routing.estimate_call_from_pb(routing.estimate_call_to_pb(call)) == call


def test_half_a_hash_is_refused() -> None:
    with pytest.raises(BoundsError, match="multiple of 32"):
        routing.estimate_call_from_pb(common_pb2.EstimateCall(hashes=b"h" * 33))


def test_a_routers_state() -> None:
    state = RouterStatus(
        {"a:1": "up"},
        {"b:2": "PeerLost: gone"},
        3,
        {"a:1": "f0"},
        {"b:2 with a:1": "apart"},
        waiting=2,
        policy="prefix",
        nodes={"a:1": RoutedNode("prefill", 1, 640, 0, 99, 0.5)},
        choices={"prefix": 4},
        estimates={"answered": 8, "late": 1},
        choosing_s=0.25,
        discovery={"prefill dns:a:1": "1 found"},
    )
    assert routing.router_status_from_pb(routing.router_status_to_pb(state)) == state
