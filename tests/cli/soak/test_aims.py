"""Every pair is due, is aimed at, and in the end is hit the first time that it can be."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pdkv.cli.soak.aims import AT_ANY_TIME, DUE, MILD_PER_LIFE, MISSED, RARE, SPRINKLED, Aims, Pair, pair_of
from pdkv.node.fault_plan import FaultPlan
from pdkv.node.stages import Stage


def aims(hit: Counter[Pair] | None = None) -> tuple[Aims, Counter[Pair]]:
    hit = Counter() if hit is None else hit
    return Aims(hit, Random(0)), hit


def rules(plan: str) -> list[str]:
    """The plan is one that a node takes."""
    FaultPlan.parse(plan)
    return plan.partition(";")[0].split(",")


def at_stages(plan: str) -> list[Pair]:
    return [pair for rule in rules(plan) if (pair := pair_of(rule))[1] in set(Stage)]


def test_due_are_all_deeds_at_all_stages_those_from_outside_and_the_sprinkled() -> None:
    assert len(set(DUE)) == len(DUE) == 4 * len(Stage) + 2 + sum(map(len, SPRINKLED.values())) == 96
    assert {("kill", AT_ANY_TIME), ("stale", "read.rows"), ("fail", "read.probes"), ("delay", "read.pages")} < set(DUE)


def test_each_life_gets_what_was_planned_least() -> None:
    made, _ = aims()
    stages = [stage.value for stage in Stage if stage.value.startswith("prefill")]
    plans = [at_stages(made.plan("prefill")) for _ in range(2 * len(stages))]
    assert Counter(plan[0] for plan in plans) == {("kill", stage): 2 for stage in stages}
    mild = Counter(pair for plan in plans for pair in plan[1:])
    assert set(mild) == {(kind, stage) for kind in ("stop", "fail", "delay") for stage in stages}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_fault_of_a_life_stands_in_anothers_way(role: str) -> None:
    """All but one stage were hit: all faults of a life were at that one, and the first of them was the only one."""
    made, hit = aims()
    left = Stage.SEALED if role == "prefill" else Stage.LENT
    hit.update(pair for pair in DUE if pair[1] != left)
    for _ in range(10):
        places = [place for _, place in at_stages(made.plan(role))]
        assert len(places) == len(set(places)) == 1 + MILD_PER_LIFE


def test_a_fault_that_is_never_come_to_strikes_early_in_the_end() -> None:
    made, hit = aims()
    hit.update(pair for pair in DUE if pair != ("kill", "decode.admitted"))
    plans = [made.plan("decode") for _ in range(MISSED + 1)]
    assert all(plan.startswith("kill@decode.admitted:nth=") for plan in plans)
    assert not any(plan.startswith("kill@decode.admitted:nth=1,") for plan in plans[:MISSED])
    assert plans[MISSED].startswith("kill@decode.admitted:nth=1,")


def test_what_chance_never_hit_strikes_one_after_the_other() -> None:
    made, hit = aims()
    first = rules(made.plan("decode"))
    assert set(SPRINKLED["decode"]) < set(first)
    hit.update(pair for pair in DUE if pair[1] not in ("renew_lease", "read.rows"))
    second = rules(made.plan("decode"))
    assert [rule for rule in second if "renew_lease" in rule] == [
        "drop@renew_lease:nth=1",
        "duplicate@renew_lease:nth=2",
    ]
    assert "stale:nth=1" in second
    assert "hang:p=0.003" in second
    assert rules(aims(hit)[0].plan("prefill"))[-1] == "fail:p=0.05:of=probes"


def fleet(lives: int, *, arrivals: int) -> set[Pair]:
    """What is hit at stages in so many lives of each role, if a node comes to each stage so often in a life, and to
    those of few requests once, in every second life."""
    made, hit = aims()
    for life in range(lives):
        for role in SPRINKLED:
            for rule in FaultPlan.parse(made.plan(role)).rules:
                often = life % 2 if rule.place in RARE else arrivals
                hit[rule.deed.value, rule.place] += 1 <= rule.nth <= often
    return {pair for pair in DUE if hit[pair]}


def test_forty_lives_of_few_requests_hit_every_fault_at_every_stage() -> None:
    """So many does a role have in ten minutes on two busy cores."""
    at = {pair for pair in DUE if pair[1] in set(Stage)}
    assert at - fleet(40, arrivals=6) == set()
    assert at - fleet(6, arrivals=6), "six lives can't"
