"""What a router tells a trace: how long it took to choose, and each pair that it tried."""

from __future__ import annotations

from pdkv.errors import PeerLost
from pdkv.router.service import PICK, ROUTE
from pdkv.tracing.span import SILENT, current, within
from tests.router.test_service import DONE, Nodes, at, router
from tests.rpc import samples
from tests.rpc.fakes import Stream, collect, run
from tests.tracing.test_span import Told


def test_each_pair_that_is_tried_is_told_with_how_it_ended() -> None:
    async def body() -> None:
        nodes = Nodes(d0_p0=Stream(error=at(PeerLost("gone"), "d0")))
        service, _ = router(nodes)
        root = Told("root")
        with within(root):
            assert await collect(service.generate(samples.generate_request())) == DONE
            assert current() is root
        pick, first, second = root.children
        assert (pick.name, first.name, second.name) == (PICK, ROUTE, ROUTE)
        assert first.facts["pdkv.decode.address"] == "d0"
        assert first.facts["pdkv.prefill.address"] == "p0"
        assert first.facts["pdkv.reason"]
        assert second.facts["pdkv.decode.address"] == "d1"
        assert [type(error) for error in first.failures] == [PeerLost]
        assert second.failures == []
        assert [each.ended for each in root.children] == [1, 1, 1]
        assert current() is SILENT

    run(body)
