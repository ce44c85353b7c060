"""Turns: which reading a pull is a share of, what ends a row, and what is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from pdkv.cli.bench import sweep as module
from pdkv.cli.bench.cases import Case, Mode
from pdkv.cli.bench.pair import Nodes
from pdkv.cli.bench.sweep import Sweep, SweepSettings
from pdkv.cli.bench.yardsticks import Absent, Kind, Pages, Reading, YardstickSettings
from pdkv.errors import DigestMismatch, RemoteError
from tests.cli.bench.stand import Stand, play

BASE = Case(4, chunk_pages=2)
LAYERS = Case(4, source="layer_major", sink="layer_major", chunk_pages=2)


class Raw:
    """Readings of 1, 2, 3 … GB/s in the order in which they are asked for; no Mooncake."""

    made: ClassVar[list[Raw]]
    asked: ClassVar[list[tuple[Kind, Pages]]]

    def __init__(self, settings: YardstickSettings) -> None:
        self.settings = settings
        self.open = False
        Raw.made.append(self)

    def __enter__(self) -> Raw:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def measure(self, kind: Kind, pages: Pages) -> Reading | Absent:
        assert self.open
        Raw.asked.append((kind, pages))
        if kind is Kind.MOONCAKE:
            return Absent(kind, "sink: not installed")
        return Reading(kind, len(Raw.asked) * 10**9, (1.0,), (0.0,), 1, 0.0, 0.0, True)


@pytest.fixture(autouse=True)
def raw(monkeypatch: pytest.MonkeyPatch) -> type[Raw]:
    Raw.made, Raw.asked = [], []
    monkeypatch.setattr(module, "Yardsticks", Raw)
    return Raw


def swept(cases: list[Case], change: Callable[[Stand], None] = lambda stand: None, **given: Any) -> Sweep:
    found: list[Sweep] = []

    async def scenario(stand: Stand) -> None:
        change(stand)
        settings = SweepSettings(Nodes("tiny"), **{"repetitions": 2, **given})
        found.append(Sweep(settings, stand.benches, stand.sinks, lambda text: None))
        await found[0].run(cases)

    play(scenario)
    return found[0]


def test_each_turn_begins_with_the_ceiling_of_the_longest_pull(raw: type[Raw]) -> None:
    sweep = swept([BASE, Case(1, chunk_pages=2)])
    assert [(kind, len(pages.local)) for kind, pages in raw.asked] == [(Kind.NIXL_LARGEST, 4)] * 2
    assert [[s.ceiling_gb_per_s for s in row.samples] for row in sweep.rows] == [[1.0, 2.0]] * 2
    assert [row.wrong for row in sweep.rows] == [0, 0]
    assert not any(each.open for each in raw.made)


def test_baselines_read_the_same_pages_with_the_same_placement(raw: type[Raw]) -> None:
    sweep = swept([BASE, LAYERS], baselines=(Kind.MEMCPY, Kind.MOONCAKE), ceiling=False)
    page, layer = raw.made
    assert (len(page.settings.pieces), len(layer.settings.pieces)) == (1, len(Nodes("tiny").fmt.segments))
    assert [row.baselines for row in sweep.rows] == [{"memcpy": 2.0}, {"memcpy": 4.5}]
    assert [kind for kind, _ in raw.asked].count(Kind.MOONCAKE) == 1
    assert sweep.absent == {Kind.MOONCAKE: "sink: not installed"}
    first = next(pages for kind, pages in raw.asked if kind is Kind.MEMCPY)
    assert set(first.local) <= set(range(1, 6))
    assert len(first.local) == 4


def test_a_source_elsewhere_has_one_raw_source(raw: type[Raw]) -> None:
    sweep = swept([BASE, LAYERS], baselines=(Kind.MEMCPY,), raw_source="far:7101", repetitions=1)
    assert [each.settings.source_at for each in raw.made] == ["far:7101"]
    assert [bool(row.baselines) for row in sweep.rows] == [True, False]


def test_without_a_ceiling_nothing_raw_is_started(raw: type[Raw]) -> None:
    sweep = swept([Case(4, mode=Mode.COLD, chunk_pages=2)], ceiling=False, repetitions=1)
    assert not raw.made
    assert sweep.rows[0].facts()["connect_p50_ms"] > 0


def test_bytes_that_were_refused_end_their_row_and_no_other() -> None:
    def refusing(stand: Stand) -> None:
        pull = stand.sinks[0].pull

        async def refuse_short(wish: Any) -> Any:
            if wish.prompts[0][1].pages == 1:
                raise RemoteError("sink: DigestMismatch: bytes of 1 page", kind=DigestMismatch.__name__)
            return await pull(wish)

        stand.sinks[0].pull = refuse_short  # type: ignore[method-assign]

    sweep = swept([BASE, Case(1, chunk_pages=2)], refusing)
    assert [(row.wrong, len(row.samples)) for row in sweep.rows] == [(0, 2), (1, 0)]
    assert "DigestMismatch" in sweep.rows[1].failure


def test_any_other_failure_ends_the_sweep() -> None:
    def failing(stand: Stand) -> None:
        async def fail(wish: Any) -> Any:
            raise RemoteError("sink: PeerLost: gone", kind="PeerLost")

        stand.sinks[0].pull = fail  # type: ignore[method-assign]

    with pytest.raises(RemoteError, match="PeerLost"):
        swept([BASE], failing)


def test_pages_of_a_pull_are_found_again_in_a_smaller_raw_pool() -> None:
    ids = np.array([90, 3, 40, 7, 8], np.int32)
    assert module._within(ids, 100).tolist() == ids.tolist()
    assert module._within(ids, 50).tolist() == [4, 0, 3, 1, 2]
    assert module._within(ids, 2).tolist() == [1, 0]


def test_raw_pools_are_no_larger_than_they_need_to_be(raw: type[Raw], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RAW_BYTES", 3 * Nodes("tiny").fmt.page_bytes)
    sweep = swept([BASE], baselines=(Kind.MEMCPY,), repetitions=1)
    assert [each.settings.num_pages for each in raw.made] == [3]
    assert [(kind, len(pages.local)) for kind, pages in raw.asked] == [(Kind.NIXL_LARGEST, 3), (Kind.MEMCPY, 3)]
    assert sweep.rows[0].wrong == 0
