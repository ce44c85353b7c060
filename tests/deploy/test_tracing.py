"""Traces leave the pods for the collector, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy import isolation
from tests.deploy.cluster import with_component
from tests.deploy.test_overlays import CHECKS, OVERLAYS, VERSIONS, invalid


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_tracing_goes_with_every_overlay(overlay: str, tmp_path: Path) -> None:
    """What was true of the overlay stays true; every process tells its spans to where it may reach."""
    cluster = with_component(overlay, "tracing", tmp_path)
    assert [complaint for check in CHECKS for complaint in check(cluster)] == []
    assert [why for o in cluster.objects for version in VERSIONS if (why := invalid(o, version))] == []
    told = {workload.role: config.trace_endpoint for workload, _, config in cluster.configs()}
    assert told == dict.fromkeys(("prefill", "decode", "router"), "http://otel-collector.observability:4317")
    cluster.objects.remove(cluster.get("NetworkPolicy", "traces"))
    assert {f"{role} to collector:4317" for role in told} <= set(isolation.network(cluster))
