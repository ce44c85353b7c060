"""Publishes KV events over ZMQ: a PUB socket, and a ROUTER socket that sends missed batches again.

Guarantees: the thread that owns the pages leaves a note and goes on, whatever subscribers do: hashing, encoding and
sending happen in this module's thread, and a PUB socket drops what a slow subscriber doesn't take. Batches are numbered
from 0 without a gap; the first says that nothing is stored. So a subscriber that finds a gap, or comes late, asks for
what it missed, and knows from the first number of the answer whether it got all.

    live    topic | sequence, 8 bytes big-endian | payload
    replay  asked: (empty) | first sequence wanted;  answered: (empty) | [topic |] sequence | payload, once a batch,
            then (empty) | [(empty) |] -1 | (empty).  The topic stands there with named fields only: see docs/events.md.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from pdkv.adapters.events import EventSettings
from pdkv.adapters.events.replay import ReplayBuffer
from pdkv.adapters.events.wire import encode_batch
from pdkv.errors import ConfigError
from pdkv.ids import LocalPages
from pdkv.kvcache.events import AllCleared, Event, PagesStored, PublicChain, PublicPages

log = logging.getLogger(__name__)

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
BATCH_TOKENS = 32_768
"""Most tokens of one batch, about 170 kB (or one page): it bounds what a queue of batches can hold."""
UNSENT_BATCHES = 1000
"""Batches that wait for one slow subscriber; later ones are dropped for it."""
LINGER_MS = 500
"""Longest that closing waits for batches which subscribers have not taken yet."""

_Note = Callable[[], Event | None]


class ZmqPublisher:
    """An `Observer` with a thread of its own; `stored`, `removed` and `close` are called by one thread."""

    def __init__(self, settings: EventSettings, num_pages: int) -> None:
        """Raises `ConfigError` for an address that can't be bound."""
        self._encoding = settings.encoding
        self._topic = settings.topic.encode()
        self._pages = PublicPages(num_pages)
        self._buffer = ReplayBuffer(settings.replay_batches, settings.replay_bytes)
        self._notes: deque[_Note] = deque()
        self._closing = self._ended = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._live = self._bound(zmq.PUB, "events_address", settings.address, UNSENT_BATCHES)
            # One whole answer fits; a second one, asked for before the first was taken, may not.
            self._replay = (
                self._bound(zmq.ROUTER, "events_replay", settings.replay_address, settings.replay_batches + 1)
                if settings.replay_address
                else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.address = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_address = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else ""
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, public: PublicChain, first: int, pages: LocalPages) -> None:
        self._note(partial(self._pages.stored, public, first, pages))

    def removed(self, pages: LocalPages) -> None:
        self._note(partial(self._pages.removed, pages))

    def moved(self, source: LocalPages, target: LocalPages) -> None:
        self._note(partial(self._pages.moved, source, target))

    def close(self) -> None:
        """Publishes what is still noted, then gives the addresses back. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._signal()
        self._thread.join()
        self._wake.close()
        self._waker.close()

    def _bound(self, kind: int, field: str, address: str, unsent: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.sndhwm = unsent
        made.ipv6 = "[" in address
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(field, address, f"a ZMQ endpoint that can be bound here ({error})") from error
        return made

    def _note(self, note: _Note) -> None:
        if self._closing or self._ended:  # nobody would take it
            return
        self._notes.append(note)
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # woken often enough already
            self._waker.send(b"\0")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publish([AllCleared()])
            poller = zmq.Poller()
            poller.register(self._wake.fileno(), zmq.POLLIN)
            if self._replay:
                poller.register(self._replay, zmq.POLLIN)
            while not self._closing:
                asked = self._replay in dict(poller.poll())
                self._work_off()
                if self._replay and asked:
                    self._answer(self._replay)
            self._work_off()
        finally:
            self._ended = True
            self._notes.clear()
            self._context.destroy(linger=LINGER_MS)

    def _work_off(self) -> None:
        """Publish what has been noted. A note that comes too late for it wakes the thread again."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        batch: list[Event] = []
        room = BATCH_TOKENS
        while self._notes:
            for part in _parts(self._notes.popleft()()):
                size = part.tokens.size if isinstance(part, PagesStored) else 0  # an id takes a few bytes: no matter
                if size > room and batch:
                    self._publish(batch)
                    batch, room = [], BATCH_TOKENS
                batch.append(part)
                room -= size
        if batch:
            self._publish(batch)

    def _publish(self, batch: list[Event]) -> None:
        sequence = self._buffer.next_sequence
        payload = encode_batch(batch, self._encoding, time.time())
        self._buffer.append(payload)
        self._live.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send what one subscriber has asked for, and the end mark. What is no question gets no answer."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.warning("not a replay request: %d frames of %s bytes", len(frames), [len(f) for f in frames])
            return
        who, first = frames[0], int.from_bytes(frames[2], "big")
        topic, no_topic = ([self._topic], [b""]) if self._encoding == "map" else ([], [])
        for sequence, payload in self._buffer.since(first):
            replay.send_multipart([who, b"", *topic, sequence.to_bytes(8, "big"), payload])
        replay.send_multipart([who, b"", *no_topic, END_SEQUENCE, b""])


def _parts(event: Event | None) -> list[Event]:
    if isinstance(event, PagesStored):
        return [*event.parts(max(BATCH_TOKENS // event.page_tokens, 1))]
    return [] if event is None else [event]
