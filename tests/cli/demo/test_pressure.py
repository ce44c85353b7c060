"""The demo's part on small pools: what is compared, and that each difference shows. That it runs is in test_run.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.pressure import AGAIN, POLICIES, PressureRow, pressure_checks, row_of
from pdkv.cli.demo.report import CHECKS
from pdkv.node.messages import GenerateDone, Shipment, Token

PAGES = {"cold": (0, 10), "again": (9, 1), "other": (0, 10), "evicted": (4, 6)}
PAIRS = [
    PressureRow(f"{policy}-{which}", 16, int(which == "first"), 10, 0, 10, True, True)
    for policy in POLICIES
    for which in ("first", "second")
]
ROWS = [*PAIRS, *(PressureRow(name, 16, 0, 10, *PAGES[name], True, name == "cold") for name in AGAIN)]


def checked(name: str, **changes: object) -> dict[str, bool]:
    return pressure_checks([replace(row, **changes) if row.name == name else row for row in ROWS])  # type: ignore[arg-type]


def test_its_checks_are_in_the_report() -> None:
    assert pressure_checks(ROWS) == {"preempted": True, "shipped_again": True}
    assert set(pressure_checks(ROWS)) <= set(CHECKS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_another_token_in_any_answer_fails(row: PressureRow) -> None:
    part = "shipped_again" if row.name in AGAIN else "preempted"
    assert checked(row.name, tokens_equal=False) == {"preempted": True, "shipped_again": True} | {part: False}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_never_gave_way_shows_nothing(policy: str) -> None:
    assert not checked(f"{policy}-first", preemptions=0)["preempted"]


def test_bytes_from_host_memory_give_the_same_logits() -> None:
    assert not checked("offload-first", logits_equal=False)["preempted"]
    assert checked("recompute-first", logits_equal=False)["preempted"]


@pytest.mark.parametrize(
    ("name", "hit", "shipped"), [("cold", 1, 9), ("again", 8, 2), ("evicted", 9, 1), ("evicted", 4, 5)]
)
def test_pages_are_where_they_are_said_to_be(name: str, hit: int, shipped: int) -> None:
    assert not checked(name, pages_hit=hit, pages_shipped=shipped)["shipped_again"]


@pytest.mark.parametrize("left_out", range(len(ROWS)))
def test_what_was_not_made_failed(left_out: int) -> None:
    assert not any(pressure_checks([row for i, row in enumerate(ROWS) if i != left_out]).values())


def test_a_row_is_what_was_compared() -> None:
    said = [Token(0, 7, -1.0, 70), Token(1, 8, -1.0, 80)]
    done = GenerateDone("length", 2, Shipment(pages_total=3, pages_hit=1, pages_shipped=2), preemptions=4)
    row = row_of("r", said, done, MonolithAnswer((7, 8), (70, 81), (), 0))
    assert row.as_dict() == {
        "name": "r",
        "output_tokens": 2,
        "preemptions": 4,
        "pages_total": 3,
        "pages_hit": 1,
        "pages_shipped": 2,
        "tokens_equal": True,
        "logits_equal": False,
    }
    assert row_of("r", said, done, MonolithAnswer((7, 8), (70, 81), (64,), 0)).logits_equal is None
    assert not row_of("r", said[:1], done, MonolithAnswer((7, 8), (70, 80), (), 0)).tokens_equal
