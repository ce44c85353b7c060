"""A sweep names each case once, and leaves out what doesn't fit by saying so."""

from __future__ import annotations

import pytest

from pdkv.cli.bench.cases import FULL, QUICK, Case, Mode, Sweep, by_setup, fit

SWEEP = Sweep(
    pages=(8, 1),
    mode=(Mode.WARM, Mode.STREAMING),
    placement=(("page_major", "page_major"), ("page_major", "layer_major")),
    chunk_pages=(4, 2),
    sources=(1, 3),
    hit=(0.0, 0.5),
)


def test_a_value_is_varied_by_itself() -> None:
    base = Case(8, chunk_pages=4)
    assert SWEEP.cases() == [
        base,
        Case(1, chunk_pages=4),
        Case(8, mode=Mode.STREAMING, chunk_pages=4),
        Case(8, sink="layer_major", chunk_pages=4),
        Case(8, mode=Mode.STREAMING, chunk_pages=2),
        Case(8, sources=3, chunk_pages=4),
        Case(8, hit=0.5, chunk_pages=4),
    ]


def test_all_with_all_has_no_chunks_where_nothing_is_streamed() -> None:
    cases = SWEEP.cases(every=True)
    assert len(cases) == len(set(cases)) == 2 * (1 + 2) * 2 * 2 * 2
    assert {case.chunk_pages for case in cases if case.mode is Mode.WARM} == {4}
    assert {case.chunk_pages for case in cases if case.mode is Mode.STREAMING} == {4, 2}


@pytest.mark.parametrize("sweep", [QUICK, FULL])
def test_presets_begin_with_their_base_case_and_name_each_once(sweep: Sweep) -> None:
    cases = sweep.cases()
    assert cases[0] == Case(sweep.pages[0])
    names = [str(case) for case in cases]
    assert len(set(names)) == len(names)
    assert {case.mode for case in cases} == set(Mode)


def test_full_reaches_from_one_page_to_a_million_tokens() -> None:
    pages = {case.pages for case in FULL.cases()}
    assert {1, 16_384} <= pages


def test_a_case_says_what_is_not_as_usual() -> None:
    assert str(Case(1024)) == "1,024 pages"
    case = Case(2, Mode.STREAMING, False, "layer_major", "layer_major", False, 4, 1, 3, 2, 0.25)
    assert str(case) == (
        "2 pages, streaming, chunks of 4, contiguous, both layer_major, no digests, READs of 1 page, 3 to 2, 25% hit"
    )


def test_pools_hold_prompts_tails_and_the_sink() -> None:
    case = Case(10, sources=3, sinks=2, hit=0.55)
    assert (case.source_pages, case.sink_pages, case.hit_pages) == (10 + 2 + 1, 3 * 11 + 1, 5)


@pytest.mark.parametrize(
    ("case", "prompts"),
    [
        (Case(1), 32),
        (Case(5), 6),
        (Case(33), 1),
        (Case(1, Mode.STREAMING), 1),
        (Case(1, hit=0.5), 1),
        (Case(1, sinks=2), 1),
    ],
)
def test_a_small_case_pulls_several_prompts_one_after_another(case: Case, prompts: int) -> None:
    assert case.series == prompts
    assert case.source_pages == prompts * case.pages + case.sinks + 1
    assert case.sink_pages == prompts * (case.pages + 1) + 1


def test_what_does_not_fit_is_left_out_and_told() -> None:
    fitted = fit([Case(10), Case(100), Case(40, sources=2)], page_bytes=1000, memory_bytes=83_000)
    assert fitted.cases == [Case(10), Case(40, sources=2)]
    (words,) = fitted.left_out
    assert words.startswith("100 pages: a pool of")
    assert "--memory" in words


def test_cases_of_one_setup_stand_together() -> None:
    cases = [Case(1), Case(2, mode=Mode.COLD), Case(3, digests=False), Case(4, sink="layer_major"), Case(5)]
    groups = [[case.pages for case in those] for _, those in by_setup(cases)]
    assert groups == [[1, 3, 5], [2], [4]]
