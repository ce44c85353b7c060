"""One channel for an address and, under mutual TLS, for the node that must be there.

Guarantees: a call keeps its channel to its end; a new call gets one whose certificate is the newest on disk and which
is not older than an hour; at most `MAX_CHANNELS` are kept, so addresses that a client makes up fill nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import grpc

from pdkv.rpc.security import KeyFiles, Keys, MutualTls, Security
from pdkv.rpc.transport import Over, open_channel, require_address

MAX_CHANNELS = 1024
CHANNEL_AGE_S = 3600.0
"""Under TLS. Half of what a server allows: a call that begins just as a server ends the connection may be lost."""

Key = tuple[str, str, Over]


@dataclass(slots=True, eq=False)
class _Held:
    channel: grpc.aio.Channel
    keys: Keys | None
    since_s: float
    calls: int = 0


class Channels:
    """To be used in the loop that makes the calls."""

    def __init__(
        self, security: Security, *, age_s: float = CHANNEL_AGE_S, now_s: Callable[[], float] = monotonic
    ) -> None:
        """Raises `ConfigError` for key files that can't be used."""
        self._files = KeyFiles(security, "dial") if isinstance(security, MutualTls) else None
        self._age_s = age_s
        self._now_s = now_s
        self._held: dict[Key, _Held] = {}
        """The one used last comes last."""
        self._retired: set[_Held] = set()
        """They get no new calls, and are closed when the last one has ended."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def tls(self) -> bool:
        return self._files is not None

    @property
    def complaint(self) -> str:
        """What is wrong with this side's own key files now; empty if nothing is, and in plain text."""
        return self._files.complaint() if self._files else ""

    def __len__(self) -> int:
        """Channels that are open."""
        return len(self._held) + len(self._retired)

    @contextmanager
    def to(self, address: str, node: str = "", over: Over = "fleet") -> Iterator[grpc.aio.Channel]:
        """For one call. Raises `ConfigError` if the address isn't host:port."""
        held = self._newest((require_address("address", address), node if self._files else "", over))
        held.calls += 1
        try:
            yield held.channel
        finally:
            held.calls -= 1
            if held in self._retired:
                self._close_if_idle(held)

    def drop(self, address: str) -> None:
        """The next call to it connects anew; those that run go on."""
        for key in [key for key in self._held if key[0] == address]:
            self._retire(self._held.pop(key))

    async def close(self) -> None:
        """Calls that still run end with `PeerLost`."""
        everything = [*self._held.values(), *self._retired]
        self._held, self._retired = {}, set()
        for held in everything:
            await held.channel.close()
        await asyncio.gather(*self._closing)

    def _newest(self, key: Key) -> _Held:
        keys = self._files.newest() if self._files else None
        held = self._held.pop(key, None)
        if held is not None and keys is not None and self._outdated(held, keys):
            self._retire(held)
            held = None
        held = self._held[key] = held or _Held(open_channel(key[0], keys, key[1], key[2]), keys, self._now_s())
        if len(self._held) > MAX_CHANNELS:
            self._retire(self._held.pop(next(iter(self._held))))
        return held

    def _outdated(self, held: _Held, keys: Keys) -> bool:
        return held.keys is not keys or self._now_s() >= held.since_s + self._age_s

    def _retire(self, held: _Held) -> None:
        self._retired.add(held)
        self._close_if_idle(held)

    def _close_if_idle(self, held: _Held) -> None:
        if held.calls:
            return
        self._retired.discard(held)
        task = asyncio.get_running_loop().create_task(held.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
