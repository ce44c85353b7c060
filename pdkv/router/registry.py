"""The nodes that a router may use, and how each of them is: what it said of itself, and what calls to it came to.

Guarantees: nodes join and leave at any time, and requests that run are not touched by it; a node on which a request
failed is passed over, then tried again by one request at a time, sooner if it says itself that it can serve; one that
only said that it can't, or was silent, is up again by its word; none is passed over for ever. Time is monotonic
seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from pdkv.contract import Contract
from pdkv.errors import ConfigError, PdkvError
from pdkv.ids import PeerName
from pdkv.node.messages import NodeStatus
from pdkv.node.routing import RoutedNode
from pdkv.router.load import Load

UP = "up"
LEAST_RETRY_S = 1.0
"""Between a request that failed on a node and the next one that tries it, although it says that it can serve."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Nodes of one kind promise the same, so they can serve the same nodes of another. A fleet has only a few."""

    contract: Contract
    """Without what may differ from node to node."""
    fingerprint: bytes
    """The contract's: where it is equal, prompts have the same pages."""


@dataclass(slots=True, eq=False)
class Trial:
    """A request on its way to nodes that were down; others who want one of them wait for how it goes."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[Node, PdkvError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Node:
    """One address in one role, from the day it joined until it leaves."""

    role: Role
    address: str
    name: PeerName | None = None
    """The life that it is in, once it has said so."""
    kind: Kind | None = None
    down: str = ""
    """Why it is passed over."""
    due_s: float = 0.0
    """Down: when it may be tried again."""
    failed_s: float = float("-inf")
    """When a request failed on it last, if none has come through since, in this life."""
    looked_s: float = float("-inf")
    """When it was asked for its status last."""
    answers: bool = False
    """It did when it was asked for its status last, and didn't say that it can't serve."""
    untold: str = ""
    """Why it gives no status, though it is there."""
    trial: Trial | None = None
    load: Load = field(default_factory=Load)

    def routed(self) -> RoutedNode:
        """As it is weighed."""
        load = self.load
        return RoutedNode(
            self.role, load.requests, load.waiting_tokens, load.available_pages, load.total_pages, load.trust
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """The two nodes of a request."""

    prefill: Node
    decode: Node

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.prefill, self.decode

    @property
    def facts(self) -> dict[str, str]:
        """For a trace."""
        return {"pdkv.prefill.address": self.prefill.address, "pdkv.decode.address": self.decode.address}

    def __str__(self) -> str:
        return f"{self.decode.address} with {self.prefill.address}"


class Registry:
    """Nodes by role and address (host:port)."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        retry_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retry_s`: how long a node is passed over that doesn't say itself how it is. Raises `ConfigError` for an
        address that stands twice in one list."""
        self._nodes: dict[Role, dict[str, Node]] = {role: {} for role in Role}
        self._kinds: dict[Contract, Kind] = {}
        self._retry_s = retry_s
        self.now = now
        self.version = 0
        """Another one whenever a node has joined or left."""
        self.left: Callable[[Node], None] = lambda node: None
        """Called with a node that has left."""
        self.look: Callable[[], None] = lambda: None
        """Called when a node is to be looked at at once."""
        for role, addresses in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            self.replace(role, addresses)

    def __iter__(self) -> Iterator[Node]:
        return iter([node for nodes in self._nodes.values() for node in nodes.values()])

    def nodes(self, role: Role) -> list[Node]:
        return list(self._nodes[role].values())

    # --- join and leave ---------------------------------------------------------------------------------------------

    def add(self, role: Role, address: str) -> Node:
        """Raises `ConfigError` if it is there already."""
        if address in self._nodes[role]:
            raise ConfigError(f"{role} addresses", address, "each once")
        node = self._nodes[role][address] = Node(role, address)
        self.version += 1
        return node

    def remove(self, role: Role, address: str) -> None:
        """It gets no new request; those that run go on. Raises `ConfigError` if it isn't there."""
        node = self._nodes[role].pop(address, None)
        if node is None:
            raise ConfigError(f"{role} addresses", address, "one that is there: " + ", ".join(self._nodes[role]))
        self.version += 1
        self.left(node)

    def replace(self, role: Role, addresses: Sequence[str]) -> None:
        """These and no others; what is known of those that stay is kept."""
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"{role} addresses", list(addresses), "each once")
        for address in set(self._nodes[role]).difference(addresses):
            self.remove(role, address)
        for address in addresses:
            if address not in self._nodes[role]:
                self.add(role, address)

    # --- how they are -----------------------------------------------------------------------------------------------

    def open(self, node: Node) -> bool:
        """It may get a request: it is up, or it is time to try it again and nobody does."""
        return not node.down or (node.trial is None and self.now() >= node.due_s)

    def mark_up(self, node: Node) -> None:
        """A request has come through to its first token."""
        node.down, node.failed_s = "", float("-inf")
        self._decide(node)

    def mark_down(self, node: Node, error: PdkvError) -> None:
        """A request failed on it."""
        node.failed_s = self.now()
        node.looked_s = float("-inf")  # what it says of itself is asked for at once
        self._pass_over(node, f"{error.kind}: {error}")
        if node.trial is not None:
            node.trial.failed[node] = error
        self._decide(node)
        self.look()

    def done_without(self, node: Node) -> None:
        """A request that was to try it has come through without it: it stays down, and others may do as that one."""
        node.failed_s = self.now()
        self._pass_over(node, node.down)
        self._decide(node)

    def unheard(self, node: Node, error: PdkvError) -> None:
        """It doesn't say how it is."""
        self._pass_over(node, f"{error.kind}: {error}")

    def look_at(self, node: Node) -> None:
        """It isn't what was known, or isn't there: how it is, is asked for at once."""
        node.looked_s = float("-inf")
        self.look()

    def learn(self, node: Node, status: NodeStatus) -> None:
        """What it said of itself. Its word that it can serve is enough, but where a request failed on it in this life:
        there one request has to show it, soon."""
        born = node.name != status.name
        node.name, node.kind = status.name, self._kind(status.contract)
        node.load.total_pages = status.pages.get("total", 0)
        node.load.said(status)
        if born:
            node.load.born()
            node.failed_s = float("-inf")
        if status.draining or status.unready:
            self._pass_over(node, "draining" if status.draining else f"unready: {status.unready}")
        elif math.isinf(node.failed_s):
            node.down = ""
        elif node.down:
            node.due_s = min(node.due_s, max(self.now(), node.failed_s + LEAST_RETRY_S))

    @contextmanager
    def trying(self, pair: Pair) -> Iterator[Trial]:
        """Until it is left, or their fate is known before, those nodes of the pair that are down are on trial: on this
        one, unless they are on another's."""
        trial = Trial()
        for node in pair.nodes:
            if node.down and node.trial is None:
                node.trial = trial
        try:
            yield trial
        finally:
            trial.over.set()
            for node in pair.nodes:
                if node.trial is trial:
                    node.trial = None

    def _kind(self, contract: Contract) -> Kind:
        informative: dict[str, Any] = {f.name: "" for f in fields(contract) if f.metadata["rule"] == "informative"}
        rules = replace(contract, **informative)
        kind = self._kinds.get(rules)
        if kind is None:
            kind = self._kinds[rules] = Kind(rules, rules.fingerprint)
        return kind

    def _pass_over(self, node: Node, why: str) -> None:
        node.down = why
        node.due_s = self.now() + self._retry_s

    def _decide(self, node: Node) -> None:
        if node.trial is not None:
            node.trial.over.set()
            node.trial = None
