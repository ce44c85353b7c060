"""`pdkv replay`: one object or table, the same figures in each, and how it ends."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.cli.app import run
from pdkv.replay import run as run_module
from tests.replay.test_trace import SLICE

TRACE = str(SLICE)


def exit_code(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run(("replay", *args))
    return ended.value.code


def object_of(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert exit_code(TRACE, *args, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_collector_leaves_the_trace_alone_while_runs_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[int] = []
    replay = run_module.replay
    monkeypatch.setattr(run_module, "replay", lambda *given: (kept.append(gc.get_freeze_count()), replay(*given))[1])
    object_of(capsys, "--pages", "80000", "--limit", "3")
    assert kept[0] > 1000
    assert gc.get_freeze_count() == 0


def test_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--pages", "80000")
    assert {k: found[k] for k in ("trace", "pages", "policy", "eagle_rule", "page_tokens", "requests", "refused")} == {
        "trace": TRACE, "pages": 80000, "policy": "lru", "eagle_rule": "none", "page_tokens": 64,
        "requests": 300, "refused": 0,
    }  # fmt: skip
    assert found["hit_rate"] == found["hit_pages"] / found["prompt_pages"]
    assert found["evicted_pages"] == 0
    assert found["us_per_request"] == sum(found["us_by_call"].values())
    assert sum(c["requests"] for c in found["hits_by_length"]) == 300
    assert [c["from"] for c in found["hits_by_length"]][:5] == [0, 1, 2, 4, 8]
    assert all(
        c["to"] + 1 == n["from"] for c, n in zip(found["hits_by_length"], found["hits_by_length"][1:], strict=False)
    )
    assert sum(v for k, v in found["census"].items() if k != "total") == 80000
    assert len(found["runs"]) == 1


def test_several_runs_and_the_first_of_them_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(
        capsys, "--pages", "9000", "--policy", "all", "--sizes", "3000, 9000,80000", "--limit", "100",
        "--eagle-rule", "drop_page", "--page-tokens", "128",
    )  # fmt: skip
    runs = [(r["pages"], r["policy"]) for r in found["runs"]]
    assert runs == [(pages, policy) for pages in (9000, 3000, 80000) for policy in ("lru", "lfu", "fifo", "priority")]
    assert found | {"trace": 0, "runs": 0} == found["runs"][0] | {"trace": 0, "runs": 0}
    assert {(r["requests"], r["eagle_rule"], r["page_tokens"]) for r in found["runs"]} == {(100, "drop_page", 128)}


def test_the_table_shows_what_the_object_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--pages", "3000")
    assert exit_code(TRACE, "--pages", "3000") == 0
    text = capsys.readouterr().out
    for figure in (f"{found['hit_rate']:.5f}", f"{found['hit_pages']:,}", f"{found['evicted_pages']:,}", "8 to 15"):
        assert figure in text


def test_a_picture_of_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.png"
    found = object_of(capsys, "--pages", "3000", "--limit", "40", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {r["policy"] for r in found["runs"]} == {"lru", "lfu", "fifo", "priority"}
    assert [r["pages"] for r in found["runs"][::4]] == [3000, 1500, 750, 375, 187, 93, 46]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((TRACE, "--pages", "0"), "pages"),
        ((TRACE, "--pages", "9", "--policy", "mru"), "lru, lfu, fifo, priority, all"),
        ((TRACE, "--pages", "9", "--eagle-rule", "two"), "none, bigram, drop_page"),
        ((TRACE, "--pages", "9", "--page-tokens", "60"), "page_tokens"),
        ((TRACE, "--pages", "9", "--sizes", "9,x"), "sizes"),
        ((TRACE, "--pages", "9", "--sizes", "9,-1"), "pages"),
        ((TRACE, "--pages", "9", "--limit", "0"), "limit"),
        ((TRACE, "--pages", "9", "--plot", "rates.txt"), "plot"),
        (("missing.jsonl", "--pages", "9"), "trace"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pdkv: ConfigError: ")
    assert named in err


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(SLICE.read_text("utf-8")[:1000], "utf-8")
    assert exit_code(str(path), "--pages", "9") == 2
    assert f"{path}:" in capsys.readouterr().err


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdkv.replay.run.Replay.step", interrupted)
    assert exit_code(TRACE, "--pages", "9", "--json") == 130
    assert capsys.readouterr() == ("", "pdkv: interrupted after 0 of 1 runs\n")
