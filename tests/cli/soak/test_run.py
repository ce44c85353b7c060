"""Each way in which a request can end is counted as what it is; a wrong token never passes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.soak.keeper import Post
from pdkv.cli.soak.report import RECOVERY_S, SoakReport
from pdkv.cli.soak.run import Soak, SoakSettings, held_pages
from pdkv.cli.soak.traffic import SoakAsk
from pdkv.errors import PeerLost
from pdkv.node.messages import GenerateDone, GenerateEvent, Shipment, Token
from tests.node.scene import turns
from tests.rpc.samples import status

RIGHT = MonolithAnswer((5, 6, 7), (50, 60, 70), (), 0)
DONE = GenerateDone("length", 3, Shipment())


def said(*tokens: int) -> list[Token]:
    return [Token(i, token, 0.0, 10 * token) for i, token in enumerate(tokens)]


class Fleet:
    """A router that says `events` and then raises `end`, or says nothing more."""

    def __init__(self, events: list[GenerateEvent], end: BaseException | None = None) -> None:
        self._events = events
        self._end = end

    def router(self, address: str) -> Fleet:
        return self

    async def generate(self, request: Any) -> AsyncGenerator[GenerateEvent, None]:
        for event in self._events:
            yield event
        if self._end is not None:
            raise self._end


def soaked(events: list[GenerateEvent], end: BaseException | None = None, abort_after: int | None = None) -> SoakReport:
    async def body() -> SoakReport:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(1.0, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet(events, end)  # type: ignore[assignment]
        ask = soak._traffic.next()
        soak._right[ask.prompt] = RIGHT
        await soak._ask(SoakAsk(ask.prompt, ask.request, abort_after))
        soak._reference.close()
        return report

    return asyncio.run(body())


def test_right() -> None:
    report = soaked([*said(5, 6, 7), DONE])
    assert (report.finished, report.wrong_answers) == (1, 0)


@pytest.mark.parametrize("tokens", [(5, 6, 8), (5, 6), (5, 6, 7, 7)])
def test_another_answer_is_wrong(tokens: tuple[int, ...]) -> None:
    report = soaked([*said(*tokens), DONE])
    assert (report.finished, report.wrong_answers) == (0, 1)
    assert report.notes


def test_other_logits_are_wrong() -> None:
    flipped = dataclasses.replace(said(5, 6, 7)[1], logits_digest=61)
    assert soaked([said(5)[0], flipped, said(5, 6, 7)[2], DONE]).wrong_answers == 1


def test_a_named_failure_after_right_tokens() -> None:
    report = soaked([*said(5, 6)], PeerLost("gone"))
    assert (report.failures["PeerLost"], report.wrong_answers) == (1, 0)


def test_a_named_failure_after_a_wrong_token() -> None:
    report = soaked([*said(5, 9)], PeerLost("gone"))
    assert (report.failures["PeerLost"], report.wrong_answers) == (1, 1)


def test_a_stream_without_a_last_word() -> None:
    assert soaked([*said(5, 6, 7)]).failed_unnamed == 1


def test_an_unnamed_error_is_a_bug_of_the_soak() -> None:
    with pytest.raises(RuntimeError):
        soaked([], RuntimeError("bug"))


def test_silence_is_a_hung_request() -> None:
    assert soaked([*said(5)], TimeoutError()).hung == 1


def test_the_client_goes_away() -> None:
    report = soaked([*said(5, 6, 7), DONE], abort_after=1)
    assert (report.aborted, report.finished) == (1, 0)


def test_recovery_counts_requests_that_came_after_the_death() -> None:
    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(1.0, 0, 1, 48, 1.0), report, lambda text: None)
        soak._prefill_lost()
        assert soak._lost_at is not None
        soak._recovered(soak._lost_at - 1)
        assert not report.recoveries_s
        soak._recovered(soak._lost_at)
        assert len(report.recoveries_s) == 1
        soak._prefill_lost()
        soak._disturbed()
        soak._recovered(soak._began + 1e9)
        assert (len(report.recoveries_s), report.recoveries_cut) == (1, 1)
        soak._disturbed()
        assert report.recoveries_cut == 1, "none was running"
        soak._reference.close()

    asyncio.run(body())


def test_somebody_asks_at_once_when_a_prefill_node_has_died() -> None:
    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(0.2, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet([*said(5, 6, 7), DONE])  # type: ignore[assignment]
        probe = soak._traffic.probe()
        soak._right[probe.prompt] = RIGHT
        soak._keeper.router.serving.set()
        soak._prefill_lost()
        await soak._prober()
        assert (report.requests, report.finished, len(report.recoveries_s)) == (1, 1, 1)
        soak._reference.close()

    asyncio.run(body())


def test_a_recovery_that_has_lasted_too_long_doesnt_vanish_with_the_next_fault() -> None:
    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(60.0, 0, 1, 48, 1.0), report, lambda text: None)
        soak._prefill_lost()
        assert soak._lost_at is not None
        soak._lost_at -= RECOVERY_S
        soak._disturbed()
        assert RECOVERY_S <= report.max_recovery_s < 2 * RECOVERY_S
        assert report.recoveries_cut == 0
        soak._reference.close()

    asyncio.run(body())


@pytest.mark.parametrize(("earlier_s", "counted"), [(0.0, (0, 1)), (RECOVERY_S, (1, 0))])
def test_nor_does_it_with_the_end(earlier_s: float, counted: tuple[int, int]) -> None:
    """What begins after the end is none: nobody asks any more."""

    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(0.2, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet([], PeerLost("gone"))  # type: ignore[assignment]
        soak._right[soak._traffic.probe().prompt] = RIGHT
        soak._keeper.router.serving.set()
        soak._prefill_lost()
        assert soak._lost_at is not None
        soak._lost_at -= earlier_s
        await soak._prober()
        assert (len(report.recoveries_s), report.recoveries_cut) == counted
        soak._prefill_lost()
        assert soak._lost_at is None
        soak._reference.close()

    asyncio.run(body())


def test_after_the_end_nobody_asks_though_no_answer_was_right() -> None:
    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(0.1, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet([*said(9, 9, 9), DONE])  # type: ignore[assignment]
        soak._right[soak._traffic.probe().prompt] = RIGHT
        soak._keeper.router.serving.set()
        soak._prefill_lost()
        await soak._prober()
        assert report.wrong_answers > 0
        assert report.recoveries_s == []
        soak._reference.close()

    asyncio.run(body())


def test_a_death_is_asked_about_though_a_request_of_an_earlier_one_is_stuck() -> None:
    class Stuck(Fleet):
        """The first request has no end before `freed`."""

        asked = 0

        async def generate(self, request: Any) -> AsyncGenerator[GenerateEvent, None]:
            self.asked += 1
            if self.asked == 1:
                await freed.wait()
            async for event in super().generate(request):
                yield event

    freed = asyncio.Event()

    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(1.0, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Stuck([*said(5, 6, 7), DONE])  # type: ignore[assignment]
        soak._right[soak._traffic.probe().prompt] = RIGHT
        soak._keeper.router.serving.set()
        soak._prefill_lost()
        probing = asyncio.create_task(soak._prober())
        await turns()
        soak._disturbed()
        soak._prefill_lost()
        await turns()
        assert (len(report.recoveries_s), report.recoveries_cut) == (1, 1)
        freed.set()
        await probing
        soak._reference.close()

    asyncio.run(body())


def test_what_is_due_comes_from_the_settings() -> None:
    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(600.0, 0, 1, 48, 4.0), report, lambda text: None)
        assert (report.asked_s, report.gap_s) == (600.0, 4.0)
        soak._reference.close()

    asyncio.run(body())


def test_while_there_is_no_router_nobody_is_asked() -> None:
    """It comes back, and is asked then; before, a prober without a pause would have asked it thousands of times."""

    async def body() -> None:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(1.0, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet([*said(5, 6, 7), DONE])  # type: ignore[assignment]
        soak._right[soak._traffic.probe().prompt] = RIGHT
        soak._prefill_lost()
        probing = asyncio.create_task(soak._prober())
        await turns()
        assert report.requests == 0
        soak._keeper.router.serving.set()
        await probing
        assert (report.requests, report.finished, len(report.recoveries_s)) == (1, 1, 1)
        soak._reference.close()

    asyncio.run(body())


def test_one_that_nobody_can_serve_is_tried_again_at_a_clients_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it go on past the soak's end."""
    monkeypatch.setattr("pdkv.cli.soak.run.AGAIN_S", 0.05)

    async def body() -> SoakReport:
        report = SoakReport(seed=0)
        soak = Soak(SoakSettings(0.2, 0, 1, 48, 1.0), report, lambda text: None)
        soak._nodes = Fleet([], PeerLost("the router knows of no pair of nodes"))  # type: ignore[assignment]
        soak._right[soak._traffic.probe().prompt] = RIGHT
        soak._keeper.router.serving.set()
        soak._prefill_lost()
        await soak._prober()
        soak._reference.close()
        return report

    report = asyncio.run(asyncio.wait_for(body(), 20.0))
    assert report.failures["PeerLost"] == report.requests
    assert 1 <= report.requests <= 5


def test_held_pages() -> None:
    pages = {"free": 3, "cached": 4, "reserved": 1, "private": 1, "quarantined": 1, "total": 10}
    assert held_pages(dataclasses.replace(status("decode"), pages=pages)) == 3


def test_a_node_that_never_serves_ends_the_soak_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        soak = Soak(SoakSettings(1.0, 0, 1, 48, 1.0), SoakReport(seed=0), lambda text: None)

        async def keep(post: Post) -> None:
            raise PeerLost(f"{post.name} ended with 1 before it served")

        monkeypatch.setattr(soak._keeper, "keep", keep)
        monkeypatch.setattr(soak._traffic, "prompts", ())
        with pytest.raises(PeerLost, match="before it served"):
            await soak._run()
        soak._reference.close()

    asyncio.run(body())
