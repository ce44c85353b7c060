"""What a router's status says of who found its nodes."""

from dataclasses import replace

from pdkv.router.discovered import DiscoveredRouter
from tests.rpc.fakes import FakeRouter


def test_its_status_says_where_nodes_are_looked_for() -> None:
    found = {"prefill dns:p:1": "0 found"}
    router = FakeRouter()
    served = DiscoveredRouter(router, lambda: found)
    assert served.status() == replace(router.status(), discovery=found)
    found["prefill dns:p:1"] = "2 found"
    assert served.status().discovery == found
