"""A pull is a request that really moves pages; what it says of them is what was moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdkv.cli.bench.pulls import SinkNode, Wish
from pdkv.errors import IntegrityError
from pdkv.rpc.bench import BenchPrompt, Preparation
from tests.cli.bench.stand import NODE, PROMPT, Stand, play

SINK = SinkNode("tiny", 10)


async def opened(stand: Stand, *, cached: bool = True, scattered: bool = True, digests: bool = True) -> Wish:
    """Nodes that have met; the wish for the source's prompt."""
    await stand.bench.build(NODE)
    met = await stand.sinks[0].open(SINK, (stand.address,))
    assert len(met.connect_s) == len(met.lanes) == 1
    await stand.bench.prepare(Preparation(PROMPT, cached, scattered, digests))
    return Wish(((stand.address, PROMPT),), scattered=scattered, digests=digests)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_the_sources_bytes_arrive(cached: bool, digests: bool) -> None:
    async def scenario(stand: Stand) -> None:
        sink, wish = stand.sinks[0], await opened(stand, cached=cached, digests=digests)
        for _ in range(2):
            if not cached:
                await stand.bench.prepare(Preparation(PROMPT, cached=False, scattered=True, digests=digests))
            await sink.ready(wish)
            pulled = await sink.pull(wish)
            assert (await sink.digests(PROMPT) == await stand.bench.digests(PROMPT)).all()
            assert (pulled.pages, pulled.hit_pages) == (PROMPT.pages, 0)
            assert pulled.shipped.digests_verified == (PROMPT.pages + 1 if digests else 0)
            moved = pulled.shipped.bytes_main + pulled.shipped.bytes_index
            assert moved == pulled.shipped.bytes_backend == (PROMPT.pages + 1) * 369_664
            assert 0 < pulled.seconds <= pulled.admitted_s - pulled.began_s
            assert 0 < pulled.post_s < 1
            assert pulled.cpu_s > 0

    play(scenario)


def test_scattered_pages_are_descriptors_of_their_own_and_contiguous_ones_are_not() -> None:
    async def scenario(stand: Stand) -> None:
        sink, wish = stand.sinks[0], await opened(stand, scattered=False)
        await sink.ready(wish)
        merged = await sink.pull(wish)
        assert merged.descriptors_before == 7
        assert merged.shipped.descriptors < 5
        assert merged.local.tolist() == merged.remote.tolist() == [1, 2, 3, 4, 5, 6]
        await stand.bench.prepare(Preparation(PROMPT, cached=True, scattered=True, digests=True))
        wish = replace(wish, scattered=True)
        await sink.ready(wish)
        scattered = await sink.pull(wish)
        assert set(scattered.remote.tolist()) <= set(range(1, 8))
        assert scattered.shipped.descriptors > merged.shipped.descriptors

    play(scenario)


def test_what_is_there_already_is_not_pulled() -> None:
    async def scenario(stand: Stand) -> None:
        sink, wish = stand.sinks[0], replace(await opened(stand), hit_pages=4)
        await sink.ready(wish)
        pulled = await sink.pull(wish)
        assert (pulled.pages, pulled.hit_pages, len(pulled.local)) == (2, 4, 2)
        wish = replace(wish, hit_pages=PROMPT.pages)
        await sink.ready(wish)
        pulled = await sink.pull(wish)
        assert (pulled.pages, pulled.hit_pages) == (0, PROMPT.pages)
        assert pulled.seconds > 0

    play(scenario)


def test_pages_are_zero_before_they_are_pulled_and_a_pull_into_others_is_refused() -> None:
    async def scenario(stand: Stand) -> None:
        sink, wish = stand.sinks[0], await opened(stand)
        await sink.ready(wish)
        await sink.pull(wish)
        pool = sink._open.parts.pool  # type: ignore[attr-defined]
        view = pool.piece_view(pool.pieces(next(iter(pool._pieces)))[0]).numpy()
        assert view[1:7].any(axis=1).all()
        await sink.ready(wish)
        assert not view[1:8].any()
        await sink.pull(wish)
        with pytest.raises(IntegrityError, match="not made ready"):
            await sink.pull(Wish(((stand.address, BenchPrompt(2, 2)),)))

    play(scenario)


def test_damage_is_found_by_the_comparison() -> None:
    async def scenario(stand: Stand) -> None:
        sink, wish = stand.sinks[0], replace(await opened(stand), damaged_pages=2)
        await sink.ready(wish)
        await sink.pull(wish)
        differ = await sink.digests(PROMPT) != await stand.bench.digests(PROMPT)
        assert np.count_nonzero(differ) == 2

    play(scenario)


def test_a_sink_that_is_not_open_says_so() -> None:
    async def scenario(stand: Stand) -> None:
        with pytest.raises(IntegrityError, match="not open"):
            await stand.sinks[0].ready(Wish(((stand.address, PROMPT),)))
        await stand.sinks[0].close()

    play(scenario)
