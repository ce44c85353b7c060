"""Alerts as Prometheus evaluates them: each fires when it is to, and is quiet beside it: `make alerts-test`.

Guarantees: what is said is what `promtool test rules` found; exit code 1 if an alert is wrong, 2 without promtool.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.cluster import K8S

FILES = [K8S / "components" / name / "alerts.yaml" for name in ("monitoring", "monitoring-vllm")]
SCRAPED_S = 5
"""As the PodMonitors say."""
ROUTER = 'app_kubernetes_io_component="router"'
DECODE = 'app_kubernetes_io_component="decode"'
Series = Mapping[str, str]
"""Name and labels, to values as promtool writes them: `1+2x3` is 1, 3, 5, 7."""


@dataclass(frozen=True)
class Case:
    """After `minutes`, with series of one namespace."""

    minutes: float
    fires: Series
    quiet: Series


def _ratio(part: str, whole: str, much: float, little: float) -> tuple[Series, Series]:
    """Of two that grow."""
    bad, good = ({part: f"0+{share}x400", whole: "0+1x400"} for share in (much, little))
    return bad, good


CASES = {
    # down for ten seconds, and up again before it is looked at
    "PdkvNodeDown": Case(
        1.5,
        {'pdkv_router_nodes{pod="r0",role="prefill",state="down"}': "0+0x12 1+0x1 0+0x20"},
        {
            'pdkv_router_nodes{pod="r0",role="prefill",state="down"}': "0+0x40",
            'pdkv_router_nodes{pod="r0",role="prefill",state="up"}': "2+0x40",
        },
    ),
    "PdkvNoNode": Case(
        1,
        {f'pdkv_router_nodes{{pod="{pod}",role="decode",state="up"}}': "2+0x4 0+0x20" for pod in ("r0", "r1")},
        {
            'pdkv_router_nodes{pod="r0",role="decode",state="up"}': "0+0x20",
            'pdkv_router_nodes{pod="r1",role="decode",state="up"}': "1+0x20",
        },
    ),
    "PdkvNoRouter": Case(
        1.5,
        {'pdkv_node_info{pod="p0"}': "1+0x40", 'pdkv_router_nodes{pod="r0",role="decode",state="up"}': "2+0x5 stale"},
        {'pdkv_node_info{pod="p0"}': "1+0x40", 'pdkv_router_nodes{pod="r0",role="decode",state="up"}': "2+0x40"},
    ),
    "PdkvNotReady": Case(
        2,
        {'pdkv_ready{pod="d0"}': "0+0x40", 'pdkv_draining{pod="d0"}': "0+0x40"},
        {'pdkv_ready{pod="d0"}': "0+0x40", 'pdkv_draining{pod="d0"}': "1+0x40"},
    ),
    "PdkvDiscoveryFails": Case(
        6,
        {'pdkv_discovery_failing{pod="r0",list="prefill"}': "1+0x80"},
        {'pdkv_discovery_failing{pod="r0",list="prefill"}': "1+0x30 0+0x80"},
    ),
    "PdkvRequestsFail": Case(
        8,
        *_ratio(
            f'pdkv_requests_total{{outcome="PeerLost",{ROUTER}}}',
            f'pdkv_requests_total{{outcome="done",{ROUTER}}}',
            0.02,
            0.005,
        ),
    ),
    "PdkvSlowFirstToken": Case(
        16,
        *(
            {f'pdkv_ttft_seconds_bucket{{le="{le}",{ROUTER}}}': f"0+{count}x400" for le, count in buckets.items()}
            for buckets in ({"30": 0.9, "60": 1, "+Inf": 1}, {"30": 0.99, "60": 1, "+Inf": 1})
        ),
    ),
    "PdkvDigestFailures": Case(
        3,
        {'pdkv_digest_failures_total{pod="d0"}': "0+0x10 1+0x40"},
        {'pdkv_digest_failures_total{pod="d0"}': "5+0x50"},
    ),
    "PdkvContractRefused": Case(
        8,
        {'pdkv_refusals_total{pod="p0",field="weights_id"}': "1+1x100"},
        {'pdkv_refusals_total{pod="p0",field="weights_id"}': "9+0x100"},
    ),
    "PdkvNodesApart": Case(
        6, {'pdkv_router_apart{pod="r0"}': "1+0x80"}, {'pdkv_router_apart{pod="r0"}': "1+0x30 0+0x80"}
    ),
    "PdkvReadsWithoutEnd": Case(
        3, {'pdkv_unsettled_peers{pod="d0"}': "1+0x40"}, {'pdkv_unsettled_peers{pod="d0"}': "1+0x20 0+0x40"}
    ),
    "PdkvFences": Case(
        4, {'pdkv_fences_total{pod="d0"}': "0+0.2x50"}, {'pdkv_fences_total{pod="d0"}': "0+0x10 1+0x50"}
    ),
    "PdkvTransferExposed": Case(
        21,
        *_ratio(f"pdkv_exposed_transfer_seconds_sum{{{DECODE}}}", f"pdkv_ttft_seconds_sum{{{DECODE}}}", 0.4, 0.2),
    ),
    # of a pod that has just come, nobody can have waited for five minutes
    "PdkvQueueStands": Case(
        7, {'pdkv_requests_queued{pod="d0"}': "1+0x100"}, {'pdkv_requests_queued{pod="d0"}': "_x50 1+0x50"}
    ),
    "PdkvDraftsUseless": Case(
        31, *_ratio("pdkv_accepted_length_tokens_sum", "pdkv_accepted_length_tokens_count", 1.1, 2.5)
    ),
    "PdkvEngineContracts": Case(
        8,
        {'vllm:pdkv_contract_mismatches_total{pod="d0"}': "0+1x100"},
        {'vllm:pdkv_contract_mismatches_total{pod="d0"}': "9+0x100"},
    ),
    "PdkvEngineProofs": Case(
        3,
        {'vllm:pdkv_proofs_failed_total{pod="d0",kind="reused"}': "0+0x10 1+0x40"},
        {'vllm:pdkv_proofs_failed_total{pod="d0",kind="reused"}': "5+0x50"},
    ),
    "PdkvEngineLoads": Case(11, *_ratio("vllm:pdkv_loads_failed_total", "vllm:pdkv_loads_total", 0.02, 0.005)),
}


def rules() -> dict[str, Any]:
    """As Prometheus reads them, without what the operator wraps them in."""
    return {"groups": [g for path in FILES for g in yaml.safe_load(path.read_text("utf-8"))["spec"]["groups"]]}


def trials() -> Iterator[dict[str, Any]]:
    for name, case in CASES.items():
        for series, samples in ((case.fires, [{"labels": "{}", "value": 1}]), (case.quiet, [])):
            expression = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
            at = f"{case.minutes * 60:g}s"
            yield {
                "name": f"{name}, {'fires' if samples else 'quiet'}",
                "interval": f"{SCRAPED_S}s",
                "input_series": [{"series": _placed(each), "values": values} for each, values in series.items()],
                "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": samples}],
            }


def _placed(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{namespace="pdkv"{"," if labels else ""}{labels}}}'


def main() -> int:
    if (promtool := shutil.which("promtool")) is None:
        print("alerts-test can't run here: no promtool: apt-get install prometheus", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        made, asked = Path(folder, "rules.yaml"), Path(folder, "tests.yaml")
        made.write_text(yaml.safe_dump(rules()), "utf-8")
        told = {"rule_files": [str(made)], "evaluation_interval": "15s", "tests": list(trials())}
        asked.write_text(yaml.safe_dump(told), "utf-8")
        return subprocess.run([promtool, "test", "rules", str(asked)], timeout=300).returncode and 1


if __name__ == "__main__":
    raise SystemExit(main())
