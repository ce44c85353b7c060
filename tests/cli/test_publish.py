"""KV events of a serving node: off without an address, and what the settings mean."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import zmq

from pdkv.cli.publish import publishing
from pdkv.config import DecodeConfig, PrefillConfig
from pdkv.errors import ConfigError
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.resolve import resolve
from tests.kvcache.pools import tiny_format
from tests.waiting import DEADLINE_S

ANYWHERE = {"events_address": "tcp://127.0.0.1:*", "events_replay": "tcp://127.0.0.1:*"}


def manager() -> CacheManager:
    return CacheManager(SlotPool.create(tiny_format(), 4))


def first_topic(address: str, replay: str) -> tuple[bytes, Any]:
    """Of the first batch, where events are written by name: replay then says the topic too."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.connect(replay)
        asking.send_multipart([b"", bytes(8)])
        assert asking.poll(DEADLINE_S * 1000)
        _, topic, number, payload = asking.recv_multipart()
        return topic, (number, payload)
    finally:
        context.destroy(linger=0)


def test_nothing_happens_without_an_address() -> None:
    cache, before = manager(), threading.active_count()
    with publishing(DecodeConfig(node_id="d0"), cache):
        assert cache.observer is None
        assert threading.active_count() == before


@pytest.mark.parametrize(("given", "topic"), [("", b"kv@d0@tiny"), ("mine", b"mine")])
def test_the_topic(given: str, topic: bytes) -> None:
    cache = manager()
    config = DecodeConfig(node_id="d0", events_topic=given, events_encoding="map", **ANYWHERE)  # type: ignore[arg-type]
    with publishing(config, cache):
        observer: Any = cache.observer
        said, (number, _) = first_topic(observer.address, observer.replay_address)
        assert (said, number) == (topic, bytes(8))
    assert cache.observer is None


def test_the_addresses_are_free_again_whatever_happened() -> None:
    cache = manager()
    config = PrefillConfig(node_id="p0", **ANYWHERE)  # type: ignore[arg-type]
    with contextlib.suppress(ZeroDivisionError), publishing(config, cache):
        observer: Any = cache.observer
        raise ZeroDivisionError
    taken = config.model_copy(update={"events_address": observer.address, "events_replay": observer.replay_address})
    with publishing(taken, cache):
        assert cache.observer is not observer
        with pytest.raises(ConfigError, match="events_address"), publishing(taken, manager()):
            pass


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"events_address": "127.0.0.1:5557"}, "events_address"),
        ({"events_address": "tcp://*:5557", "events_replay": "5558"}, "events_replay"),
        ({"events_replay": "tcp://*:5558"}, "events_replay"),
        ({"events_encoding": "json"}, "events_encoding"),
    ],
)
def test_what_cannot_be_used_is_named(settings: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(PrefillConfig, {"node_id": "p0", **settings}, environ={})
    assert error.value.fields["field"] == field
