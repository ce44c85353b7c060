"""What becomes of a failed request is asked for by the client, else by the router, else by the decode node."""

from dataclasses import replace

import pytest

from pdkv.errors import PeerLost
from pdkv.node.messages import FailurePolicy
from pdkv.router.service import Router, RouterSettings
from tests.router.fleet import registry
from tests.router.test_service import DONE, Nodes
from tests.rpc import samples
from tests.rpc.fakes import Stream, collect, failure, run


@pytest.mark.parametrize("own", [None, FailurePolicy.RETRY])
@pytest.mark.parametrize("asked", [None, FailurePolicy.FAIL])
def test_the_requests_own_policy_comes_first(asked: FailurePolicy | None, own: FailurePolicy | None) -> None:
    async def body() -> None:
        nodes = Nodes()
        service = Router(registry(2, 1), nodes, RouterSettings(own))
        assert await collect(service.generate(replace(samples.generate_request(), on_failure=asked))) == DONE
        assert nodes.requests[0].on_failure is (asked or own)

    run(body)


@pytest.mark.parametrize("accepted", [False, True])
def test_what_a_prefill_node_had_taken_on_is_not_handed_to_another_pair(accepted: bool) -> None:
    async def body() -> None:
        error = PeerLost("connection reset", **({"accepted_by": "p0"} if accepted else {}))
        nodes = Nodes(d0_p0=Stream(error=error))
        service = Router(registry(2, 2), nodes)
        if accepted:
            seen, raised = await failure(service.generate(samples.generate_request()))
            assert (seen, raised) == ([], error)
        else:
            assert await collect(service.generate(samples.generate_request())) == DONE
        assert len(nodes.asked) == 2 - accepted

    run(body)
