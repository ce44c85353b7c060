"""Plans between groups of ranks, against a simulation that puts every token's bytes where its definition says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, Segment, page_format
from pdkv.geometry.row_format import RowFormat, RowPart
from pdkv.geometry.sharding import Move, Sharding, ShardPlan, plan_shards, rank_segments, replicated

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ledger.json").read_text("utf-8"))
SHAPE = model_shape(load_config("glm-5.3"))
MTP = model_shape(load_config("glm-5.3-mtp"))
PAGE = 8
ROW, INDEX, PENDING = 5, 24, 7
"""Bytes of a main row, of an index page and of the pending keys of the little page that is simulated."""


def small(kpool: int) -> PageFormat:
    """A page of 8 tokens with every kind of segment."""
    fmt = page_format(replace(MTP, num_layers=1, indexer_types=("full",), index_kpool=kpool))
    lengths = {"main": PAGE * ROW, "draft_main": PAGE * ROW, "index": INDEX, "draft_index": INDEX}
    segments, offset = [], 0
    for s in fmt.segments:
        length = lengths.get(s.name.split(".")[0], PENDING)
        segments.append(replace(s, length=length, offset=offset))
        offset += length
    row = RowFormat("five", (RowPart("all", ROW, "e4m3"),), "none", "halves")
    return replace(fmt, page_tokens=PAGE, segments=tuple(segments), main_row=row, index_tokens=PAGE // kpool)


Memory = list[list[dict[str, np.ndarray]]]
"""[rank][page][segment] -> bytes."""


def empty(fmt: PageFormat, sharding: Sharding, tokens: int) -> Memory:
    pages = sharding.pages(tokens, PAGE)
    return [
        [{name: np.zeros(length, np.uint8) for name, length in rank_segments(fmt, sharding)} for _ in range(pages)]
        for _ in range(sharding.tp)
    ]


@cache
def context_bytes(segment: Segment, page: int) -> np.ndarray:
    """The bytes of one page of context; no two alike."""
    key = [page, *segment.name.encode()]
    return np.random.default_rng(key).integers(1, 256, segment.length).astype(np.uint8)


def filled(fmt: PageFormat, sharding: Sharding, tokens: int) -> Memory:
    """Token by token, from the words of the definition: deliberately without the code under test."""
    memory = empty(fmt, sharding, tokens)
    dcp, interleave = sharding.dcp, sharding.interleave
    for rank, pages in enumerate(memory):
        for segment in fmt.segments:
            mine = 0
            for token in range(tokens):
                page, slot = divmod(token, PAGE)
                content = context_bytes(segment, page)
                if segment.name.startswith("main."):
                    if token // interleave % dcp == rank % dcp:
                        place = mine % PAGE * ROW
                        pages[mine // PAGE][segment.name][place : place + ROW] = content[slot * ROW : (slot + 1) * ROW]
                        mine += 1
                elif segment.name.startswith("draft_main."):
                    place = (page % dcp * PAGE + slot) * ROW
                    pages[page // dcp][segment.name][place : place + ROW] = content[slot * ROW : (slot + 1) * ROW]
                else:  # an index page and its pending keys are one block each, whatever is in it
                    place = page % dcp * segment.length
                    pages[page // dcp][segment.name][place : place + segment.length] = content
    return memory


def spans(plan: ShardPlan, source: Memory, target: Memory) -> Iterator[tuple[tuple[int, int], Move, int, int]]:
    """Every move of a context: ranks, move, and the pages of either side."""
    for (a, b), moves in plan.moves.items():
        for move in moves:
            span = 0
            while span * plan.source_pages < len(source[0]) or span * plan.target_pages < len(target[0]):
                pages = span * plan.source_pages + move.source_page, span * plan.target_pages + move.target_page
                if pages[0] < len(source[0]) and pages[1] < len(target[0]):
                    yield (a, b), move, *pages
                span += 1


def carried_out(plan: ShardPlan, source: Memory, target: Memory) -> Counter[tuple[int, int, str, int]]:
    """Copy, and count how often each target byte was written."""
    written: Counter[tuple[int, int, str, int]] = Counter()
    for (a, b), move, source_page, target_page in spans(plan, source, target):
        for i in range(move.count):
            start, stop = (
                o + i * s
                for o, s in ((move.source_offset, move.source_stride), (move.target_offset, move.target_stride))
            )
            taken = source[a][source_page][move.segment][start : start + move.length]
            assert len(taken) == move.length
            target[b][target_page][move.segment][stop : stop + move.length] = taken
            written.update((b, target_page, move.segment, at) for at in range(stop, stop + move.length))
    return written


def same(one: Memory, other: Memory) -> bool:
    return all(
        np.array_equal(mine[name], theirs[name])
        for ranks in zip(one, other, strict=True)
        for mine, theirs in zip(*ranks, strict=True)
        for name in mine
    )


SHARDINGS = (
    Sharding(),
    Sharding(tp=2),
    Sharding(tp=2, dcp=2),
    Sharding(tp=4, dcp=2, interleave=PAGE),
    Sharding(tp=4, dcp=4, interleave=2),
    Sharding(tp=3, dcp=3, interleave=4),
    Sharding(tp=6, dcp=3),
    Sharding(tp=4, dcp=4, interleave=PAGE),
)
PAIRS = [(a, b) for a in SHARDINGS for b in SHARDINGS]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_every_byte_of_every_rank_comes_to_its_place(source: Sharding, target: Sharding) -> None:
    fmt = small(kpool=2)
    plan = plan_shards(fmt, source, target)
    for tokens in (plan.span_pages * PAGE, 2 * plan.span_pages * PAGE - 3, 3 * PAGE + 1, 1):
        got = empty(fmt, target, tokens)
        written = carried_out(plan, filled(fmt, source, tokens), got)
        assert same(got, filled(fmt, target, tokens)), tokens
        assert set(written.values()) == {1}, "a byte was read twice"


def test_control_a_plan_of_another_layout_is_noticed() -> None:
    """Each wrong in one thing: DCP size, interleave, which rank is whose."""
    fmt, tokens = small(kpool=1), 6 * PAGE
    source, target = Sharding(tp=2, dcp=2), Sharding(tp=4, dcp=4)
    right = filled(fmt, target, tokens)
    wrong = [
        plan_shards(fmt, Sharding(tp=2, dcp=2, interleave=2), target),
        plan_shards(fmt, source, Sharding(tp=4, dcp=4, interleave=PAGE)),
        plan_shards(fmt, source, Sharding(tp=4, dcp=2)),
    ]
    plan = plan_shards(fmt, source, target)
    wrong.append(replace(plan, moves={(a ^ 1, b): moves for (a, b), moves in plan.moves.items()}))
    wrong.append(replace(plan, moves={(a, b ^ 1): moves for (a, b), moves in plan.moves.items()}))
    wrong.append(replace(plan, moves={pair: moves[:-1] for pair, moves in plan.moves.items()}))
    for other in wrong:
        got = empty(fmt, target, tokens)
        carried_out(other, filled(fmt, source, tokens), got)
        assert not same(got, right)
    carried_out(plan, filled(fmt, source, tokens), got := empty(fmt, target, tokens))
    assert same(got, right)


def test_pages_stay_whole_where_they_can() -> None:
    """Equal groups, and page-wise interleave, move pages; token-wise interleave moves strided rows."""
    fmt = page_format(SHAPE)
    same_shards = plan_shards(fmt, Sharding(4, 4), Sharding(8, 4)).moves[0, 4]
    assert {(m.length, m.count) for m in same_shards if m.segment == "main.0"} == {(64 * 656, 1)}
    assert {(m.length, m.count) for m in same_shards if m.segment == "index.0"} == {(4 * 8448, 1)}
    by_page = plan_shards(fmt, Sharding(), Sharding(2, 2, 64)).moves[0, 1]
    main = [m for m in by_page if m.segment == "main.0"]
    assert [(m.source_page, m.target_page, m.length) for m in main] == [(1, 0, 64 * 656)]
    by_token = plan_shards(fmt, Sharding(), Sharding(2, 2)).moves[0, 1]
    rows = [m for m in by_token if m.segment == "main.0"]
    assert [(m.source_page, m.source_offset, m.source_stride, m.count, m.length) for m in rows] == [
        (0, 656, 1312, 32, 656),
        (1, 656, 1312, 32, 656),
    ]
    assert [(m.target_offset, m.target_stride) for m in rows] == [(0, 656), (32 * 656, 656)]


def test_four_shards_to_two_as_vllm_pairs_them() -> None:
    """With pages interleaved, target 0 reads source ranks 0 and 2, target 1 ranks 1 and 3 (pull request 50611)."""
    plan = plan_shards(page_format(SHAPE), Sharding(4, 4, 64), Sharding(2, 2, 64))
    assert {pair for pair, moves in plan.moves.items() if any(m.segment == "main.0" for m in moves)} == {
        (0, 0),
        (2, 0),
        (1, 1),
        (3, 1),
    }


def test_targets_spread_over_equal_sources() -> None:
    fmt = page_format(SHAPE)
    assert set(plan_shards(fmt, Sharding(tp=8), Sharding(tp=4)).moves) == {(i, i) for i in range(4)}
    assert set(plan_shards(fmt, Sharding(tp=2), Sharding(tp=4)).moves) == {(0, 0), (1, 1), (0, 2), (1, 3)}
    assert set(plan_shards(fmt, Sharding(4, 2), Sharding(4, 4)).moves) == {(i, i) for i in range(4)}


@pytest.mark.parametrize("want", GOLDEN["dcp"], ids=lambda w: str(w["dcp"]))
def test_a_ranks_page_is_what_the_ledger_says(want: dict[str, int]) -> None:
    sharding = Sharding(want["dcp"], want["dcp"])
    for shape, key in ((SHAPE, "bytes_per_local_token"), (MTP, "with_one_mtp_layer")):
        size = sum(length for _, length in rank_segments(page_format(shape), sharding))
        assert size == 64 * want[key] == ledger.slot_page_bytes(shape, dcp=want["dcp"]).total


@pytest.mark.parametrize("want", GOLDEN["dcp index slots"], ids=lambda w: str(w["dcp"]))
def test_index_slots_are_those_of_all_pages_but_a_sink(want: dict[str, int]) -> None:
    """`num_pages` pages of a rank, the sink among them, hold dcp index pages of 64 rows each."""
    num_pages = want["size"] // want["page_tokens"] + 1
    index_bytes = dict(rank_segments(page_format(SHAPE), Sharding(want["dcp"], want["dcp"])))["index.0"]
    assert num_pages * (index_bytes // 132) - want["page_tokens"] == want["index_slots"]
    assert ledger.dcp_index_slots(want["size"], want["page_tokens"], want["dcp"]) == want["index_slots"]


def test_what_is_replicated() -> None:
    kinds = {s.name.split(".")[0]: replicated(s) for s in page_format(replace(MTP, index_kpool=2)).segments}
    assert [kind for kind, everywhere in kinds.items() if not everywhere] == ["main"]
    assert len(kinds) == 6


@pytest.mark.parametrize(
    ("facts", "field"),
    [({"tp": 0}, "tp"), ({"dcp": 0}, "dcp"), ({"tp": 4, "dcp": 3}, "dcp"), ({"interleave": 0}, "interleave")],
)
def test_groups_that_can_t_be(facts: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sharding(**facts)
    assert error.value.fields["field"] == field


def test_a_run_of_tokens_must_not_cross_a_page() -> None:
    with pytest.raises(ConfigError, match="interleave"):
        plan_shards(page_format(SHAPE), Sharding(), Sharding(2, 2, 48))
