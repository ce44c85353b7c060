"""Alerts and the dashboard ask for metrics that pdkv exports, by labels that they have; and each alert is explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.core import Metric

from pdkv.adapters.vllm.tally import NAMES, WITH_KIND
from pdkv.metrics.names import Metrics
from pdkv.metrics.scrape import node_families, router_families
from pdkv.node.routing import RouterStatus
from tests.deploy import isolation, references
from tests.deploy.alerts import CASES, rules, trials
from tests.deploy.cluster import K8S, ROOT, with_component
from tests.deploy.test_overlays import CHECKS, OVERLAYS, VERSIONS, invalid
from tests.metrics.test_scrape import node_status

FOLDER = K8S / "components" / "monitoring"
SCRAPED = {"namespace", "pod", "container", "app_kubernetes_io_component"}
"""Labels that Prometheus adds to whatever it scrapes by the PodMonitor."""
VLLM = "vllm:pdkv_"
"""What the connector's counters begin with, in vLLM's metrics."""
WINDOWS = {"$__rate_interval": "5m", "$namespace": "pdkv", "$pod": ".*"}


@cache
def exported() -> dict[str, set[str]]:
    """Labels of each series that a query may name."""
    metrics = Metrics()
    families: list[Metric] = [
        *node_families(node_status(), evictable=0, locked=0, evicted=0),
        *router_families(RouterStatus({}, {}, 0), ""),
    ]
    found: dict[str, set[str]] = {}
    for collector in vars(metrics).values():
        if hasattr(collector, "describe") and hasattr(collector, "_labelnames"):
            (family,) = collector.describe()
            labels = set(collector._labelnames)
            names = {"counter": ("_total",), "histogram": ("_sum", "_count", "_bucket")}[family.type]
            found |= {family.name + ending: labels | ({"le"} if ending == "_bucket" else set()) for ending in names}
    for family in families:
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = set(getattr(family, "_labelnames", ())) | {k for sample in family.samples for k in sample.labels}
        found[family.name + ending] = labels
    engine = {name: {"model_name", "engine"} | ({"kind"} if name in WITH_KIND else set()) for name in NAMES}
    return found | {f"{VLLM}{name}_total": labels for name, labels in engine.items()}


def selected(expression: object) -> Iterator[promql_parser.VectorSelector]:
    """Every series that a query reads."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from selected(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from selected(argument)


def wrong(query: str) -> list[str]:
    """What Prometheus wouldn't understand, or would find nothing for."""
    for variable, value in WINDOWS.items():
        query = query.replace(variable, value)
    try:
        parsed = promql_parser.parse(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    found = []
    series = list(selected(parsed))
    for each in series:
        if each.name not in exported():
            found.append(f"{each.name}: nothing exports it")
            continue
        labels = {matcher.name for matcher in each.matchers.matchers}
        found += [f"{each.name} has no label {name}" for name in labels - exported()[each.name] - SCRAPED]
    known = SCRAPED.union(*(exported().get(each.name, set()) for each in series))
    grouped = {name.strip() for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for name in by.split(",")}
    found += [f"grouped by {name}, which no series has" for name in grouped - known - {""}]
    return found if series else [f"{query}: reads nothing"]


def alerts() -> list[dict[str, object]]:
    files = [FOLDER / "alerts.yaml", FOLDER.with_name("monitoring-vllm") / "alerts.yaml"]
    rules = [yaml.safe_load(path.read_text("utf-8")) for path in files]
    return [rule for each in rules for group in each["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, object]:
    found: dict[str, object] = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
    return found


def queries() -> list[str]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]  # type: ignore[attr-defined, index]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_reads_what_is_exported(alert: dict[str, str]) -> None:
    assert wrong(alert["expr"]) == []


@pytest.mark.parametrize("query", queries())
def test_a_panel_reads_what_is_exported(query: str) -> None:
    assert wrong(query) == []


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    asked = " ".join([*queries(), *(str(alert["expr"]) for alert in alerts())])
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if not name.startswith(VLLM)}
    assert {name for name in families if name not in asked} <= {"pdkv_workspace_bytes"}, "planned, and never changes"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("pdkv_request_total > 0", "nothing exports it"),
        ('pdkv_pages{clas="free"}', "has no label clas"),
        ("sum by (kind) (pdkv_pages)", "grouped by kind"),
        ("rate(pdkv_requests_total[5m]", "parenthesis"),
        ("histogram_quantile(0.5, rate(pdkv_ttft_seconds[5m]))", "nothing exports it"),
        ("vector(1)", "reads nothing"),
    ],
)
def test_a_query_that_finds_nothing_is_found(query: str, words: str) -> None:
    assert words in " ".join(wrong(query))


def test_each_alert_is_tried_when_it_is_to_fire_and_when_not() -> None:
    """By `make alerts-test`."""
    assert set(CASES) == {alert["alert"] for alert in alerts()}
    asked = [expected["exp_samples"] for trial in trials() for expected in trial["promql_expr_test"]]
    assert asked == [[{"labels": "{}", "value": 1}], []] * len(CASES)
    assert {rule["alert"] for group in rules()["groups"] for rule in group["rules"]} == set(CASES)


def test_panels_are_apart_and_have_titles() -> None:
    panels: list[dict[str, dict[str, int]]] = dashboard()["panels"]  # type: ignore[assignment]
    cells = [
        (x, y)
        for panel in panels
        for at in (panel["gridPos"],)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)  # type: ignore[misc]
    assert all(panel["title"] for panel in panels)


def test_operations_says_what_to_do_about_each_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert set(re.findall(r"`(Pdkv\w+)`", page)) == {alert["alert"] for alert in alerts()}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_monitoring_goes_with_every_overlay(overlay: str, tmp_path: Path) -> None:
    """What was true of the overlay stays true."""
    cluster = with_component(overlay, "monitoring", tmp_path)
    assert {"PodMonitor", "PrometheusRule"} <= {o["kind"] for o in cluster.objects}
    assert [complaint for check in CHECKS for complaint in check(cluster)] == []
    assert [why for o in cluster.objects for version in VERSIONS if (why := invalid(o, version))] == []
    cluster.get("PodMonitor", "pdkv")["spec"]["podMetricsEndpoints"][0]["port"] = "http"
    cluster.objects.remove(cluster.get("NetworkPolicy", "metrics"))
    assert "no port http" in " ".join(references.ports(cluster))
    assert "prometheus to prefill:9400" in " ".join(isolation.network(cluster))
    cluster.get("PrometheusRule", "pdkv")["spec"]["groups"][0]["rules"][0]["form"] = "1m"
    assert "is known" in invalid(cluster.get("PrometheusRule", "pdkv"), VERSIONS[0])
