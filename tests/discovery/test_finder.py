"""Lists from several places: who is told what and when, and what a failure changes, which is nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from pdkv.discovery.by_dns import DnsSource
from pdkv.discovery.finder import CHANGES_TOLD, Finder, found_now, source_by
from pdkv.discovery.words import Hosts, Place, Services
from pdkv.errors import DiscoveryFailed, PdkvError
from tests.waiting import until

A, B = "dns:a.test:1", "dns:_grpc._tcp.b.test"


@dataclass
class Scripted:
    """A source that tells what a test gives it: a list, a failure, or its end."""

    steps: asyncio.Queue[tuple[str, ...] | PdkvError | None] = field(default_factory=asyncio.Queue)
    begun: int = 0

    async def lists(self) -> AsyncGenerator[tuple[str, ...], None]:
        self.begun += 1
        while (step := await self.steps.get()) is not None:
            if isinstance(step, PdkvError):
                raise step
            yield step


class Stage:
    """A finder over scripted places, and what it told."""

    def __init__(self, **lists: tuple[str, ...]) -> None:
        self.sources: dict[str, Scripted] = {}
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.finder = Finder(lists, lambda name, found: self.told.append((name, found)), self._source, again_s=0.001)

    def _source(self, place: Place) -> Scripted:
        return self.sources.setdefault(str(place), Scripted())

    def say(self, word: str, step: tuple[str, ...] | PdkvError | None) -> None:
        self.sources[word].steps.put_nowait(step)

    async def heard(self, *told: tuple[str, tuple[str, ...]]) -> None:
        async def now() -> list[tuple[str, tuple[str, ...]]]:
            return self.told

        await until(now, lambda seen: len(seen) >= len(told), "as much is told", deadline_s=10)
        assert self.told == list(told)
        self.told.clear()

    async def states(self, wanted: dict[str, str]) -> None:
        async def now() -> dict[str, str]:
            return self.finder.status()

        await until(now, lambda seen: seen == wanted, f"{wanted}", deadline_s=10)


def run(stage: Callable[[], Stage], body: Callable[[Stage], Awaitable[None]]) -> None:
    async def staged() -> None:
        made = stage()
        running = asyncio.create_task(made.finder.run())
        try:
            await body(made)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(staged())


def test_fixed_addresses_are_told_at_once_and_kept() -> None:
    async def body(stage: Stage) -> None:
        await stage.heard(("prefill", ("p9:1", "p8:1")), ("decode", ("d0:1",)))
        stage.say(A, ("p1:1", "p2:1"))
        await stage.heard(("prefill", ("p9:1", "p1:1", "p2:1", "p8:1")))
        stage.say(A, ("p2:1", "p8:1"))
        await stage.heard(("prefill", ("p9:1", "p2:1", "p8:1")))

    run(lambda: Stage(prefill=("p9:1", A, "p8:1"), decode=("d0:1",)), body)


def test_what_stays_the_same_is_told_once() -> None:
    async def body(stage: Stage) -> None:
        await stage.heard(("prefill", ()))
        for step in (("p1:1",), None, ("p1:1",), ("p2:1",)):
            stage.say(A, step)
        await stage.heard(("prefill", ("p1:1",)), ("prefill", ("p2:1",)))
        assert stage.sources[A].begun == 2

    run(lambda: Stage(prefill=(A,)), body)


def test_a_line_of_the_log_is_bounded_whatever_is_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = tuple(f"p{number:03}:1" for number in range(CHANGES_TOLD + 9))

    async def body(stage: Stage) -> None:
        stage.say(A, found)
        await stage.heard(("prefill", ()), ("prefill", found))

    run(lambda: Stage(prefill=(A,)), body)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(f" +p{CHANGES_TOLD - 1:03}:1 and 9 more")


@pytest.mark.parametrize("step", [DiscoveryFailed(A, "the server is down"), ()])
def test_a_failure_and_an_empty_answer_change_nothing_and_are_said_once(
    step: PdkvError | tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    why = str(step) if isinstance(step, PdkvError) else f"{A}: finds nobody"

    async def body(stage: Stage) -> None:
        stage.say(A, ("p1:1", "p2:1"))
        await stage.heard(("prefill", ()), ("prefill", ("p1:1", "p2:1")))
        for _ in range(3):
            stage.say(A, step)
        await stage.states({f"prefill {A}": f"2 found; now {why}", f"prefill {B}": "0 found"})
        assert stage.finder.failing() == {"prefill": 1}
        stage.say(A, ("p1:1", "p2:1"))
        await stage.states({f"prefill {A}": "2 found", f"prefill {B}": "0 found"})
        assert stage.finder.failing() == {"prefill": 0}
        assert stage.told == []
        stage.say(B, ("p3:1",))
        await stage.heard(("prefill", ("p1:1", "p2:1", "p3:1")))

    run(lambda: Stage(prefill=(A, B)), body)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"prefill: {A} finds 2: +p1:1 +p2:1",
        f"prefill: {why}; the 2 that are known stay",
        f"prefill: {A} answers again",
        f"prefill: {B} finds 1: +p3:1",
    ]


def test_a_bug_of_a_source_is_no_failure_of_a_look_up() -> None:
    """It ends the process, as one anywhere else does."""

    async def body() -> None:
        stage = Stage(prefill=(A,))
        stage.sources[A].lists = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            await stage.finder.run()

    asyncio.run(body())


def test_without_places_there_is_nothing_to_do() -> None:
    async def body() -> None:
        stage = Stage(prefill=("p0:1",))
        await stage.finder.run()
        assert stage.finder.status() == stage.finder.failing() == {}

    asyncio.run(body())


def test_who_looks_once_gets_all_or_a_failure() -> None:
    async def body() -> None:
        sources = {A: Scripted(), B: Scripted()}
        sources[A].steps.put_nowait(("p1:1", "p0:1"))
        sources[B].steps.put_nowait(("p2:1",))
        found = await found_now(("p0:1", A, B), lambda place: sources[str(place)])
        assert found == ("p0:1", "p1:1", "p2:1")
        sources[A].steps.put_nowait(DiscoveryFailed(A, "no"))
        with pytest.raises(DiscoveryFailed, match="no"):
            await found_now(("p0:1", A, B), lambda place: sources[str(place)])

    asyncio.run(body())


@pytest.mark.parametrize("place", [Hosts("a", 1), Services("_a._tcp.b")])
def test_dns_is_asked_for_names(place: Place) -> None:
    assert isinstance(source_by("127.0.0.1:53")(place), DnsSource)
