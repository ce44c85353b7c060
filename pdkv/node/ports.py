"""What a node needs from the world, as ports: an engine, a transfer engine, a prefill peer.

Guarantees: the node's state machines import nothing that does I/O. A test joins two nodes by handing one to the other:
`PrefillNode` has the methods of `PrefillPeer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import LocalPages, PeerName, UInt32Array
from pdkv.node.messages import GenerateEvent, GenerateRequest, LeaseCall, NodeIntro, PrefillEvent, PrefillRequest
from pdkv.transfer.engine import Probe, ReadOrder, ReadOutcome

Logits = npt.NDArray[np.float32]


class Engine(Protocol):
    """A model over the pool. Called from one thread at a time; returns when the step has *completed*."""

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        """Compute positions [start, start + len(tokens)) and return float32 [vocab] logits of the last one.

        The rows of [0, start) are in `pages` already (page i of the sequence is `pages[i]`); new rows of both caches
        are written there. Raises `BoundsError` if `pages` is too short.
        """
        ...


class Transfer(Protocol):
    """The transfer engine, as a node uses it."""

    @property
    def metadata(self) -> bytes: ...
    @property
    def metadata_checksum(self) -> int: ...
    @property
    def backend_name(self) -> str: ...
    def add_peer(self, peer: PeerName, metadata: bytes, checksum: int, pool: PoolMap) -> Future[None]: ...
    def remove_peer(self, peer: PeerName) -> Future[None]: ...
    def read(self, order: ReadOrder) -> Future[ReadOutcome]: ...
    def cancel(self, read: Future[ReadOutcome]) -> None:
        """Give up waiting: the read's outcome comes at once, UNSETTLED unless it had ended."""
        ...

    def probe(self, peer: PeerName) -> Future[Probe]: ...
    def lane(self, peer: PeerName) -> str: ...
    def close(self) -> None: ...


class PrefillPeer(Protocol):
    """A prefill node as decode sees it, over gRPC or in the same process."""

    async def connect(self, intro: NodeIntro) -> NodeIntro: ...
    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]: ...
    async def renew_lease(self, call: LeaseCall) -> float: ...
    async def release_lease(self, call: LeaseCall) -> None: ...


class PrefillDirectory(Protocol):
    """Turns an address into a peer; the connection is made on first use."""

    def peer(self, address: str) -> PrefillPeer: ...


class DecodeService(Protocol):
    """A decode node as a client or a router sees it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...
