"""What the demo found, as an object and as tables: nothing that failed or is missing is shown as held."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from pdkv.cli.demo.report import (
    CHECKS,
    ControlRow,
    RefusalRow,
    Report,
    RequestRow,
    check_table,
    control_table,
    mark,
    pressed_table,
    request_table,
    speculative_table,
)
from pdkv.node.messages import Shipment

SHIPMENT = Shipment(
    prompt_tokens=2156,
    pages_total=34,
    pages_hit=29,
    pages_shipped=5,
    bytes_main=1_679_360,
    bytes_index=168_960,
    bytes_tail=369_664,
    bytes_backend=1_848_320,
    digests_verified=5,
    chunks=1,
    prefill_s=0.81,
    transfer_s=0.002,
    exposed_transfer_s=0.0088,
)
ROW = RequestRow("shared-0", "shared prefix", 16, SHIPMENT, 29, tokens_equal=True, logits_equal=True)
SPECULATIVE = {
    "name": "oracle-greedy",
    "steps": 14,
    "drafted": 27,
    "accepted": 17,
    "rolled_back_tokens": 10,
    "mean_accepted_length": 2.214,
    "tokens_equal": True,
    "logits_equal": True,
    "drafts_equal": True,
}
HELD = dict.fromkeys(CHECKS, True)
ASKED_FOR = {
    "prompt_tokens",
    "output_tokens",
    "pages_total",
    "pages_hit",
    "pages_shipped",
    "bytes_main",
    "bytes_index",
    "bytes_tail",
    "digests_verified",
    "tokens_equal",
    "logits_equal",
    "prefill_s",
    "exposed_transfer_s",
    "transfer_gb_s",
}


PRESSED = {"name": "offload-first", "preemptions": 3, "pages_hit": 17, "pages_shipped": 12, "tokens_equal": True}


def full_report() -> Report:
    return Report(
        backend="nixl UCX",
        lane="cma",
        requests=[ROW],
        controls=[ControlRow("flip-bit", "page 4 main", "DATA_LOSS: page 4 main", ok=True)],
        refusals=[RefusalRow("rollback_tokens", "rollback_tokens", "4", "0", ok=True)],
        speculative=[dict(SPECULATIVE)],
        pressed=[dict(PRESSED)],
        checks=dict(HELD),
        elapsed_s=50.0,
    )


def shown(table: RenderableType) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_ok_when_every_check_held() -> None:
    assert full_report().ok


def test_nothing_done_is_not_ok() -> None:
    assert not Report().ok


@pytest.mark.parametrize("name", CHECKS)
def test_one_check_that_failed_or_was_not_made_is_enough(name: str) -> None:
    report = full_report()
    report.checks[name] = False
    assert not report.ok
    assert report.as_dict()["ok"] is False
    del report.checks[name]
    assert not report.ok
    assert report.as_dict()["checks"] == {**HELD, name: False}


def test_the_object_has_what_was_asked_for() -> None:
    made = json.loads(json.dumps(full_report().as_dict()))
    assert (made["ok"], made["backend"], made["lane"]) == (True, "nixl UCX", "cma")
    (request,) = made["requests"]
    assert set(request) >= ASKED_FOR
    assert request["bytes_main"] == SHIPMENT.bytes_main
    assert request["transfer_gb_s"] == pytest.approx(1_848_320 / 0.002 / 1e9)
    assert made["refusals"] == [
        {"node": "rollback_tokens", "field": "rollback_tokens", "mine": "4", "theirs": "0", "ok": True}
    ]


def test_no_read_is_no_rate() -> None:
    assert replace(ROW, shipment=Shipment()).transfer_gb_s == 0.0


def test_tables_show_the_same_values() -> None:
    report = full_report()
    requests = shown(request_table(report.requests))
    for figure in ("shared-0", "2,156", "29", "5", "1.85", "0.92", "0.81 s", "8.8 ms"):
        assert figure in requests
    drafts = shown(speculative_table(report))
    for figure in ("oracle-greedy", "14", "27", "17", "10", "2.21"):
        assert figure in drafts
    pressed = shown(pressed_table(report))
    for figure in ("offload-first", "3", "17", "12"):
        assert figure in pressed
    controls = shown(control_table(report))
    for words in ("flip-bit", "DATA_LOSS: page 4 main", "rollback_tokens", "mine   4", "theirs 0"):
        assert words in controls
    checks = shown(check_table(report))
    assert all(words in checks for words in CHECKS.values())


def test_tables_mark_what_failed() -> None:
    report = full_report()
    for table in (request_table(report.requests), control_table(report), check_table(report)):
        assert "✓" in shown(table)
        assert "✗" not in shown(table)
    assert "✗" not in shown(speculative_table(report))
    report.speculative[0]["drafts_equal"] = False
    assert shown(speculative_table(report)).count("✗") == 1
    assert "✗" not in shown(pressed_table(report))
    report.pressed[0]["tokens_equal"] = False
    assert shown(pressed_table(report)).count("✗") == 1
    bad = replace(ROW, tokens_equal=False)
    assert shown(request_table([bad])).count("✗") == 1
    report.controls[0] = replace(report.controls[0], ok=False)
    report.refusals[0] = replace(report.refusals[0], ok=False)
    assert shown(control_table(report)).count("✗") == 2
    report.checks["bytes"] = False
    del report.checks["killed"]
    made = shown(check_table(report))
    assert (made.count("✗"), made.count("…")) == (1, 1)


def test_marks() -> None:
    assert [mark(ok).plain for ok in (True, False, None)] == ["✓", "✗", "…"]
