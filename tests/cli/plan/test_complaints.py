"""Which numbers a complaint gets: given ones before a node's before the plan's."""

from typing import Any

import pytest

from pdkv.cli.plan import complaints, live
from pdkv.cli.plan.complaints import Answers, answer
from pdkv.cli.plan.figures import make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.contract import ContractFacts, build_contract
from pdkv.errors import ConfigError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.rpc.security import Security
from tests.rpc import samples

NODE: dict[str, Any] = {"node": "a:1", "insecure": True}
STEPS = "context_tokens=1048576,step_s=0.03,short_context_tokens=1000,short_step_s=0.01,requests=32"


def answered(model: str | None = "glm-5.3", **options: Any) -> Answers:
    made = PlanOptions(model=model, **options)
    made.check()
    return answer(made)


def test_a_complaint_from_given_numbers() -> None:
    made = answered(diagnose="pool", given=["memory_bytes=56GB", "usable_pages=15536"])
    assert made.wrong
    assert "39 layers with index-K instead of 21" in made.findings[0].finding
    assert not answered(diagnose="pool", given=["memory_bytes=56GB,usable_pages=16220"]).wrong


def test_what_the_plan_knows_need_not_be_given() -> None:
    assert not answered(diagnose="pool", memory="56GB", given=["usable_pages=16220"]).wrong
    refused = answered(diagnose="refused", context=[1_048_576], given=["total_pages=16220,free_pages=0"])
    assert refused.findings[0].numbers["request_tokens"] == 1_048_832
    step = answered(diagnose="step", gpu="h200", given=[STEPS])
    assert "index-K explains it" in step.findings[0].finding
    on_gpus = answered(diagnose="pool", gpu="h200", gpus=8, given=["usable_pages=11796"])
    assert not on_gpus.wrong
    assert answered(diagnose="pool", gpu="h200", gpus=8, given=["usable_pages=11700"]).wrong
    # the pages of a stage of 40 layers, and of slots that serve two tokens
    staged: dict[str, Any] = {"gpu": "h200", "gpus": 16, "pp": 2, "dcp": 2, "diagnose": "pool"}
    pool = make_plan(PlanOptions(model="glm-5.3", **staged)).pool
    assert pool is not None
    given = [f"usable_pages={pool.usable_pages}"]
    assert not answered(**staged, given=given).wrong
    assert answered(**staged, given=given).findings[0].numbers["planned_page_bytes"] == pool.page.total


def test_a_named_complaint_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="for step also memory_bytes_per_s"):
        answered(diagnose="step", given=[STEPS])
    with pytest.raises(ConfigError, match="for ttft also prompt_tokens, hit_tokens"):
        answered(diagnose="ttft")


def test_all_answers_what_it_can() -> None:
    made = answered(diagnose="all", memory="56GB", given=["usable_pages=15536"])
    assert len(made.findings) == 1
    assert set(made.unanswered) == {"refused", "ttft", "step"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"diagnose": "weather"}, "diagnose"),
        ({"diagnose": "pool", "given": ["usable_pages"]}, "given"),
        ({"diagnose": "pool", "given": ["step_s=1"]}, "given"),
        ({"diagnose": "pool", "given": ["usable_pages=many"]}, "given.usable_pages"),
        ({"diagnose": "pool", "given": ["memory_bytes=lots"]}, "given.memory_bytes"),
        ({"diagnose": "step", "given": ["step_s=soon"]}, "given.step_s"),
    ],
)
def test_errors_name_the_key(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        answered(**options)
    assert error.value.fields["field"] == field


def test_a_node_fills_in_and_given_numbers_win(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int | None]] = []

    async def observe(address: str, probe: int | None, security: Security) -> live.Observed:
        asked.append((address, probe))
        held = 10_000 * 3_452_160
        seen: live.Seen = {"pool": {"memory_bytes": held, "usable_pages": 9_999, "page_bytes": 3_452_160}}
        return live.Observed(samples.contract(), seen)

    monkeypatch.setattr(live, "observe", observe)
    # all of its own memory is in pages of the planned size
    assert not answered(**NODE, diagnose="pool").wrong
    # but it is not the memory that was planned
    short = answered(**NODE, diagnose="pool", memory="56GB").findings[0]
    assert "the pool got 34,521,600,000 B" in short.finding
    larger = answered(**NODE, diagnose="pool", memory="56GB", given=["page_bytes=3604224"]).findings[0]
    assert "39 layers with index-K" in larger.finding
    assert asked == [("a:1", None)] * 3
    assert set(answered(**NODE, probe=2048).unanswered) == {"refused", "ttft", "step"}
    assert asked[-1] == ("a:1", 2048)
    assert complaints.ALL == "all"


def test_a_node_alone_says_what_it_is_measured_against(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_shape(load_config("glm-5.3-mtp"))
    drafting = {"speculation": "mtp", "eagle_rule": "bigram", "draft_tokens": 3, "rollback_tokens": 3}
    facts = ContractFacts("w", **drafting, engine="reference")
    fmt = page_format(shape, main_row="bf16")
    contract = build_contract(shape, fmt, identity=facts)

    async def observe(address: str, probe: int | None, security: Security) -> live.Observed:
        pool = {"memory_bytes": 10_000 * fmt.page_bytes, "usable_pages": 9_999, "page_bytes": fmt.page_bytes}
        refused = {"total_pages": 9_999, "free_pages": 9_999}
        return live.Observed(contract, {"pool": pool, "refused": refused, "step": {"engine": contract.engine}})

    monkeypatch.setattr(live, "observe", observe)
    assert live.shape_of(contract) == shape
    # a pool of its own pages, and a request only where one was asked about
    made = answered(None, **NODE)
    assert [f.numbers["planned_page_bytes"] for f in made.findings] == [fmt.page_bytes]
    assert made.unanswered["refused"] == ("request_tokens",)
    refused = answered(None, **NODE, diagnose="refused", context=[1_048_576]).findings[0]
    assert refused.numbers["request_tokens"] == 1_048_576 + 256 + 3
    assert answered(None, **NODE, diagnose="pool", memory="90GB").wrong
    # what is said by hand is what it should be
    planned = answered(None, **NODE, diagnose="pool", main_row="fp8_ds_mla", memory="59280000000")
    assert "main rows of 1152 B (bf16)" in planned.findings[0].finding
    assert "an MTP layer more" in answered(None, **NODE, memory="60GB", draft_layers=0).findings[0].finding
    # and the engine is known by its name
    steps = answered(
        None,
        node="a:1",
        insecure=True,
        diagnose="step",
        given=[f"{STEPS.replace('0.03', '9')},memory_bytes_per_s=1e12"],
    )
    assert "the reference engine is dense by design" in steps.findings[0].finding
