"""One repetition on nodes of one setup: bytes are compared whatever the nodes did, each dimension has its effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.cli.bench.cases import Case, Mode
from pdkv.cli.bench.pair import Nodes, Pair
from tests.cli.bench.stand import Stand, play

BASE = Case(6, chunk_pages=2)
NODES = Nodes("tiny")


async def paired(stand: Stand, case: Case, nodes: Nodes = NODES) -> Pair:
    pair = Pair(nodes, case.setup, stand.benches, stand.sinks)
    await pair.build([case])
    return pair


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, digests=False),
        replace(BASE, mode=Mode.STREAMING, digests=False),
        replace(BASE, mode=Mode.COLD),
        replace(BASE, source="layer_major", sink="page_major"),
        replace(BASE, hit=0.5),
        replace(BASE, read_pages=2),
    ],
    ids=str,
)
def test_every_byte_is_right_each_time(case: Case) -> None:
    async def scenario(stand: Stand) -> None:
        pair = await paired(stand, case)
        for _ in range(2):
            sample = await pair.repeat(case)
            (pulled,) = sample.pulled
            assert sample.wrong == 0
            assert sample.pages == pulled.pages == case.series * (6 - case.hit_pages)
            assert len(pulled.each_s) == case.series
            assert sample.seconds > 0
            assert sample.source_cpu_s > 0
            assert bool(sample.connect_s) == (case.mode is Mode.COLD)
            chunks = 3 if case.mode is Mode.STREAMING else 1
            assert len(pulled.local) == (6 - case.hit_pages) / chunks
            assert pulled.shipped.digests_verified == (pulled.pages + case.series if case.digests else 0)
        assert pair.lane not in ("", "unknown")
        await pair.close()

    play(scenario)


def test_layers_apart_are_descriptors_apart() -> None:
    case = replace(BASE, source="layer_major", sink="layer_major")

    async def scenario(stand: Stand) -> None:
        pair = await paired(stand, case)
        (pulled,) = (await pair.repeat(case)).pulled
        segments = len(NODES.fmt.segments)
        assert pulled.descriptors_before == case.series * 7 * segments

    play(scenario)


@pytest.mark.parametrize("digests", [True, False])
def test_bytes_that_are_not_the_sources_are_counted(digests: bool) -> None:
    async def scenario(stand: Stand) -> None:
        case = replace(BASE, digests=digests)
        pair = await paired(stand, case, replace(NODES, damaged_pages=3))
        assert (await pair.repeat(case)).wrong == 3

    play(scenario)


def test_several_sources_and_sinks_at_once() -> None:
    case = replace(BASE, sources=2, sinks=2)

    async def scenario(stand: Stand) -> None:
        pair = await paired(stand, case)
        sample = await pair.repeat(case)
        assert (sample.wrong, sample.pages) == (0, 2 * 2 * 6)
        assert [len(pulled.each_s) for pulled in sample.pulled] == [2, 2]
        assert sample.seconds >= max(pulled.seconds for pulled in sample.pulled)

    play(scenario, sources=2, sinks=2)


def test_a_prompt_that_is_cached_is_not_made_again() -> None:
    async def scenario(stand: Stand) -> None:
        pair = await paired(stand, BASE)
        prepared = []
        prepare = stand.sources[0].prepare

        async def noted(preparation: object) -> None:
            prepared.append(preparation)
            await prepare(preparation)  # type: ignore[arg-type]

        stand.sources[0].prepare = noted  # type: ignore[method-assign]
        streaming = replace(BASE, mode=Mode.STREAMING)
        for case in (BASE, BASE, replace(BASE, digests=False), streaming, streaming, BASE):
            await pair.repeat(case)
        assert [p.cached for p in prepared] == [True, False, False, True]

    play(scenario)
