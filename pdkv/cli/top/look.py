"""One look at a fleet: every node that is known is asked for its status, all at the same time.

Guarantees: a look ends within `2 * ASK_S`, whatever nodes do: one that doesn't answer is in it, with the reason, and
holds up nobody; nodes that a router names are found in the same look and are asked from then on, also when the router
is gone, until a router that answers no longer names them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pdkv.errors import PdkvError
from pdkv.node.flow import deadline
from pdkv.node.messages import NodeStatus
from pdkv.node.routing import RouterStatus

ASK_S = 2.0
Status: TypeAlias = "NodeStatus | RouterStatus"
Ask = Callable[[str], Awaitable[Status]]
"""What is at an address says of itself. Raises `PdkvError`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was at an address."""

    address: str
    at_s: float
    """On this process's own clock."""
    status: Status | None = None
    """None: it didn't answer."""
    error: str = ""
    """Why it didn't."""
    role: str = ""
    """As a router says; empty if none does."""
    word: str = ""
    """What a router says of it beside that: up, or why it is passed over."""


class Fleet:
    """Addresses that somebody gave, and those that routers name."""

    def __init__(self, ask: Ask, addresses: Iterable[str]) -> None:
        self._ask = ask
        self._given = tuple(dict.fromkeys(addresses))
        self._named: dict[str, dict[str, tuple[str, str]]] = {}
        """Of each router, as it said last: address to role and word."""

    async def look(self) -> list[Seen]:
        """Routers first, then decode and prefill nodes; of a role in the order of their addresses."""
        seen = await self._all(dict.fromkeys((*self._given, *self._known())))
        more = [address for address in self._known() if address not in seen]
        seen |= await self._all(more)
        known = self._known()
        told = [replace(s, role=known[a][0], word=known[a][1]) if a in known else s for a, s in seen.items()]
        return sorted((s for s in told if s.address in known or s.address in self._given), key=_order)

    async def _all(self, addresses: Iterable[str]) -> dict[str, Seen]:
        seen = await asyncio.gather(*map(self._one, addresses))
        for each in seen:
            if isinstance(each.status, RouterStatus):
                self._named[each.address] = _named(each.status)
        return {each.address: each for each in seen}

    async def _one(self, address: str) -> Seen:
        try:
            async with deadline(ASK_S, f"the status of {address}"):
                status = await self._ask(address)
        except PdkvError as error:
            return Seen(address, time.monotonic(), error=f"{error.kind}: {error}")
        return Seen(address, time.monotonic(), status)

    def _known(self) -> Mapping[str, tuple[str, str]]:
        return {address: said for named in self._named.values() for address, said in named.items()}


def _named(status: RouterStatus) -> dict[str, tuple[str, str]]:
    roles = {"prefill": status.prefill, "decode": status.decode}
    return {address: (role, word) for role, nodes in roles.items() for address, word in nodes.items()}


def _order(seen: Seen) -> tuple[int, str]:
    return ("router", "decode", "prefill", "").index(role_of(seen)), seen.address


def role_of(seen: Seen) -> str:
    """As it says itself, else as a router says."""
    if isinstance(seen.status, RouterStatus):
        return "router"
    said = seen.status.role if seen.status is not None else seen.role
    return said if said in ("decode", "prefill") else ""
