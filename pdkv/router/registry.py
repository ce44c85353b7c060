"""The nodes that a router may use: static lists of addresses, and what their last call said of them.

Guarantees: a node that failed is passed over for `retry_s`, then tried again; nothing is asked of a node for this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdkv.errors import ConfigError
from pdkv.node.messages import RouterStatus

UP = "up"


class Registry:
    """Addresses are host:port. Time is monotonic seconds."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        retry_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for an empty list or an address that stands twice in one."""
        for role, addresses in (("prefill", prefill), ("decode", decode)):
            if not addresses or len(set(addresses)) != len(addresses):
                raise ConfigError(f"{role} addresses", list(addresses), "at least one, each once")
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self._retry_s = retry_s
        self._now = now
        self._down: dict[str, tuple[str, float]] = {}
        """Address to the reason and when it may be tried again."""

    def mark_down(self, address: str, reason: str) -> None:
        self._down[address] = (reason, self._now() + self._retry_s)

    def mark_up(self, address: str) -> None:
        self._down.pop(address, None)

    def usable(self, address: str) -> bool:
        """It didn't fail, or long enough ago to be tried again."""
        return address not in self._down or self._now() >= self._down[address][1]

    def status(self, requests: int) -> RouterStatus:
        prefill, decode = (
            {address: self._down[address][0] if address in self._down else UP for address in addresses}
            for addresses in (self.prefill, self.decode)
        )
        return RouterStatus(prefill, decode, requests)
