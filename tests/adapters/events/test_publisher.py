"""The publisher against real subscribers: what they decode, what they missed, and who waits for whom."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from pdkv.adapters.events import EventSettings, event_publisher, publisher
from pdkv.adapters.events.publisher import ZmqPublisher
from pdkv.errors import ConfigError, MissingDependency
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.events import PublicChain
from tests.adapters.events.consumers import LAYOUTS, Subscriber
from tests.waiting import DEADLINE_S

NUM_PAGES = 20_000
READERS = [(encoding, name) for encoding, layouts in LAYOUTS.items() for name in layouts]
ANYWHERE = "tcp://127.0.0.1:*"
END = b"\xff" * 8

Make = Callable[..., ZmqPublisher]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ZmqPublisher] = []

    def publisher_with(**settings: Any) -> ZmqPublisher:
        addresses = {"address": ANYWHERE, "replay_address": ANYWHERE, "topic": "kv@n0@tiny"}
        made.append(event_publisher(EventSettings(**(addresses | settings)), NUM_PAGES))
        return made[-1]

    yield publisher_with
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]


def subscriber(of: ZmqPublisher, reader: str = "sglang, positional", topic: str = "kv@") -> Subscriber:
    layouts = {name: layout for each in LAYOUTS.values() for name, layout in each.items()}
    return Subscriber(of.address, of.replay_address, layouts[reader], topic)


def pages(first: int, stop: int) -> LocalPages:
    return LocalPages.kept(np.arange(first, stop, dtype=np.int32))


def tokens(count: int) -> UInt32Array:
    return np.arange(count * 64, dtype=np.uint32)


def listening(of: ZmqPublisher, who: Subscriber) -> None:
    """Until it hears what is published: a page that comes and goes."""
    page = PublicChain(np.full(64, 7, np.uint32))
    for _ in range(int(DEADLINE_S * 100)):
        of.stored(page, 0, pages(NUM_PAGES - 1, NUM_PAGES))
        of.removed(pages(NUM_PAGES - 1, NUM_PAGES))
        if who.waiting(10):
            return
    raise AssertionError("the subscriber hears nothing")


@pytest.mark.parametrize(("encoding", "reader"), READERS)
def test_a_subscriber_follows(make: Make, encoding: str, reader: str) -> None:
    of = make(encoding=encoding)
    with subscriber(of, reader) as who:
        listening(of, who)
        who.take()
        public = PublicChain(tokens(6))
        of.stored(public, 0, pages(1, 4))
        of.stored(public, 3, pages(4, 7))
        of.removed(pages(5, 7))
        of.close()
        while who.waiting(0) or len(who.index.ids) != 4:
            who.take()
        assert who.index.ids == sorted(public.ids(0, 4))
        assert who.index.parent_of[public.ids(3, 4)[0]] == public.ids(2, 3)[0]
        assert who.index.tokens_of[public.ids(1, 2)[0]] == tuple(range(64, 128))
        assert not who.missing


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_a_gap_is_filled_by_replay(make: Make, encoding: str) -> None:
    """The subscriber comes late: the first live batch tells it so, replay brings the ones before."""
    of = make(encoding=encoding)
    public = PublicChain(tokens(5))
    for page in range(4):
        of.stored(public, page, pages(page + 1, page + 2))
    with subscriber(of, "sglang, positional" if encoding == "array" else "sglang, named") as who:
        listening(of, who)
        first = who.take()
        assert first > 0
        assert who.replayed[: first + 1] == [*range(first + 1)]
        of.stored(public, 4, pages(5, 6))
        while len(who.index.ids) != 5:
            who.take()
        assert who.index.ids == sorted(public.ids(0, 5))
        assert not who.missing


def test_what_is_not_kept_any_more_is_known_to_be_missing(make: Make) -> None:
    of = make(replay_batches=3)
    for page in range(9):
        of.stored(PublicChain(np.full(64, page, np.uint32)), 0, pages(page, page + 1))
        numbers = kept_from(of, page + 1)
    assert numbers == [*range(numbers[0], numbers[0] + 3)]
    with subscriber(of) as late:
        late.catch_up()
        assert late.missing == [(0, numbers[0])]
        assert late.replayed == numbers
        assert len(late.index.ids) == 3


def test_a_slow_subscriber_holds_up_nobody(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing: batches are dropped for it, another one gets them all, and it can catch up."""
    monkeypatch.setattr(publisher, "UNSENT_BATCHES", 4)
    of = make(address=f"ipc://{tmp_path / 'live'}")
    with subscriber(of) as slow, subscriber(of) as fast:
        slow._live.rcvhwm = 1
        listening(of, slow)
        listening(of, fast)
        fast.take_all()
        asked_before = len(fast.replayed)
        public = PublicChain(tokens(30 * 512))
        for at in range(0, 30 * 512, 512):
            of.stored(public, at, pages(at, at + 512))
            while len(fast.index.ids) < at + 512:
                fast.take()
        assert len(fast.replayed) == asked_before
        received = 0
        while slow.waiting(0):
            slow._live.recv_multipart()
            received += 1
        assert received < 30, "nothing was dropped: the test shows nothing"
        slow.take_all()
        assert slow.index == fast.index


def test_a_long_run_comes_in_bounded_batches(make: Make) -> None:
    of = make()
    public = PublicChain(tokens(1200))
    of.stored(public, 0, pages(1, 1201))
    of.stored(PublicChain(np.full(64, 3, np.uint32)), 0, pages(1201, 1202))
    with subscriber(of) as who:
        kept_from(of, 3)
        who.catch_up()
        # cleared, 512, 512, 176 and perhaps the other one
        assert who.next >= 4
        assert len(who.index.ids) >= 1200
        assert who.index.parent_of[public.ids(1024, 1025)[0]] == public.ids(1023, 1024)[0]


def test_close_publishes_what_is_noted(make: Make) -> None:
    of = make()
    with subscriber(of) as who:
        listening(of, who)
        who.take()
        public = PublicChain(tokens(300))
        for page in range(300):
            of.stored(public, page, pages(page + 1, page + 2))
        of.close()
        of.close()
        of.stored(public, 0, pages(5, 6))  # too late: no error
        while len(who.index.ids) < 300:
            who.take()


# --- the replay address ---------------------------------------------------------------------------------------------


def asked(of: ZmqPublisher, *frames: bytes) -> list[list[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(of.replay_address)
        dealer.send_multipart(frames)
        dealer.send_multipart([b"", (1 << 62).to_bytes(8, "big")])
        answer: list[list[bytes]] = []
        while not answer or END not in answer[-1]:
            assert dealer.poll(DEADLINE_S * 1000)
            answer.append(dealer.recv_multipart())
        return answer
    finally:
        context.destroy(linger=0)


def kept(of: ZmqPublisher) -> list[int]:
    """Numbers of the batches that can be asked for."""
    return [int.from_bytes(number, "big") for _, number, payload in asked(of, b"", bytes(8)) if payload]


def kept_from(of: ZmqPublisher, at_least: int) -> list[int]:
    """The same, once batch `at_least` is among them."""
    for _ in range(int(DEADLINE_S * 100)):
        numbers = kept(of)
        if numbers and numbers[-1] >= at_least:
            return numbers
    raise AssertionError(f"batch {at_least} never came: {numbers}")


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"", b""), (b"", b"1234567"), (b"", b"123456789"), (b"x", bytes(8)), (bytes(8),), (b"", bytes(8), b"")],
    ids=repr,
)
def test_what_is_no_question_gets_no_answer(make: Make, frames: tuple[bytes, ...]) -> None:
    """And the next one gets its own."""
    assert asked(make(), *frames) == [[b"", END, b""]]


def test_any_number_may_be_asked_for(make: Make) -> None:
    of = make()
    for number in (1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        assert asked(of, b"", number.to_bytes(8, "big")) == [[b"", END, b""]]


def test_answers_by_name_carry_the_topic(make: Make) -> None:
    """As vLLM and SGLang answer since they write events by name."""
    with subscriber(make(encoding="map"), "vllm, named") as who:
        while not who.next:
            who.catch_up()
    answer = asked(make(encoding="map"), b"", bytes(8))
    assert answer[-1] == [b"", b"", END, b""]


def test_a_req_socket_may_ask(make: Make) -> None:
    """vLLM's example subscriber asks with one: it adds the empty frame itself."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asking = context.socket(zmq.REQ)
        asking.connect(make().replay_address)
        asking.send((99).to_bytes(8, "big"))
        assert asking.poll(DEADLINE_S * 1000)
        assert asking.recv_multipart() == [END, b""]
    finally:
        context.destroy(linger=0)


# --- how it starts --------------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_bound(make: Make) -> None:
    of = make()
    for field, settings in {
        "events_address": {"address": of.address},
        "events_replay": {"replay_address": of.replay_address},
    }.items():
        with pytest.raises(ConfigError, match=f"{field}: .*Address already in use"):
            make(**settings)
    with pytest.raises(ConfigError, match="events_address"):
        make(address="nowhere")
    # what was bound before the failure is free again
    make(address=make(replay_address="").address.replace("127.0.0.1", "127.0.0.2"))


def test_replay_is_optional(make: Make) -> None:
    of = make(replay_address="")
    assert of.replay_address == ""
    of.stored(PublicChain(tokens(1)), 0, pages(1, 2))


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("pdkv.adapters.events.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"publishing KV events needs {package}: pip install '\.\[events\]'"):
        event_publisher(EventSettings(ANYWHERE), 10)
