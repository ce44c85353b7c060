"""The raw baselines' own parts: layout, content and its check, pace, messages."""

from __future__ import annotations

import ast
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from pdkv.cli.bench import raw

PIECES = [[40, 0, 64, 0, 40], [24, 40, 64, 40 * 6, 24]]
"""Page-major at the sink, layer-major at the source."""


def pool(role: str, seed: int = 1) -> raw.Pool:
    return raw.Pool(role, {"pieces": PIECES, "pages": 6, "seed": seed, "tuned": False, "spin": False, "ucx": {}})


def copied(sink: raw.Pool, source: raw.Pool, order: raw.Order) -> None:
    for (to, length), (at, _) in zip(sink.here.spans(order[0]), source.there.spans(order[1]), strict=True):
        sink.memory.array[to : to + length] = source.memory.array[at : at + length]


def test_it_imports_nothing_of_pdkv() -> None:
    tree = ast.parse(Path(raw.__file__).read_text("utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.partition(".")[0] == "pdkv"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_a_copy_is_right_and_any_other_is_not() -> None:
    source, sink = pool("source"), raw.Role(pool("sink"))
    order = ([5, 0, 3], [1, 2, 4])
    places = sink.places(order)
    assert len(places) == 6
    assert sink.pool.wrong(places) == 6
    copied(sink.pool, source, order)
    assert sink.pool.wrong(places) == 0
    assert sink.pool.wrong(sink.places(([5, 0, 3], [1, 4, 2]))) == 4
    assert sink.pool.wrong(raw.Role(pool("sink", seed=2)).places(order)) == 6
    sink.pool.memory.array[5 * 64 + 41] ^= 1
    assert sink.pool.wrong(places) == 1


def test_the_largest_descriptor_is_the_start_of_the_sources_region() -> None:
    source, sink = pool("source"), raw.Role(pool("sink"))
    sink.name = "nixl_largest"
    places = sink.places(([0, 1, 2, 3], [3, 2, 1, 0]))
    # 4 pages are 256 B: the six first pieces, which are 240 B, and none of the second
    assert [span for span, _ in places] == [(40 * page, 40) for page in range(6)]
    sink.pool.memory.array[:240] = source.memory.array[:240]
    assert sink.pool.wrong(places) == 0
    assert len(sink.places((list(range(6)), list(range(6))))) == 12


def test_descriptors_name_the_spans() -> None:
    layout = pool("sink").here
    table, index = layout.table(1000), layout.indices([5, 2])
    rows = [(row, i % layout.pages) for i in index for row in [table[i // layout.pages]]]
    named = {(int(row[0] + page * row[3]) - 1000, int(row[1])) for row, page in rows}
    assert named == set(layout.spans([5, 2]))
    assert index.dtype == np.int32


@pytest.mark.parametrize("lengths", [[1], [raw.MESSAGE_BYTES], [raw.MESSAGE_BYTES + 1], [3, raw.MESSAGE_BYTES, 5]])
def test_messages_are_full_but_the_last(lengths: list[int]) -> None:
    starts = [10 * raw.MESSAGE_BYTES * i for i in range(len(lengths))]
    cut = list(raw.messages(zip(starts, lengths, strict=True)))
    sizes = [sum(length for _, length in parts) for parts in cut]
    assert sum(sizes) == sum(lengths)
    assert all(size == raw.MESSAGE_BYTES for size in sizes[:-1])
    assert 0 < sizes[-1] <= raw.MESSAGE_BYTES
    ends = {start + length for start, length in zip(starts, lengths, strict=True)}
    assert ends <= {start + length for parts in cut for start, length in parts}


def test_idle_polls_sleep_longer_and_spinning_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(raw, "perf_counter", lambda: next(clock) * raw.SPIN_S / 4)
    pace = raw.Pace(spin=False)
    rests = [pace.after(lambda: None) for _ in range(20)]
    assert rests[:4] == [0.0, 0.0, 0.0, raw.FIRST_NAP_S]
    assert rests[3:] == sorted(rests[3:])
    assert rests[-1] == raw.NAP_S
    assert pace.after(lambda: sum(range(100_000))) == 0.0
    assert {raw.Pace(spin=True).after(lambda: None) for _ in range(1000)} == {0.0}


def test_only_settings_of_lanes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raw.SETTING.fullmatch("UCX_TLS")
    assert raw.SETTING.fullmatch("UCX_TCP_TX_SEG_SIZE")
    assert not raw.SETTING.fullmatch("UCX_MODULE_DIR")
    assert not raw.SETTING.fullmatch("LD_PRELOAD")
