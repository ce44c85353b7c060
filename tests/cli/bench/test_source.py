"""A source is whatever prefill node it is told to be, and knows what its pages hold."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.cli.bench.pulls import SourceSettings
from pdkv.cli.bench.source import Source
from pdkv.errors import CapacityError, ConfigError, IntegrityError, PeerLost
from pdkv.rpc.bench import BenchPrompt, Preparation, SourceNode
from tests.cli.bench.stand import NODE, PROMPT, Stand, play

CACHED = Preparation(PROMPT, cached=True, scattered=False, digests=True)


def test_a_prompt_is_cached_with_pages_that_all_differ() -> None:
    async def scenario(stand: Stand) -> None:
        await stand.bench.build(NODE)
        await stand.bench.prepare(CACHED)
        digests = await stand.bench.digests(PROMPT)
        assert digests.shape == (PROMPT.pages, 2)
        assert np.unique(digests).size == digests.size
        status = stand.sources[0].status()
        assert status.pages["cached"] == PROMPT.pages
        assert (status.leases, status.requests) == (0, 0)

    play(scenario)


def test_preparing_forgets_what_was_cached_before() -> None:
    async def scenario(stand: Stand) -> None:
        await stand.bench.build(NODE)
        await stand.bench.prepare(CACHED)
        other = BenchPrompt(2, 3)
        await stand.bench.prepare(Preparation(other, cached=True, scattered=True, digests=False))
        assert stand.sources[0].status().pages["cached"] == 3
        with pytest.raises(IntegrityError, match="in the source's cache"):
            await stand.bench.digests(PROMPT)
        await stand.bench.prepare(Preparation(other, cached=False, scattered=False, digests=True))
        assert stand.sources[0].status().pages["cached"] == 0

    play(scenario)


def test_another_node_takes_the_place_of_the_first() -> None:
    async def scenario(stand: Stand) -> None:
        await stand.bench.build(NODE)
        first = stand.sources[0].status()
        await stand.bench.build(SourceNode("tiny", 8, "layer_major", 64))
        second = stand.sources[0].status()
        assert (second.name.node, second.pages["total"]) == (first.name.node, 7)
        assert second.name != first.name
        assert second.contract.placement == "layer_major"

    play(scenario)


def test_what_can_not_be_is_refused_by_name() -> None:
    async def scenario(stand: Stand) -> None:
        with pytest.raises(PeerLost, match="not told"):
            await stand.bench.prepare(CACHED)
        with pytest.raises(ConfigError, match="pool_pages"):
            await stand.bench.build(SourceNode("tiny", 1000, "page_major", 128))
        with pytest.raises(ConfigError, match="model"):
            await stand.bench.build(SourceNode("no-such-model", 10, "page_major", 128))
        await stand.bench.build(NODE)
        with pytest.raises(CapacityError):
            await stand.bench.prepare(Preparation(BenchPrompt(1, 50), cached=True, scattered=False, digests=True))

    play(scenario)


def test_a_source_that_was_never_built_can_be_closed() -> None:
    async def scenario(stand: Stand) -> None:
        source = Source(SourceSettings())
        assert source.usage().resident_bytes > 0
        await source.close()
        await source.close()

    play(scenario)
