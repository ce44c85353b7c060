"""Names, units and the edges of buckets."""

from __future__ import annotations

import pytest

from pdkv.metrics.names import BYTES, PAGES, SECONDS, Metrics


def test_names_carry_a_prefix_and_words() -> None:
    for family in Metrics().registry.collect():
        assert family.name.startswith("pdkv_"), family.name
        assert family.documentation.endswith("."), family.name


def test_two_processes_worth_of_metrics_do_not_mix() -> None:
    one, two = Metrics(), Metrics()
    one.requests.labels("done").inc()
    assert two.registry.get_sample_value("pdkv_requests_total", {"outcome": "done"}) is None


@pytest.mark.parametrize(("edges", "last"), [(SECONDS, 120), (BYTES, 128 << 30), (PAGES, 16384)])
def test_the_largest_request_has_a_bucket(edges: tuple[float, ...], last: float) -> None:
    assert list(edges) == sorted(set(edges))
    assert edges[-1] == last
