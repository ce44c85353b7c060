"""Two real nodes with tiny pages: what each spent, and that nothing is left out."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from pdkv.cli.bench.control_probe import Part, Span
from pdkv.cli.bench.control_run import ROLES, Case, Cost, PartCost, SideCost, _parts, middle, pair
from pdkv.errors import IntegrityError

BOTH = {
    Part.MESSAGES,
    Part.HASHING,
    Part.MATCH,
    Part.RESERVATION,
    Part.DIGESTS,
    Part.COMMIT,
    Part.ACCOUNT,
    Part.RELEASE,
}
DECODE_ONLY = {Part.ANNOUNCED, Part.PLANNING, Part.POSTING, Part.ROWS}


@pytest.fixture(scope="module")
def costs() -> list[Cost]:
    """Of 16 pages in 4 chunks; of three times as many; and of three such requests at once."""

    async def scenario() -> list[Cost]:
        async with pair(64, 256, 10.0) as nodes:
            await nodes.measure(Case(1024))
            await nodes.settle()
            found = [await nodes.measure(case) for case in (Case(1024), Case(3072), Case(1024, 3))]
            nodes._asked -= 1  # the same tokens once more are hits
            with pytest.raises(IntegrityError, match="hit"):
                await nodes.measure(Case(1024))
            return found

    return asyncio.run(scenario())


def test_both_sides_did_their_parts(costs):
    for cost in costs:
        prefill, decode = cost.sides["prefill"].parts, cost.sides["decode"].parts
        for part in BOTH:
            assert prefill[part].calls, f"prefill: {part}"
            assert decode[part].calls, f"decode: {part}"
        for part in DECODE_ONLY:
            assert decode[part].calls, f"decode: {part}"
            assert not prefill[part].calls, f"prefill: {part}"
        assert Part.ENGINE not in prefill


def test_calls_are_those_of_one_request(costs):
    four_chunks, twelve_chunks, at_once = costs
    for cost, chunks in ((four_chunks, 4), (twelve_chunks, 12), (at_once, 4)):
        assert cost.sides["prefill"].parts[Part.COMMIT].calls == chunks
        assert cost.sides["decode"].parts[Part.COMMIT].calls == chunks
        assert cost.sides["decode"].parts[Part.HASHING].calls == 1


def test_the_parts_are_within_the_whole(costs):
    for cost in costs:
        for side in cost.sides.values():
            assert 0 < sum(part.cpu_ms for part in side.parts.values()) < side.cpu_ms
            assert sum(side.threads_ms.values()) == pytest.approx(side.cpu_ms + side.engine_ms + side.idle_ms)
        assert cost.sides["prefill"].engine_ms > 0 == cost.sides["decode"].engine_ms


def test_exposed_time_ends_with_admission(costs):
    single, _, several = costs
    assert 0 < single.after_sealing_ms < single.exposed_ms < single.wall_ms
    exposed = [part.exposed_ms for side in single.sides.values() for part in side.parts.values()]
    assert sum(exposed) > 0
    assert single.sides["decode"].parts[Part.COMMIT].exposed_ms > 0
    assert single.sides["decode"].parts[Part.HASHING].exposed_ms == 0
    assert math.isnan(several.exposed_ms)


def test_exposed_is_what_lies_between():
    spans = [Span(Part.COMMIT, 1.0, 3.0, 0.5, True), Span(Part.COMMIT, 5.0, 6.0, 0.5, False)]
    found = _parts(spans, 1, (2.0, 5.5))[Part.COMMIT]
    assert (found.cpu_ms, found.exposed_ms, found.calls) == (1000.0, 1500.0, 1.0)


def test_memory_grows_by_columns_and_by_no_object_a_page():
    """A page's tokens are 256 bytes: a request holds some copies of them, in messages and columns, and little else."""

    async def scenario() -> None:
        async with pair(4097, 1 << 18, 0.25, memory=True) as nodes:
            await nodes.grown(Case(64))
            short, long = [await nodes.grown(Case(pages * 64)) for pages in (64, 4096)]
        for role in ROLES:
            bytes_a_page, objects_a_page = long[role].a_page(short[role], 4096 - 64)
            assert 256 < bytes_a_page < 16 * 256, role
            assert objects_a_page < 0.1, role

    asyncio.run(scenario())


def test_each_figure_has_its_own_median():
    def cost(ms: float, **threads: float) -> Cost:
        side = SideCost(ms, 1.0, 2.0, {"match": PartCost(10 - ms, 0.0, 1.0)}, threads)
        return Cost(Case(64), ms, math.nan, ms, {"decode": side})

    found = middle([cost(1.0, main=1.0), cost(9.0, main=5.0), cost(2.0, main=9.0, others=3.0)])
    assert (found.wall_ms, found.sides["decode"].cpu_ms) == (2.0, 2.0)
    assert found.sides["decode"].parts["match"] == PartCost(8.0, 0.0, 1.0)
    assert found.sides["decode"].threads_ms == {"main": 5.0}
    assert found.case == Case(64)
    assert math.isnan(found.exposed_ms)
    assert found.sides["decode"].rest_ms == 2.0 - 8.0
    assert found.us_per_page == 2000.0


def test_a_case_counts_full_pages():
    assert (Case(64).pages, Case(65).pages, replace(Case(1 << 20), in_flight=2).pages) == (1, 2, 16_384)
