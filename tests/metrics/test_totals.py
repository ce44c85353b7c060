"""Totals of a node's status are those of its metrics."""

from __future__ import annotations

import pytest

from pdkv.errors import NeverFits
from pdkv.metrics.names import Metrics
from pdkv.metrics.totals import totals
from tests.metrics.test_served import metered
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair


def test_nothing_was_counted_yet() -> None:
    found = totals(Metrics())
    assert set(found.values()) == {0}
    assert {"done_requests", "failed_requests", "hit_pages", "digest_failures"} <= set(found)


def test_a_nodes_status_has_what_its_metrics_counted() -> None:
    async def scenario(pair: Pair) -> None:
        metered(pair)
        for name in ("a", "b"):
            _, done = await answers(pair.decode.generate(request(300, name=name)))
        with pytest.raises(NeverFits):
            await answers(pair.decode.generate(request(64_000)))
        for node, failed in ((pair.decode, 1), (pair.prefill, 0)):
            found = node.status().totals
            assert (found["done_requests"], found["failed_requests"]) == (2, failed)
            assert found["prompt_tokens"] == 600
            assert found["hit_pages"] == done.shipment.pages_hit
        assert pair.decode.status().totals["output_tokens"] == 16
        assert pair.decode.status().totals["read_main_bytes"] > 0

    run(scenario, make_pair())
