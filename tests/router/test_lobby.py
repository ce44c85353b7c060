"""So many requests run, so many wait, and no more."""

import asyncio

import pytest

from pdkv.errors import DeadlineExceeded, RouterFull
from pdkv.router.lobby import LEAST_AGAIN_S, MOST_AGAIN_S, Lobby
from tests.router.fleet import Clock
from tests.rpc.fakes import run


class Guests:
    """Requests that stay until they are told to go."""

    def __init__(self, lobby: Lobby) -> None:
        self.lobby = lobby
        self.inside: list[str] = []
        self.go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, remaining_s: float = 30.0) -> asyncio.Task[None]:
        async def stay() -> None:
            async with self.lobby.place(remaining_s):
                self.inside.append(name)
                await self.go.setdefault(name, asyncio.Event()).wait()
            self.inside.remove(name)

        task = self.tasks[name] = asyncio.create_task(stay())
        await turns()
        return task

    async def leave(self, name: str) -> None:
        self.go[name].set()
        await self.tasks[name]
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_they_come_in_in_the_order_in_which_they_came() -> None:
    async def body() -> None:
        guests = Guests(Lobby(2, 3, Clock()))
        for name in "abcde":
            await guests.come(name)
        assert (guests.inside, guests.lobby.waiting) == (["a", "b"], 3)
        await guests.leave("b")
        assert (guests.inside, guests.lobby.waiting) == (["a", "c"], 2)
        await guests.come("f")
        await guests.leave("a")
        await guests.leave("c")
        assert (guests.inside, guests.lobby.waiting) == (["d", "e"], 1)
        for name in "def":
            await guests.leave(name)
        assert (guests.inside, guests.lobby.waiting) == ([], 0)

    run(body)


def test_one_too_many_is_refused_at_once_and_told_when_to_come_again() -> None:
    async def body() -> None:
        guests = Guests(Lobby(1, 1, Clock()))
        for name in "ab":
            await guests.come(name)
        with pytest.raises(RouterFull, match="runs 1 requests and 1 wait") as refused:
            async with guests.lobby.place(30.0):
                pass
        assert (refused.value.status, refused.value.fields["retry_after_s"]) == ("RESOURCE_EXHAUSTED", "2")
        assert (guests.inside, guests.lobby.waiting) == (["a"], 1)
        await guests.leave("a")
        await guests.leave("b")

    run(body)


def test_nobody_may_wait_where_nobody_is_to() -> None:
    async def body() -> None:
        guests = Guests(Lobby(1, 0, Clock()))
        await guests.come("a")
        with pytest.raises(RouterFull):
            await (await guests.come("b"))
        await guests.leave("a")
        await guests.come("c")
        assert guests.inside == ["c"]
        await guests.leave("c")

    run(body)


def test_whoever_waits_too_long_or_goes_away_is_forgotten() -> None:
    async def body() -> None:
        guests = Guests(Lobby(1, 5, Clock()))
        await guests.come("a")
        late, gone, stays = [await guests.come(name, wait) for name, wait in (("b", 0.01), ("c", 30.0), ("d", 30.0))]
        gone.cancel()
        with pytest.raises(DeadlineExceeded, match="waiting for a place among 1 running requests"):
            await late
        assert guests.lobby.waiting == 1
        await guests.leave("a")
        assert guests.inside == ["d"]
        await guests.leave("d")
        assert stays.done()
        assert gone.cancelled()

    run(body)


def test_the_time_to_come_again_follows_the_pace_of_ends() -> None:
    async def body() -> None:
        clock = Clock()
        lobby = Lobby(1, 1, clock)
        assert lobby.again_s == LEAST_AGAIN_S
        for _ in range(60):
            async with lobby.place(30.0):
                clock.now_s += 8.0
        assert lobby.again_s == pytest.approx(8.0, rel=0.02)
        for _ in range(60):
            async with lobby.place(30.0):
                clock.now_s += 500.0
        assert lobby.again_s == MOST_AGAIN_S

    run(body)


def test_of_two_that_end_at_once_one_took_no_time() -> None:
    async def body() -> None:
        clock = Clock()
        guests = Guests(Lobby(2, 2, clock))
        for number in range(80):
            await guests.come(f"{number}a")
            await guests.come(f"{number}b")
            if number:
                clock.now_s += 8.0
                for name in list(guests.inside):
                    guests.go[name].set()
                await turns()
        assert guests.lobby.again_s == pytest.approx(4.0 * (guests.lobby.waiting + 1), rel=0.1)
        for task in guests.tasks.values():
            task.cancel()

    run(body)


def test_how_long_nobody_came_is_no_pace() -> None:
    """A burst after a quiet night isn't sent away for a minute by requests that take two seconds."""

    async def body() -> None:
        clock = Clock()
        lobby = Lobby(2, 1, clock)
        for _ in range(60):
            clock.now_s += 3600.0
            async with lobby.place(30.0):
                clock.now_s += 3600.0
                async with lobby.place(30.0):
                    clock.now_s += 2.0
        assert lobby.again_s == pytest.approx(2.0, rel=0.02)

    run(body)
