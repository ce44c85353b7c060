"""Calls between simulated processes, and what a bad network makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from pdkv.errors import CapacityError, DeadlineExceeded, PdkvError, PeerLost
from tests.simulation.network import CALL_S, CONNECT_S, KEEPALIVE_S, Network, Remote
from tests.simulation.world import Process, World

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""What a dead process leaves half-way is no news."""


class Service:
    """At "s0". Notes when a stream of it is closed."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.calls: list[Any] = []
        self.closed = 0
        self.hold = False

    async def connect(self, intro: Any) -> Any:
        self.calls.append(intro)
        return intro

    async def renew_lease(self, call: Any) -> float:
        self.calls.append(call)
        if call == "refuse":
            raise CapacityError("no room", wanted=3)
        if call == "fail":
            raise ZeroDivisionError
        if call == "hang":
            await asyncio.Event().wait()
        return 30.0

    async def release_lease(self, call: Any) -> None:
        self.calls.append(call)

    async def prefill(self, request: Any) -> AsyncGenerator[int, None]:
        self.calls.append("prefill")
        try:
            for number in range(request.count):
                yield number
            if self.hold:
                await asyncio.Event().wait()
        finally:
            self.closed += 1


class Stream:
    remaining_s = 60.0

    def __init__(self, count: int) -> None:
        self.count = count


class Scene:
    """A client and a service in processes of their own."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.client, self.server = Process(self.world, "c0"), Process(self.world, "s0")
        self.service = Service(self.server)
        self.network.listen(self.server, self.service)
        self.remote = Remote(self.network, self.client, "s0")

    def ask(self, call: Callable[[], Any], limit_s: float = 200.0) -> Any:
        """What a call comes to: its result, or its error."""
        task = self.client.create_task(_outcome(call))
        assert self.world.run(lambda: bool(task.done()), self.world.now + limit_s) or self.world.broken_law
        return task.result() if task.done() else self.world.broken_law

    def stream(self, count: int = 5) -> tuple[list[int], Any]:
        heard: list[int] = []

        async def listen() -> None:
            async for event in self.remote.prefill(Stream(count)):
                heard.append(event)

        return heard, self.ask(listen)

    def rest(self, seconds: float = 60.0) -> None:
        self.world.run(lambda: False, self.world.now + seconds)


async def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except PdkvError as error:
        return error


@pytest.fixture
def scene() -> Any:
    made = Scene()
    yield made
    made.world.end()


def test_calls_and_streams_go_through(scene: Scene) -> None:
    assert scene.ask(lambda: scene.remote.connect("me")) == "me"
    assert scene.ask(lambda: scene.remote.renew_lease("a")) == 30.0
    assert scene.ask(lambda: scene.remote.release_lease("a")) is None
    assert scene.stream() == ([0, 1, 2, 3, 4], None)
    scene.rest()
    assert scene.service.closed == 1
    assert not scene.network.calls


def test_an_error_arrives_with_its_class_and_fields(scene: Scene) -> None:
    error = scene.ask(lambda: scene.remote.renew_lease("refuse"))
    assert isinstance(error, CapacityError)
    assert error.fields == {"address": "s0", "wanted": "3"}


def test_a_bug_of_a_service_breaks_the_run(scene: Scene) -> None:
    assert "ZeroDivisionError" in scene.ask(lambda: scene.remote.renew_lease("fail"))


def test_a_call_has_a_deadline_and_its_server_hears_of_it(scene: Scene) -> None:
    assert isinstance(scene.ask(lambda: scene.remote.renew_lease("hang")), DeadlineExceeded)
    assert scene.world.now == pytest.approx(CALL_S, abs=0.1)
    scene.rest()
    assert not scene.network.calls
    assert not scene.server.pending


def test_closing_a_stream_closes_it_at_the_server(scene: Scene) -> None:
    scene.service.hold = True

    async def first() -> Any:
        events = scene.remote.prefill(Stream(3))
        async for event in events:
            await events.aclose()
            return event

    assert scene.ask(first) == 0
    assert not scene.service.closed
    scene.rest()
    assert scene.service.closed == 1


def test_a_killed_server_is_noticed_at_once_and_a_killed_client_too(scene: Scene) -> None:
    scene.service.hold = True
    scene.world.after(1.0, lambda: (scene.server.kill(), scene.network.hang_up(scene.server)))
    heard, error = scene.stream()
    assert heard == [0, 1, 2, 3, 4]
    assert isinstance(error, PeerLost)
    assert scene.world.now == pytest.approx(1.0, abs=0.1)
    assert isinstance(scene.ask(lambda: scene.remote.renew_lease("a")), PeerLost)
    assert isinstance(scene.ask(lambda: scene.remote.connect("me")), PeerLost)
    assert scene.world.now == pytest.approx(1.0 + CONNECT_S, abs=0.2)


def test_a_killed_clients_stream_is_closed(scene: Scene) -> None:
    scene.service.hold = True
    scene.client.create_task(_outcome(lambda: anext(scene.remote.prefill(Stream(1)))))
    scene.rest(1.0)
    scene.client.kill()
    scene.network.hang_up(scene.client)
    scene.rest(1.0)
    assert scene.service.closed == 1


def test_connect_waits_for_somebody_to_listen(scene: Scene) -> None:
    scene.network.hang_up(scene.server)
    scene.world.after(3.0, scene.network.listen, scene.server, scene.service)
    assert scene.ask(lambda: scene.remote.connect("me")) == "me"
    assert scene.world.now == pytest.approx(3.0, abs=0.5)


def test_a_short_cut_only_delays_and_a_long_one_breaks_both_ends(scene: Scene) -> None:
    scene.network.cut("c0", "s0", 2.0)
    assert scene.ask(lambda: scene.remote.connect("me")) == "me"
    assert 2.0 < scene.world.now < 2.2
    scene.service.hold = True
    scene.world.after(1.0, scene.network.cut, "c0", "s0", 100.0)
    heard, error = scene.stream()
    assert heard == [0, 1, 2, 3, 4]
    assert "keepalive" in str(error)
    assert scene.world.now == pytest.approx(3.0 + KEEPALIVE_S, abs=1.0)
    scene.rest(2.0)
    assert scene.service.closed == 1


def test_half_open_only_one_way_is_cut(scene: Scene) -> None:
    scene.network.cut("s0", "c0", 3.0, both=False)
    assert scene.ask(lambda: scene.remote.renew_lease("a")) == 30.0
    assert scene.world.now > 3.0
    assert scene.service.calls == ["a"]


def test_a_stopped_server_answers_late_or_is_given_up(scene: Scene) -> None:
    scene.server.stop_for(2.0)
    assert scene.ask(lambda: scene.remote.renew_lease("a")) == 30.0
    assert 2.0 < scene.world.now < 2.2
    scene.service.hold = True
    scene.world.after(1.0, lambda: (scene.server.stop_for(40.0), scene.network.stopped("s0", 40.0)))
    _, error = scene.stream()
    assert isinstance(error, PeerLost)
    assert scene.world.now < 25.0
    scene.rest(60.0)
    assert scene.service.closed == 1


def test_a_dropped_message_takes_its_connection_with_it(scene: Scene) -> None:
    scene.network.link("s0", "c0").drop = 1
    heard, error = scene.stream()
    assert 0 not in heard
    assert isinstance(error, PeerLost)


def test_lease_calls_can_be_lost_alone(scene: Scene) -> None:
    scene.network.link("c0", "s0").lose_leases_until = 100.0
    assert isinstance(scene.ask(lambda: scene.remote.renew_lease("a")), DeadlineExceeded)
    assert scene.ask(lambda: scene.remote.connect("me")) == "me"
    assert scene.service.calls == ["me"]


def test_a_duplicate_is_made_twice_and_answered_once(scene: Scene) -> None:
    scene.network.link("c0", "s0").duplicate = 1
    assert scene.ask(lambda: scene.remote.renew_lease("a")) == 30.0
    scene.rest()
    assert scene.service.calls == ["a", "a"]
    scene.network.link("c0", "s0").duplicate = 1
    assert scene.stream() == ([0, 1, 2, 3, 4], None)
    scene.rest()
    assert scene.service.closed == 2
    assert not scene.network.calls


def test_messages_of_two_calls_overtake_each_other_and_those_of_one_never(scene: Scene) -> None:
    for link in (scene.network.link("c0", "s0"), scene.network.link("s0", "c0")):
        link.reorder_until = 1000.0
    for _ in range(10):
        assert scene.stream(12) == (list(range(12)), None)
    scene.service.calls.clear()
    tasks = [scene.client.create_task(scene.remote.release_lease(number)) for number in range(12)]
    assert scene.world.run(lambda: all(task.done() for task in tasks), 1000.0)
    assert sorted(scene.service.calls) == list(range(12)) != scene.service.calls


def test_messages_can_be_changed_on_their_way(scene: Scene) -> None:
    scene.network.change = lambda sender, receiver, message: message + 100 if sender == "s0" else message
    assert scene.stream(2) == ([100, 101], None)


def test_a_call_that_its_server_cancels_ends_by_name(scene: Scene) -> None:
    scene.world.after(1.0, lambda: [task.cancel() for task in tuple(scene.server.pending)])
    assert isinstance(scene.ask(lambda: scene.remote.renew_lease("hang")), PeerLost)
