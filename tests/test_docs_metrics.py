"""docs/metrics.md names what nodes and routers really export, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from pdkv.metrics.names import Metrics
from pdkv.metrics.scrape import node_families, router_families
from pdkv.node.routing import RouterStatus
from tests.metrics.test_scrape import node_status

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def exported() -> set[str]:
    """Names as a query writes them: histograms without their endings."""
    families = [
        *Metrics().registry.collect(),
        *node_families(node_status(), evictable=0, locked=0, evicted=0),
        *router_families(RouterStatus({}, {}, 0), ""),
    ]
    endings = {"counter": "_total", "info": "_info"}
    return {family.name + endings.get(family.type, "") for family in families}


def written(role: str) -> set[str]:
    """What the page says that a process of this role exports."""
    found = set()
    for names, where in re.findall(r"^\| (`pdkv_[^|]*) \|[^|]*\| ([^|]*) \|", PAGE.read_text("utf-8"), re.MULTILINE):
        if role in where or "all" in where:
            found |= set(re.findall(r"`(pdkv_[a-z_]+)`", names))
    return found


def test_each_metric_has_its_line_and_each_line_its_metric() -> None:
    written = set(re.findall(r"`(pdkv_[a-z_]+)`", PAGE.read_text("utf-8")))
    assert written == exported()


def test_other_pages_name_metrics_that_there_are() -> None:
    for page in (PAGE.with_name("failure-model.md"),):
        named = set(re.findall(r"`(pdkv_[a-z_]+)", page.read_text("utf-8")))
        assert named
        assert named <= exported(), page.name
