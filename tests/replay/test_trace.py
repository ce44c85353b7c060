"""A trace is read whole or refused by line; a page's name stands for it and all before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.replay.trace import BLOCK_TOKENS, PageNames, TraceRequest, read_trace

SLICE = Path(__file__).with_name("conversation_300.jsonl")
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_a_real_one() -> None:
    requests = read_trace(SLICE)
    assert len(requests) == 300
    assert requests[0] == TraceRequest(0, 6758, 500, tuple(range(14)))
    assert read_trace(SLICE, limit=7) == requests[:7]


def test_blank_lines_are_none_and_a_priority_may_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "", {**GOOD, "timestamp": 1.5, "priority": -2, "more": "ignored"}, "  ")
    assert read_trace(path) == [TraceRequest(0, 600, 3, (7, 8)), TraceRequest(1.5, 600, 3, (7, 8), -2)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "trace.jsonl:2: '{' can't be used; allowed: a JSON object"),
        ("[1]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        ({k: v for k, v in GOOD.items() if k != "hash_ids"}, "trace.jsonl:2: hash_ids: not given"),
        ({**GOOD, "hash_ids": "7"}, "hash_ids"),
        ({**GOOD, "hash_ids": [7, 8.0]}, "hash_ids"),
        ({**GOOD, "hash_ids": [7]}, "hash_ids: '1 blocks' can't be used; allowed: 2: one for each 512 tokens"),
        ({**GOOD, "hash_ids": [7, 8, 9]}, "hash_ids: '3 blocks'"),
        ({**GOOD, "timestamp": None}, "timestamp: not given"),
        ({**GOOD, "timestamp": True}, "timestamp"),
        ({**GOOD, "input_length": 0}, "input_length: 0 can't be used; allowed: an integer of at least 1"),
        ({**GOOD, "input_length": 600.5}, "input_length"),
        ({**GOOD, "output_length": -1}, "output_length"),
        ({**GOOD, "output_length": "many"}, "output_length: 'many'"),
        ({**GOOD, "priority": 1.5}, "priority"),
    ],
)
def test_a_bad_line_is_named(line: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(written(tmp_path, GOOD, line, GOOD))
    assert named in str(error.value)
    assert "trace.jsonl:2" in str(error.value)
    assert len(read_trace(written(tmp_path, GOOD, line), limit=1)) == 1


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary", written(tmp_path, "", "")):
        with pytest.raises(ConfigError, match="trace"):
            read_trace(path)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 24)), max_size=8))
def test_names_are_equal_exactly_where_all_blocks_up_to_there_are(prompts: list[tuple[list[int], int]]) -> None:
    names = PageNames(64)
    means: dict[bytes, tuple] = {}
    for blocks, pages in prompts:
        pages = min(pages, 8 * len(blocks))
        named = names.of(tuple(blocks), pages)
        assert len(named) == pages
        for page, name in enumerate(named):
            meaning = (tuple(blocks[: page // 8 + 1]), page)
            assert means.setdefault(name, meaning) == meaning
    assert len(set(means.values())) == len(means)


@pytest.mark.parametrize("page_tokens", [64, 128, 512, 1])
def test_pages_of_other_sizes(page_tokens: int) -> None:
    per_block = BLOCK_TOKENS // page_tokens
    assert len(set(PageNames(page_tokens).of((1, 2), 2 * per_block))) == 2 * per_block


@pytest.mark.parametrize("page_tokens", [0, -64, 48, 1024])
def test_a_block_is_whole_pages(page_tokens: int) -> None:
    with pytest.raises(ConfigError, match="page_tokens"):
        PageNames(page_tokens)
