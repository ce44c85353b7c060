"""One channel for an address and, under mutual TLS, for the node that must be there.

Guarantees: a call keeps its channel to its end; a new call gets one whose certificate is the newest on disk and which
is not older than an hour; at most `MAX_CHANNELS` are kept, so addresses that a client makes up fill nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import grpc

from pdkv.rpc.convert.checks import MAX_DURATION_S
from pdkv.rpc.security import KeyFiles, Keys, MutualTls, Security
from pdkv.rpc.transport import open_channel, require_address

MAX_CHANNELS = 1024
CHANNEL_AGE_S = 3600.0
"""Under TLS. Half of what a server allows: a call that begins just as a server ends the connection may be lost."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Held:
    channel: grpc.aio.Channel
    keys: Keys | None
    since_s: float


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
        self._ending: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        """They take no new calls and are closed when the last one has ended."""

    @property
    def tls(self) -> bool:
        return self._files is not None

    @property
    def complaint(self) -> str:
        """What is wrong with this side's own key files now; empty if nothing is, and in plain text."""
        return self._files.complaint() if self._files else ""

    def to(self, address: str, node: str = "") -> grpc.aio.Channel:
        """For a call that begins now. Raises `ConfigError` if the address isn't host:port."""
        key = (require_address("address", address), node if self._files else "")
        keys = self._files.newest() if self._files else None
        held = self._held.pop(key, None)
        if held is not None and keys is not None and self._outdated(held, keys):
            self._retire(held.channel)
            held = None
        self._held[key] = held or _Held(open_channel(key[0], keys, key[1]), keys, self._now_s())
        if len(self._held) > MAX_CHANNELS:
            self._retire(self._held.pop(next(iter(self._held))).channel)
        return self._held[key].channel

    def drop(self, address: str) -> None:
        """The next call to it connects anew; those that run go on."""
        for key in [key for key in self._held if key[0] == address]:
            self._retire(self._held.pop(key).channel)

    async def close(self) -> None:
        """Calls that still run end with `PeerLost`."""
        channels = [held.channel for held in self._held.values()] + list(self._ending.values())
        self._held = {}
        for channel in channels:
            await channel.close()
        await asyncio.gather(*self._ending)

    def _outdated(self, held: _Held, keys: Keys) -> bool:
        return held.keys is not keys or self._now_s() >= held.since_s + self._age_s

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(MAX_DURATION_S))
        self._ending[task] = channel
        task.add_done_callback(self._ending.pop)
