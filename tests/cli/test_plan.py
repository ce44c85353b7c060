"""`pdkv plan` prints the golden ledger's figures, and its exit code says whether they fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.app import run

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text("utf-8"))


def plan(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(["plan", *args])
    return ended.value.code


def planned(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    assert plan(*args, "--json") == code
    made = json.loads(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def test_glm(capsys: pytest.CaptureFixture[str]) -> None:
    want, made = GOLDEN["glm-5.3"], planned(capsys, "--model", "glm-5.3")
    assert made["bytes_per_token"] == {"main": 51168, "index": 2772, "total": want["bytes_per_token"]}
    assert made["bytes_per_page"]["total"] == want["bytes_per_page"]
    assert len(made["full_layers"]) == want["full_layers"]
    assert [
        {
            "tokens": c["tokens"],
            "pages": c["pages"],
            "main_bytes": c["bytes"]["main"],
            "index_bytes": c["bytes"]["index"],
            "total_bytes": c["bytes"]["total"],
        }
        for c in made["contexts"]
    ] == want["contexts"]
    assert round(made["contexts"][-1]["seconds"], 4) == GOLDEN["1m request"]["total_seconds_at_400gbps"]
    assert made["pool"] is None


def test_the_table_has_the_same_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # figures are not cut off where the terminal is narrow
    monkeypatch.setenv("COLUMNS", "40")
    assert plan("--model", "glm-5.3", "--memory", "56000000000") == 3
    out = capsys.readouterr().out
    for context in GOLDEN["glm-5.3"]["contexts"]:
        for figure in context.values():
            assert f"{figure:,}" in out
    assert "16,220 pages" in out
    assert "168 pages short, 577,450,240 B more" in out


@pytest.mark.parametrize("want", GOLDEN["pool sizes"], ids=lambda w: str(w["available_bytes"]))
def test_fit(want: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--context", "1048576", "--memory", str(want["available_bytes"]))
    for output, fits in (
        ("0", want["fits_1048576_tokens"]),
        ("256", want["fits_1048576_prompt_plus_256_output"]),
    ):
        made = planned(capsys, *args, "--output-tokens", output, code=0 if fits else 3)
        pool, fit = made["pool"], made["contexts"][0]["fit"]
        assert (pool["usable_pages"], pool["usable_tokens"]) == (want["usable_pages"], want["usable_tokens"])
        assert pool["fits"] == fit["fits"] == fits
        assert fit["missing_pages"] == max(fit["needed_pages"] - want["usable_pages"], 0)


def test_missing_bytes_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--context", "1048576", "--memory")
    short = planned(capsys, *args, "55GB", code=3)["contexts"][0]["fit"]["missing_bytes"]
    assert planned(capsys, *args, str(55 * 10**9 + short))["pool"]["fits"]
    planned(capsys, *args, str(55 * 10**9 + short - 1), code=3)


@pytest.mark.parametrize("args", [("--model", "glm-5.3-mtp"), ("--model", "glm-5.3", "--draft-layers", "1")])
def test_draft_layers(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    want = GOLDEN["glm-5.3 with one MTP layer (own main KV and own index-K)"]
    made = planned(capsys, *args)
    assert made["bytes_per_token"]["total"] == want["bytes_per_token"]
    assert (made["bytes_per_page"]["total"], made["segments"]) == (want["bytes_per_page"], want["regions"])


def test_other_rows_rates_and_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--main-row", "bf16", "--gbps", "200", "--context", "1", "--context", "65")
    made = planned(capsys, *args)
    assert made["bytes_per_page"]["total"] == GOLDEN["glm-5.3, main row 1152 B"]["bytes_per_page"]
    assert [c["pages"] for c in made["contexts"]] == [1, 2]
    assert made["contexts"][0]["seconds"] == pytest.approx(5_928_192 * 8 / 200e9)


def test_a_config_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pdkv.geometry.model_config import load_config

    config = {**load_config("glm-5.3"), "index_kpool": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    made = planned(capsys, "--model", str(tmp_path))
    want = GOLDEN["glm-5.3, index_kpool 2 (page 128 tokens, index page still 64 rows)"]
    assert made["bytes_per_token"]["index"] == want["index_bytes_per_token"]
    assert made["page_tokens"] == 128


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--model", "glm-9"), "model"),
        (("--model", "glm-5.3", "--memory", "lots"), "memory"),
        (("--model", "glm-5.3", "--main-row", "int8"), "main_row"),
        (("--model", "glm-5.3", "--context", "0"), "context"),
        (("--model", "glm-5.3", "--gbps", "0"), "gbps"),
        (("--model", "glm-5.3", "--output-tokens", "-1"), "output_tokens"),
        (("--model", "glm-5.3", "--draft-layers", "-1"), "draft_layers"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*args) == 2
    assert capsys.readouterr().err.startswith(f"pdkv: ConfigError: {field}: ")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--help") == 0
    out = capsys.readouterr().out
    assert "Examples" in out
    assert "pdkv plan --model glm-5.3" in out


def test_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--gpu", "h200", "--gpus", "8", "--context", "1048576")
    made = planned(capsys, *args, code=3)
    assert made["pool"]["usable_tokens"] < 1_048_832
    assert made["contexts"][0]["fit"]["would_fit"][0] == "dcp 2"
    assert planned(capsys, *args, "--dcp", "2")["pool"]["fits"]


def test_a_diagnosis_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--diagnose", "pool", "--given", "memory_bytes=56GB")
    made = planned(capsys, *args, "--given", "usable_pages=15536", code=3)
    assert "39 layers with index-K instead of 21" in made["findings"][0]["finding"]
    assert not planned(capsys, *args, "--given", "usable_pages=16220")["wrong"]
    assert plan(*args, "--given", "usable_pages=15536") == 3
    assert "way out: " in capsys.readouterr().out
    assert plan(*args, "--given", "weather=bad") == 2


def test_a_plot_beside_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(capsys, "--model", "tiny", "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert plan("--model", "tiny", "--plot", str(tmp_path / "plan.doc")) == 2


def test_help_names_every_number_of_a_complaint(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    from pdkv.cli.plan import HELP
    from pdkv.cli.plan.complaints import COMPLAINTS

    keys = HELP.partition("Keys of --given")[2]
    for name, (facts, _) in COMPLAINTS.items():
        line = keys.partition(f"{name}: ")[2].partition(".")[0]
        assert [key.strip() for key in line.split(",")] == [f.name for f in fields(facts)]


WHOLE = (
    *("--model", "glm-5.3", "--gpu", "h200", "--gpus", "16", "--tp", "8", "--dp", "2", "--ep", "16", "--dcp", "2"),
    *("--pp", "1", "--weights", "fp8", "--context", "1048576", "--hit", "100000", "--short-requests", "1000"),
    *("--requests", "32", "--groups", "2", "--gbps", "400", "--draft-tokens", "5", "--output-tokens", "256"),
)


def test_one_plan_says_all_that_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(capsys, *WHOLE, "--plot", str(tmp_path / "all.png"))
    assert (tmp_path / "all.png").stat().st_size > 10_000
    rank, context, index, room = made["rank"], made["contexts"][0], made["index_traffic"], made["workspaces"]
    assert rank["layout"] == {"gpus": 16, "tp": 8, "dp": 2, "ep": 16, "dcp": 2, "pp": 1}
    # weights in bytes by part, and what they and the fixed buffers leave for pages
    total = rank["weight_bytes"].pop("total")
    assert total == sum(rank["weight_bytes"].values()) > 40 * 10**9
    fixed = rank["topk_buffer_bytes"] + rank["page_table_bytes"] + rank["reserve_bytes"]
    assert rank["left_bytes"] == rank["static_bytes"] - total - fixed == made["pool"]["memory_bytes"]
    # whether a request fits, in local pages of 128 tokens
    assert context["fit"]["fits"]
    assert context["fit"]["needed_pages"] == -(-(1_048_576 + 256 + 5) // 128)
    # both caches a token, page, context
    assert made["bytes_per_token"] == {"main": 51_168, "index": 2_772, "total": 53_940}
    assert made["bytes_per_page"]["total"] == 3_452_160
    assert context["bytes"]["total"] == 56_560_189_440
    assert made["pool"]["usable_tokens"] == 128 * made["pool"]["usable_pages"]
    # what a change does: layers, pooling, DCP, MTP, rows
    changes = {v["change"]: v["pool_tokens"] for v in made["what_if"]}
    planned_tokens = changes.pop("as planned")
    for change in ("all layers full (78)", "1 MTP layer", "row 1152 (bf16)"):
        assert changes.pop(change) < planned_tokens
    for change in ("kpool 2", "dcp 4", "row 576 (fp8)", "row 352 (nvfp4)"):
        assert changes.pop(change) > planned_tokens
    # workspaces: drafts multiply the rows, columns are aligned, small matrices stay whole
    assert room["topk_buffer_bytes"] == 268_435_456
    assert room["decode_rows"] == 32 * 6
    assert room["prefill"]["rows_per_chunk"] == 718
    # tails of short requests
    assert made["tail_waste"]["average_bytes"] == 1000 * 3_452_160 // 2
    # a hit saves P^2/L^2 of the scores; not the cross term, and not the reads
    hit = made["hit"]
    assert hit["scores_share"] == pytest.approx((99_968 / 1_048_576) ** 2)
    assert hit["cross_pairs"] == 99_968 * (1_048_576 - 99_968)
    assert 0.9 < hit["index_read_bytes"] / hit["index_read_without_bytes"] < 1
    # index-K written a chunk, read a step
    assert (index["written_per_chunk_bytes"], index["read_per_step_bytes"]) == (90_832_896, 2_906_652_672)
    # page tables of so many requests and groups, and the time on the link
    assert room["table_row_per_token_bytes"] == 4 * (1_048_576 + 256 + 5) * 32 * 2
    assert room["table_row_per_page_bytes"] == 4 * context["fit"]["needed_pages"] * 32 * 2
    assert round(context["seconds"], 4) == 1.1312


def test_the_text_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*WHOLE, "--details") == 0
    out = capsys.readouterr().out
    for words in (
        *("16 x h200 (tp 8, dp 2, ep 16, dcp 2, pp 1)", "routed experts", "56,560,189,440", "1.1312", "fits"),
        *("all layers full (78)", "kpool 2", "dcp 4", "1 MTP layer", "row 576 (fp8)", "268,435,456 B", "718 rows"),
        *("Tails of 1,000 short requests", "(P^2/L^2)", "not the cross term", "not the reads", "90,832,896 B"),
        *("2,906,652,672 B a decode step", "page tables of 32 requests x 2"),
    ):
        assert words in out


def test_cards_on_which_not_even_the_weights_fit(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "glm-5.3", "--gpu", "h200", "--gpus", "4", "--context", "1048576")
    made = planned(capsys, *args, code=3)
    assert (made["pool"]["usable_pages"], made["rank"]["left_bytes"] < 0) == (0, True)
    assert made["contexts"][0]["fit"]["would_fit"][0] == "gpus 8 with tp 8, ep 8, dcp 2"
    assert planned(capsys, *args[:5], "8", *args[6:], "--dcp", "2")["pool"]["fits"]
    assert plan(*args) == 3
    assert "fits with: gpus 8 with tp 8, ep 8, dcp 2; " in capsys.readouterr().out
