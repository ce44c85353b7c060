"""What a scrape finds, over HTTP, of a node that runs."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pdkv.errors import ConfigError
from pdkv.metrics.names import Metrics
from pdkv.metrics.scrape import StatusCollector, exported, node_families, router_families
from pdkv.node.messages import NodeStatus, PeerStatus
from pdkv.node.routing import RouterStatus
from pdkv.router.registry import UP
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(families: Iterator[Metric]) -> Samples:
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def families_of(status: NodeStatus) -> Samples:
    return samples(node_families(status, evictable=5, locked=2, evicted=9))


def node_status() -> NodeStatus:
    found: list[NodeStatus] = []

    async def body(pair: Pair) -> None:
        await answers(pair.decode.generate(request(300)))
        found.append(pair.decode.status())

    run(body, make_pair())
    return found[0]


def test_gauges_are_the_status() -> None:
    status = node_status()
    peers = {"p0#1": PeerStatus("READY", 1.0, "cma"), "p1#1": PeerStatus("LOST", 1.0, "cma", "gone")}
    seen = families_of(replace(status, peers=peers, fences=3, preemptions=4, unready="no peer", queued=2))
    for name, count in status.pages.items():
        if name != "total":
            assert seen["pdkv_pages", (name,)] == count
    assert sum(v for (name, _), v in seen.items() if name == "pdkv_pages") == status.pages["total"]
    assert (seen["pdkv_cached_pages", ("evictable",)], seen["pdkv_cached_pages", ("locked",)]) == (5, 2)
    assert (seen["pdkv_peers", ("READY",)], seen["pdkv_peers", ("LOST",)], seen["pdkv_peers", ("SUSPECT",)]) == (
        1,
        1,
        0,
    )
    assert (seen["pdkv_fences_total", ()], seen["pdkv_preemptions_total", ()]) == (3, 4)
    assert (seen["pdkv_evicted_pages_total", ()], seen["pdkv_ready", ()], seen["pdkv_requests_queued", ()]) == (9, 0, 2)
    assert families_of(status)["pdkv_ready", ()] == 1


def test_a_routers_nodes_by_role_and_state() -> None:
    status = RouterStatus({"a:1": UP, "b:1": "silent"}, {"c:1": UP}, 7, {}, {"c:1 with b:1": "failed"})
    seen = samples(router_families(status, ""))
    assert seen["pdkv_router_nodes", ("prefill", "up")] == seen["pdkv_router_nodes", ("prefill", "down")] == 1
    assert (seen["pdkv_router_nodes", ("decode", "up")], seen["pdkv_router_nodes", ("decode", "down")]) == (1, 0)
    assert (seen["pdkv_requests_running", ()], seen["pdkv_router_apart", ()], seen["pdkv_ready", ()]) == (7, 1, 1)


def test_what_a_router_chose_by_and_what_it_asked() -> None:
    status = RouterStatus({}, {}, 7, waiting=3, choices={"prefix": 5, "load": 2}, estimates={"late": 1}, choosing_s=0.5)
    seen = samples(router_families(status, ""))
    assert (seen["pdkv_requests_running", ()], seen["pdkv_requests_queued", ()]) == (7, 3)
    assert [seen["pdkv_router_choices_total", (by,)] for by in ("prefix", "load")] == [5, 2]
    assert (seen["pdkv_router_estimates_total", ("late",)], seen["pdkv_router_choosing_seconds_total", ()]) == (1, 0.5)


def test_lists_of_addresses_where_nothing_is_found() -> None:
    failing = {"prefill": 2, "decode": 0}
    seen = samples(router_families(RouterStatus({}, {}, 0), "", failing))
    assert {of: seen["pdkv_discovery_failing", (of,)] for of in failing} == failing
    nobody_looks = samples(router_families(RouterStatus({}, {}, 0), ""))
    assert not [name for name, _ in nobody_looks if name == "pdkv_discovery_failing"]


def scraped(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_over_http_and_the_port_is_free_again() -> None:
    status = RouterStatus({}, {}, 0)

    async def body() -> None:
        for _ in range(2):
            metrics = Metrics()
            metrics.requests.labels("done").inc()
            with exported(metrics, lambda: router_families(status, ""), "127.0.0.1:0") as port:
                found = await asyncio.to_thread(scraped, port)
                assert found["pdkv_requests"].samples[0].value == 1
                assert found["pdkv_ready"].samples[0].value == 1
                with (
                    pytest.raises(ConfigError, match="metrics_bind"),
                    exported(Metrics(), lambda: [], f"127.0.0.1:{port}"),
                ):
                    pass

    asyncio.run(body())


def test_a_loop_that_stands_still_shows_no_gauges_and_holds_nobody_up() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        collector = StatusCollector(loop, lambda: router_families(RouterStatus({}, {}, 0), ""), ask_s=0.05)
        assert list(collector.collect()) == []  # asked from the loop's own thread, which can't answer meanwhile

    asyncio.run(body())


def test_a_loop_that_has_ended_has_no_gauges() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert list(StatusCollector(loop, lambda: []).collect()) == []
