"""The demo's speculative part: what is compared, and that each difference shows. That it runs is in test_run.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.report import CHECKS, ControlRow
from pdkv.cli.demo.speculative import LOSSES, SpeculativeRow, asks, checks_of, row_of
from pdkv.node.faults import DRAFT_FAULTS, HANDOFF_FAULTS
from pdkv.node.messages import GenerateDone, Shipment, Speculation, Token

COUNT = Speculation(steps=10, drafted=20, accepted=3, rolled_back_tokens=17)
ROWS = [SpeculativeRow(ask.name, ask.drafter, 32, COUNT, True, True, True) for ask in asks()]
CONTROLS = [ControlRow(fault, named, named, ok=True) for fault, (_, named) in LOSSES.items()]

MTP, _, ORACLE = asks()
TOKENS = [Token(0, 7, -1.0, 70), Token(1, 8, -1.0, 80, (1, 2)), Token(2, 9, -1.0, 90)]
DONE = GenerateDone("length", 3, Shipment(), (), COUNT)
PLAIN = MonolithAnswer((7, 8, 9), (70, 80, 90), (), 0)
DRAFTING = replace(PLAIN, draft_digests=((), (1, 2), ()))


def test_its_checks_are_in_the_report() -> None:
    made = checks_of(ROWS, CONTROLS)
    assert made == {"speculation": True, "draft_state": True}
    assert set(made) <= set(CHECKS)
    assert set(LOSSES) <= set(DRAFT_FAULTS) | set(HANDOFF_FAULTS)


@pytest.mark.parametrize("field", ["tokens_equal", "logits_equal", "drafts_equal"])
def test_one_difference_of_one_row_fails(field: str) -> None:
    rows = [*ROWS[:-1], replace(ROWS[-1], **{field: False})]  # type: ignore[arg-type]
    assert checks_of(rows, CONTROLS) == {"speculation": False, "draft_state": True}


@pytest.mark.parametrize("field", ["accepted", "rolled_back_tokens"])
@pytest.mark.parametrize("drafter", ["mtp", "oracle"])
def test_a_drafter_that_was_never_right_or_never_wrong_shows_nothing(field: str, drafter: str) -> None:
    empty = replace(COUNT, **{field: 0})  # type: ignore[arg-type]
    rows = [replace(row, speculation=empty) if row.drafter == drafter else row for row in ROWS]
    assert not checks_of(rows, CONTROLS)["speculation"]


def test_what_was_not_made_failed() -> None:
    assert checks_of([], []) == {"speculation": False, "draft_state": False}
    assert checks_of(ROWS[:-1], CONTROLS[:-1]) == {"speculation": False, "draft_state": False}
    assert not checks_of(ROWS, [replace(CONTROLS[0], ok=False), *CONTROLS[1:]])["draft_state"]


def test_a_row_is_what_was_compared() -> None:
    row = row_of(MTP, TOKENS, DONE, PLAIN, DRAFTING)
    assert row.ok
    assert row.as_dict() == {
        "name": "mtp-greedy",
        "drafter": "mtp",
        "output_tokens": 3,
        "tokens_equal": True,
        "logits_equal": True,
        "drafts_equal": True,
        "steps": 10,
        "drafted": 20,
        "accepted": 3,
        "rolled_back_tokens": 17,
        "canary": "",
        "mean_accepted_length": 1.3,
    }
    no_drafts = [replace(token, draft_digests=()) for token in TOKENS]
    assert row_of(ORACLE, no_drafts, DONE, PLAIN, None).ok


@pytest.mark.parametrize(
    ("plain", "drafting", "field"),
    [
        ({"tokens": (7, 8, 8)}, {}, "tokens_equal"),
        ({"logits_digests": (70, 80, 91)}, {}, "logits_equal"),
        ({}, {"draft_digests": ((), (1, 3), ())}, "drafts_equal"),
        ({}, {"draft_digests": ((), (), ())}, "drafts_equal"),
    ],
)
def test_a_difference_shows_in_its_place(plain: dict[str, Any], drafting: dict[str, Any], field: str) -> None:
    row = row_of(MTP, TOKENS, DONE, replace(PLAIN, **plain), replace(DRAFTING, **drafting))
    assert [f for f in ("tokens_equal", "logits_equal", "drafts_equal") if not getattr(row, f)] == [field]


def test_no_drafts_at_all_are_not_equal_drafts() -> None:
    none = [replace(token, draft_digests=()) for token in TOKENS]
    assert not row_of(MTP, none, DONE, PLAIN, replace(DRAFTING, draft_digests=((), (), ()))).drafts_equal
    assert row_of(MTP, none, replace(DONE, speculation=None), PLAIN, DRAFTING).speculation == Speculation()
