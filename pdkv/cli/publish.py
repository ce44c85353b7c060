"""KV events of a serving node, for as long as it serves.

Guarantees: without an address nothing is imported, started or computed; with one, what the tree has from the first
request on is published, and the addresses are free again at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pdkv.adapters.events import EventSettings, event_publisher
from pdkv.config import NodeConfig
from pdkv.kvcache.manager import CacheManager

log = logging.getLogger(__name__)


@contextmanager
def publishing(config: NodeConfig, manager: CacheManager) -> Iterator[None]:
    """Publish while the body runs. Raises `MissingDependency`, or `ConfigError` for an address that can't be bound."""
    if not config.events_address:
        yield
        return
    settings = EventSettings(
        address=config.events_address,
        replay_address=config.events_replay,
        topic=config.events_topic or f"kv@{config.node_id}@{config.model}",
        encoding=config.events_encoding,
    )
    publisher = event_publisher(settings, manager.pool.num_pages)
    log.info(
        "KV events at %s, replay at %s, topic %s", publisher.address, publisher.replay_address or "-", settings.topic
    )
    manager.observer = publisher
    try:
        yield
    finally:
        manager.observer = None
        publisher.close()
