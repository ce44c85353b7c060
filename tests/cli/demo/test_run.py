"""The demo: run once as its own process, interrupted once, and each of its checks made to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from pdkv.cli.demo.asks import Kind, make_asks
from pdkv.cli.demo.pressure import POLICIES
from pdkv.cli.demo.report import CHECKS, Report, RequestRow
from pdkv.cli.demo.run import CONTROLS, Demo, judged
from pdkv.cli.demo.speculative import LOSSES, asks
from pdkv.errors import BadPage, DigestMismatch, listed
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.node.messages import Shipment
from tests.cli.demo.test_report import ASKED_FOR
from tests.waiting import children_of, until_ended

DEMO = [sys.executable, "-m", "pdkv.cli", "demo", "--requests", "6"]
FMT = page_format(model_shape(load_config("tiny")))


# --- the whole demo, once -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran() -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def made(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_everything_held(ran: subprocess.CompletedProcess[str], made: dict[str, Any]) -> None:
    assert (ran.returncode, made["ok"]) == (0, True), ran.stderr
    assert made["checks"] == dict.fromkeys(CHECKS, True)
    assert made["backend"].startswith("nixl")
    assert made["lane"] not in ("", "unknown")
    assert "everything held" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "never retrieved" not in ran.stderr


def test_each_request_has_its_account(made: dict[str, Any]) -> None:
    assert [r["kind"] for r in made["requests"]] == [ask.kind for ask in make_asks(6, FMT.page_tokens)]
    for r in made["requests"]:
        assert set(r) >= ASKED_FOR
        assert r["tokens_equal"] is r["logits_equal"] is True
        assert 1000 <= r["prompt_tokens"] <= 4000
        assert r["pages_total"] == -(-r["prompt_tokens"] // FMT.page_tokens) == r["pages_hit"] + r["pages_shipped"]
        assert r["bytes_main"] == r["pages_shipped"] * FMT.main_bytes
        assert r["bytes_index"] == r["pages_shipped"] * FMT.index_bytes
        assert r["bytes_tail"] == (FMT.page_bytes if r["prompt_tokens"] % FMT.page_tokens else 0)
        assert r["digests_verified"] == r["pages_shipped"] > 0
        assert r["output_tokens"] == (48 if r["kind"] == Kind.KILLED else 16)
        assert 0 < r["exposed_transfer_s"] < r["prefill_s"]
        assert r["transfer_gb_s"] > 0


def test_each_fault_was_caught_and_each_stranger_refused(made: dict[str, Any]) -> None:
    assert [row["fault"] for row in made["controls"]] == [*CONTROLS, "drop-index, digests off", *LOSSES]
    assert all(row["ok"] for row in made["controls"])
    assert {row["field"] for row in made["refusals"]} == {"indexer_types", "rollback_tokens"}
    for row in made["refusals"]:
        assert row["ok"]
        assert row["mine"] != row["theirs"]


def test_speculation_changed_nothing_and_was_used(made: dict[str, Any]) -> None:
    assert [row["name"] for row in made["speculative"]] == [ask.name for ask in asks()]
    for row in made["speculative"]:
        assert row["tokens_equal"] is row["logits_equal"] is row["drafts_equal"] is True
        assert row["drafted"] >= row["accepted"]
        assert row["rolled_back_tokens"] > 0
    assert made["speculative"][-1]["mean_accepted_length"] > 1.4


def test_small_pools_changed_nothing_and_were_too_small(made: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in made["pressed"]}
    assert all(row["tokens_equal"] for row in rows.values())
    assert all(rows[f"{policy}-first"]["preemptions"] > 0 for policy in POLICIES)
    assert rows["evicted"]["pages_shipped"] - rows["again"]["pages_shipped"] > 0


# --- interrupted ----------------------------------------------------------------------------------------------------


def test_an_interrupt_leaves_no_process() -> None:
    with subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        # both nodes serve by now, and a request runs
        while line := demo.stdout.readline():
            if line.startswith("cold: "):
                break
        others = children_of(demo.pid)
        nodes = {node for other in others for node in children_of(other)}
        assert len(nodes) == 2
        # as a terminal does, to the whole group
        os.killpg(demo.pid, signal.SIGINT)
        _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert "never retrieved" not in err
    until_ended(nodes | others, deadline_s=10)


# --- each check can fail --------------------------------------------------------------------------------------------


def rows() -> list[RequestRow]:
    """As they would be if everything held."""
    made = []
    for ask in make_asks(6, FMT.page_tokens):
        pages = -(-len(ask.tokens) // FMT.page_tokens)
        shipped = pages - ask.hit_pages
        shipment = Shipment(
            prompt_tokens=len(ask.tokens),
            pages_total=pages,
            pages_hit=ask.hit_pages,
            pages_shipped=shipped,
            bytes_main=shipped * FMT.main_bytes,
            bytes_index=shipped * FMT.index_bytes,
            bytes_backend=shipped * FMT.page_bytes,
            digests_verified=shipped,
            chunks=2,
        )
        made.append(RequestRow(ask.name, ask.kind, 16, shipment, ask.hit_pages, tokens_equal=True, logits_equal=True))
    return made


def checked(found: list[RequestRow]) -> Report:
    demo = Demo(6, say=lambda _: None, row=lambda _: None)
    demo.report.requests = found
    demo._check_requests()
    demo._reference.close()
    return demo.report


REQUEST_CHECKS = {"tokens", "logits", "chunks", "pages", "hits", "bytes", "telemetry"}


def test_rows_that_are_right_pass_every_check_of_rows() -> None:
    assert checked(rows()).checks == dict.fromkeys(REQUEST_CHECKS, True)
    assert not checked(rows()).ok, "the others were not made"


@pytest.mark.parametrize(
    ("changes", "shipment", "failed"),
    [
        ({"tokens_equal": False}, {}, {"tokens"}),
        ({"logits_equal": False}, {}, {"logits"}),
        ({}, {"chunks": 1}, {"chunks"}),
        ({}, {"pages_total": 3}, {"pages"}),
        ({}, {"prompt_tokens": 5000}, {"pages"}),
        ({"expected_hit_pages": 1}, {}, {"hits"}),
        ({}, {"bytes_main": 1}, {"bytes", "telemetry"}),
        ({}, {"bytes_index": 0}, {"bytes", "telemetry"}),
        ({}, {"digests_verified": 0}, {"bytes"}),
        ({}, {"bytes_backend": 0}, {"telemetry"}),
    ],
)
def test_one_row_that_is_wrong_fails_its_check(
    changes: dict[str, Any], shipment: dict[str, Any], failed: set[str]
) -> None:
    found = rows()
    found[0] = replace(found[0], shipment=replace(found[0].shipment, **shipment), **changes)
    assert {name for name, held in checked(found).checks.items() if not held} == failed


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_fault_must_be_named_with_its_pages_and_no_others(fault: str) -> None:
    def said(pages: dict[int, str]) -> DigestMismatch:
        bad = [BadPage(index, 100 + index, cache, 7) for index, cache in pages.items()]
        return DigestMismatch(f"bytes differ: {listed(bad)}", bad=bad)

    struck = CONTROLS[fault]
    assert judged(fault, said(struck)).ok
    fewer = dict(list(struck.items())[1:])
    other = {index: "both" if cache != "both" else "main" for index, cache in struck.items()}
    for wrong in (fewer, {**struck, 8: "index"}, other):
        assert not judged(fault, said(wrong)).ok


def test_a_row_that_is_missing_fails_every_check_of_rows() -> None:
    assert not any(checked(rows()[:-1]).checks.values())
