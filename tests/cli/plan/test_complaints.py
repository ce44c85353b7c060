"""Which numbers a complaint gets: given ones before a node's before the plan's."""

from typing import Any

import pytest

from pdkv.cli.plan import complaints, live
from pdkv.cli.plan.complaints import Answers, answer
from pdkv.cli.plan.figures import make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.errors import ConfigError

STEPS = "context_tokens=1048576,step_s=0.03,short_context_tokens=1000,short_step_s=0.01,requests=32"


def answered(**options: Any) -> Answers:
    return answer(make_plan(PlanOptions(model="glm-5.3", **options)))


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

    async def observe(address: str, probe: int | None) -> live.Seen:
        asked.append((address, probe))
        held = 10_000 * 3_452_160
        return {"pool": {"memory_bytes": held, "usable_pages": 9_999, "page_bytes": 3_452_160}}

    monkeypatch.setattr(live, "observe", observe)
    # all of its own memory is in pages of the planned size
    assert not answered(node="a:1", diagnose="pool").wrong
    # but it is not the memory that was planned
    short = answered(node="a:1", diagnose="pool", memory="56GB").findings[0]
    assert "the pool got 34,521,600,000 B" in short.finding
    larger = answered(node="a:1", diagnose="pool", memory="56GB", given=["page_bytes=3604224"]).findings[0]
    assert "39 layers with index-K" in larger.finding
    assert asked == [("a:1", None)] * 3
    assert set(answered(node="a:1", probe=2048).unanswered) == {"refused", "ttft", "step"}
    assert asked[-1] == ("a:1", 2048)
    assert complaints.ALL == "all"
