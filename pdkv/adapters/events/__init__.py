"""KV events for KV-aware routers. Guarantees: pyzmq and msgspec are imported only where events are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pdkv.errors import MissingDependency

if TYPE_CHECKING:
    from pdkv.adapters.events.publisher import ZmqPublisher

Encoding = Literal["array", "map"]


@dataclass(frozen=True, slots=True)
class EventSettings:
    address: str
    """ZMQ endpoint to publish on, such as tcp://*:5557."""
    replay_address: str = ""
    """ZMQ endpoint where batches can be asked for again; empty: nowhere."""
    topic: str = ""
    """First frame of each message."""
    encoding: Encoding = "array"
    """How an event is written: fields by position, or by name (see docs/events.md)."""
    replay_batches: int = 10_000
    replay_bytes: int = 64 << 20
    """Batches are kept until there are more than that many, or more than that many bytes of them."""


def event_publisher(settings: EventSettings, num_pages: int) -> ZmqPublisher:
    """Binds and begins to publish. Raises `MissingDependency`, or `ConfigError` for an address that can't be bound."""
    try:
        from pdkv.adapters.events.publisher import ZmqPublisher
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "", "publishing KV events", extra="events") from error
    return ZmqPublisher(settings, num_pages)
