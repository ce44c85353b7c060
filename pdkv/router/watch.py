"""Asks the nodes of a router how they are.

Guarantees: what a node says of itself (its life, its contract, that it can't serve or is draining) is known to the
router soon after it has changed; a node that doesn't answer holds up only itself; nothing but a status is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from pdkv.errors import DeadlineExceeded, NotADecodeNode, NotAPrefillNode, PdkvError, PeerLost, RemoteError
from pdkv.ids import RequestId
from pdkv.node.messages import NodeStatus
from pdkv.node.ports import DecodeService
from pdkv.node.readiness import Readiness
from pdkv.node.rounds import Rounds
from pdkv.node.routing import Estimate, EstimateCall
from pdkv.router.outlook import hindrance
from pdkv.router.pairing import Pairing
from pdkv.router.registry import Node, Registry, Role

log = logging.getLogger(__name__)

DOWN_S = 0.5
"""Between two looks at a node that is down."""


class Stated(Protocol):
    """Whoever says how it is."""

    async def status(self) -> NodeStatus: ...
    async def estimate(self, call: EstimateCall) -> Estimate: ...


class StatedDecode(DecodeService, Stated, Protocol):
    """A decode node, as a router sees it."""

    async def finish(self, request: RequestId, output_tokens: int) -> None: ...


class NodeDirectory(Protocol):
    """Turns an address into a node; the connection is made on first use."""

    def decode(self, address: str) -> StatedDecode: ...
    def peer(self, address: str) -> Stated: ...
    def drop(self, address: str) -> None:
        """The next call to this address connects anew; those that run go on."""
        ...


class Watch(Rounds[Node]):
    """Has `run`, for the router's life, and `step`."""

    def __init__(
        self,
        registry: Registry,
        nodes: NodeDirectory,
        pairing: Pairing,
        readiness: Readiness | None = None,
        *,
        every_s: float = 2.0,
    ) -> None:
        """`every_s`: between two looks at a node that is up. `readiness`, the router's, hears whether there is a pair
        of nodes that answer, and may be paired."""
        super().__init__(registry.now)
        self._registry = registry
        self._nodes = nodes
        self._pairing = pairing
        self._every_s = every_s
        self._readiness = readiness or Readiness()
        self._say()
        registry.look = self.changed.set

    def due(self) -> Mapping[Node, float]:
        return {
            node: node.looked_s + (min(DOWN_S, self._every_s) if node.down else self._every_s)
            for node in self._registry
        }

    async def visit(self, key: Node) -> None:
        key.looked_s = self._now()
        if key.down:
            # Over a fresh connection: the old one may be waiting until it tries again.
            self._nodes.drop(key.address)
        try:
            status = await self._of(key).status()
        except (PeerLost, DeadlineExceeded, RemoteError) as failed:
            error = named(key, failed)
            if not key.down:
                log.warning("%s node %s is down: %s: %s", key.role, key.address, error.kind, error)
            key.answers = False
            self._registry.unheard(key, error)
        except PdkvError as error:
            # It is there, and doesn't say to us how it is: requests will find out.
            if key.untold != (words := f"{error.kind}: {error}"):
                log.warning("%s node %s gives no status: %s", key.role, key.address, words)
            key.untold = words
            key.answers = True
        else:
            key.untold = ""
            key.answers = not (status.unready or status.draining)
            self._note(key, status)
        self._say()

    def _say(self) -> None:
        """A router without any pair of nodes can serve nobody."""
        found = hindrance(self._registry, self._pairing, lambda node: node.answers)
        self._readiness.say("nodes", *((found.why, found.detail) if found else ("",)))

    def _note(self, node: Node, status: NodeStatus) -> None:
        if node.name != status.name:
            fingerprint = status.contract.content_fingerprint.hex()
            log.info("%s node %s is %s, of content %.12s", node.role, node.address, status.name, fingerprint)
        self._registry.learn(node, status)

    def _of(self, node: Node) -> Stated:
        return self._nodes.decode(node.address) if node.role is Role.DECODE else self._nodes.peer(node.address)


def named(node: Node, error: PdkvError) -> PdkvError:
    """The same, or, of a node that has no service of its role, that it is of another one."""
    if error.fields.get("code") != "UNIMPLEMENTED":
        return error
    kind = NotADecodeNode if node.role is Role.DECODE else NotAPrefillNode
    return kind(f"{node.address} is no {node.role} node: {error}", address=node.address)
