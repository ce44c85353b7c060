"""A router whose nodes are found, as it is served.

Guarantees: its status says where nodes are looked for, and why none is found there; all else is the router's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from pdkv.node.messages import GenerateEvent, GenerateRequest
from pdkv.node.routing import RouterStatus


class Routing(Protocol):
    """`router.service.Router`."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...
    def status(self) -> RouterStatus: ...


class DiscoveredRouter:
    """Has `generate` and `status`."""

    def __init__(self, router: Routing, discovery: Callable[[], dict[str, str]]) -> None:
        self._router = router
        self._discovery = discovery

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """As the router's."""
        return self._router.generate(request)

    def status(self) -> RouterStatus:
        return replace(self._router.status(), discovery=self._discovery())
