"""The JSON object: the same keys whatever was asked, and no figure that JSON can't hold."""

import json
from typing import Any

from pdkv.cli.plan.complaints import Answers
from pdkv.cli.plan.figures import make_plan
from pdkv.cli.plan.objects import findings_object, plan_object
from pdkv.cli.plan.options import PlanOptions
from pdkv.geometry.diagnose import Finding


def planned(**options: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(plan_object(make_plan(PlanOptions(model="glm-5.3", **options)))))
    return made


def test_the_same_keys_in_every_plan() -> None:
    plain, full = planned(), planned(gpu="h200", gpus=8, hit=100_000, short_requests=7)
    assert list(plain) == list(full)
    assert [k for k, v in plain.items() if v is None] == ["pool", "rank", "hit", "tail_waste"]
    assert not [k for k, v in full.items() if v is None]


def test_a_rank() -> None:
    made = planned(gpu="h200", gpus=8, dcp=2)
    rank, pool = made["rank"], made["pool"]
    assert rank["layout"] == {"gpus": 8, "tp": 8, "dp": 1, "ep": 8, "dcp": 2, "pp": 1}
    parts = {k: v for k, v in rank["weight_bytes"].items() if k != "total"}
    assert set(parts) == {
        "attention", "indexer", "dense MLP", "routed experts", "shared experts", "embeddings", "lm_head",
        "router and norms", "MTP",
    }  # fmt: skip
    assert sum(parts.values()) == rank["weight_bytes"]["total"]
    assert rank["left_bytes"] == pool["memory_bytes"]
    assert pool["tokens_per_page"] == 128
    assert pool["page_bytes"]["total"] == 64 * 56_712
    assert made["contexts"][-1]["fit"]["fits"]


def test_what_if_and_what_fits() -> None:
    made = planned(memory="56GB", context=[1_048_576])
    assert [v["change"] for v in made["what_if"]][:3] == [
        "as planned",
        "half of the layers full (39)",
        "all layers full (78)",
    ]
    assert made["what_if"][0]["pool_tokens"] == 1_038_080
    assert made["contexts"][0]["fit"]["would_fit"][0] == "dcp 2"
    assert made["workspaces"]["prefill"] is None
    assert planned(gpu="h200", gpus=8)["workspaces"]["prefill"]["chunks"] == 46


def test_findings() -> None:
    fine, wrong = (Finding("c", w, {"n": 1}, "f", ("w",)) for w in (False, True))
    assert not findings_object(Answers((fine,), {}))["wrong"]
    made = findings_object(Answers((fine, wrong), {"step": ("step_s",)}))
    assert made["wrong"]
    assert made["findings"][1]["numbers"] == {"n": 1}
    assert made["unanswered"] == {"step": ["step_s"]}
