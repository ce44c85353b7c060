"""The benchmark of late reservation: what it asks, and what it makes of what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from benchmarks import reservation
from benchmarks.reservation import (
    ANSWER_PAGES,
    PAGE_TOKENS,
    PROMPT_PAGES,
    Figures,
    Heard,
    asks,
    main,
    median,
    run,
    summary,
)
from pdkv.errors import DeadlineExceeded, IntegrityError, PdkvError, PeerLost
from pdkv.node.messages import GenerateEvent, GenerateRequest, Token


def test_a_seed_asks_the_same_and_no_two_prompts_share_a_page() -> None:
    first, again, other = asks(1, 30), asks(1, 30), asks(2, 30)
    assert [(a.at_s, a.tokens.tobytes()) for a in first] == [(a.at_s, a.tokens.tobytes()) for a in again]
    pages = [each.tokens[:PAGE_TOKENS].tobytes() for each in first + other]
    assert len(set(pages)) == len(pages)
    sizes = [-(-len(each.tokens) // PAGE_TOKENS) for each in first]
    assert PROMPT_PAGES[0] <= min(sizes) < max(sizes) <= PROMPT_PAGES[1]
    assert {each.sampling.max_tokens for each in first} == {ANSWER_PAGES * PAGE_TOKENS}


def test_times_are_from_the_question() -> None:
    heard = Heard(10.0, [1, 2, 3], [11.0, 11.5, 13.5])
    assert (heard.ttft_s, heard.pause_s) == (1.0, 2.0)
    assert Heard(10.0, [1], [11.0]).pause_s == 0.0


class Node:
    """Answers two tokens, and counts as running whatever doesn't wait."""

    def __init__(self, *, broken: bool = False) -> None:
        self.asked: list[GenerateRequest] = []
        self.broken = broken

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        if self.broken:
            raise OSError("gone")
        for index in range(2):
            await asyncio.sleep(0)
            yield Token(index, len(request.tokens) % 7 + index, 0.0)

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(requests=5, queued=2)


def test_a_run_puts_each_question_under_a_name_of_its_own_and_tells_who_ran() -> None:
    node, what = Node(), asks(3, 4, interval_s=0.001)
    figures, said = asyncio.run(run(node, "x", what, "h:1"))  # type: ignore[arg-type]
    assert len({each.namespace.extra_key for each in node.asked}) == 4
    assert said == [[len(a.tokens) % 7, len(a.tokens) % 7 + 1] for a in what]
    assert (figures.running_mean, figures.running_most) == (3, 3)
    assert figures.requests_per_s > 0
    with pytest.raises(OSError, match="gone"):
        asyncio.run(run(Node(broken=True), "x", what, "h:1"))  # type: ignore[arg-type]


def test_figures_are_medians_one_by_one() -> None:
    runs = [Figures(*(float(n + i) for i in range(7))) for n in (1, 9, 2)]
    assert median(runs) == runs[2]


def test_a_ratio_is_of_runs_with_the_same_requests() -> None:
    """Of the medians it would be 3 / 2."""
    late, whole = ([Figures(*[float(n)] * 7) for n in numbers] for numbers in ((3, 8, 1), (1, 2, 4)))
    found = summary({"all": whole, "late": late})
    assert (found["late"], found["all"]) == (late[0], whole[1])
    assert found["late / all"] == Figures(*[3.0] * 7)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("a read did not end within 30 s"), PeerLost("p ended:\n\nlast words")]
)
def test_a_machine_that_is_too_busy_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, error: PdkvError) -> None:
    async def measure(*_: object) -> None:
        raise error

    monkeypatch.setattr(reservation, "measure", measure)
    with pytest.raises(SystemExit) as ended:
        main(["--quick"])
    # of a text, which goes to stderr, Python makes exit code 1
    said = str(ended.value.code)
    words = " ".join(str(error).split())
    assert said.startswith(f"nothing measured: {error.kind}: {words}: this machine was too busy (load ")
    assert "\n" not in said


def test_what_no_load_explains_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: object) -> None:
        raise IntegrityError("pages", counted=1, kept=2)

    monkeypatch.setattr(reservation, "measure", measure)
    with pytest.raises(IntegrityError):
        main(["--quick"])
