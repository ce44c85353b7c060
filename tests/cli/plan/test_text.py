"""What an operator reads first, and what only when it was asked for."""

from typing import Any

import pytest

from pdkv.cli.plan.complaints import Answers
from pdkv.cli.plan.figures import make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.cli.plan.text import findings_text, gb, plan_text, show
from pdkv.geometry.diagnose import Finding


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not cut off where the terminal is narrow."""
    monkeypatch.setenv("COLUMNS", "40")


def said(capsys: pytest.CaptureFixture[str], model: str = "glm-5.3", **options: Any) -> str:
    show(plan_text(make_plan(PlanOptions(model=model, **options))))
    return capsys.readouterr().out


def test_the_default_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, memory="56GB", context=[1_048_576])
    assert len(out.splitlines()) < 16
    assert "168 pages short, 577,450,240 B more" in out
    assert "fits with: dcp 2; dcp 4; dcp 8; row 576 (fp8); row 352 (nvfp4)" in out
    assert "What if" not in out
    assert "--details" in out


def test_weights_by_part_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, gpu="h200", gpus=8, context=[1_048_576], reserve="1GB")
    for words in (
        "8 x h200 (tp 8, dp 1, ep 8, dcp 1, pp 1)",
        "135.68 GB static: 0.9 of 150.75 GB",
        "94.68 GB weights, fp8: routed experts 90.62, attention 2.71",
        "1.00 GB reserved",
        "0.27 GB top-k buffer and page tables",
        "39.73 GB pages",
        "b200; gb200; b300",
    ):
        assert words in out
    assert len(out.splitlines()) < 24


def test_what_stands_only_where_it_matters(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, gpu="h200", gpus=32, dp=2, pp=2, dcp=2)
    assert "stage of layers 38-77" in out
    assert "128 tokens of context each" in out
    assert "2 of them hold" in out
    assert "no room for pages" in said(capsys, gpu="h100", gpus=8)
    assert "163,840 that the model was made for" in said(capsys, "deepseek-v3.2", context=[163_841])
    assert "no change that is known here" in said(capsys, memory="1GB")
    assert "256 output + 5 drafts" in said(capsys, memory="1GB", draft_tokens=5)


def test_a_hit_says_what_it_does_not_save(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, hit=524_288, short_requests=1000)
    assert "saves 25.00% of the index scores (P^2/L^2) and 50.00% of other work" in out
    assert "not the cross term (L-P)*P: 274,877,906,944 pairs a full layer" in out
    assert "not the reads: 35.61 GB index-K of 47.96 GB are still read" in out
    assert "524,224 tokens by pairs, 524,160 by dropping a page" in out
    assert "32,000 tokens or 1.73 GB on average" in out


def test_details_are_all_sections(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, gpu="h200", gpus=8, details=True)
    for words in (
        "all layers full (78)",
        "kpool 16",
        "dcp 8",
        "1 MTP layer",
        "row 1152 (bf16)",
        "top-k buffer of 32,768 x 2,048: 268,435,456 B",
        "137,438,953,472 B, in 46 pieces of 718 rows",
        "32 rows: 134,217,728 B, whole",
        "never split under 8,000,000 elements",
        "page tables of 32 requests x 1: 2,097,664 B",
        "90,832,896 B a prefill chunk, 2,772 B a decode step",
        "2,906,652,672 B a decode step, 47,959,769,088 B by the whole prefill",
        "172,032 operations",
    ):
        assert words in out
    assert "index-K slots beside 718,016 main slots of a rank: 1,436,096," in said(
        capsys, gpu="h200", gpus=8, details=True, dcp=2
    )
    without = said(capsys, details=True)
    assert "budget for scores" not in without


def test_findings_name_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Finding("a complaint", True, {"a_bytes": 12_345, "b_s": 0.123456789, "c": "words"}, "a cause", ("a way",))
    fine = Finding("another", False, {"n": 1}, "nothing wrong: as it should be")
    show(findings_text(Answers((wrong, fine), {"ttft": ("ttft_s",)})))
    out = capsys.readouterr().out
    assert "found: a cause" in out
    assert "way out: a way" in out
    assert "from: a_bytes 12,345, b_s 0.123457, c words" in out
    assert "ok: nothing wrong" in out
    assert "ttft: not looked at, needs ttft_s" in out


def test_gb() -> None:
    assert [gb(n) for n in (150_754_820_096, 10**8, 99_000_000, 0)] == ["150.75 GB", "0.10 GB", "99.00 MB", "0.00 MB"]
