"""What a node needs from the world, as ports: an engine, a transfer engine, a prefill peer.

Guarantees: the node's state machines import nothing that does I/O. A test joins two nodes by handing one to the other:
`PrefillNode` has the methods of `PrefillPeer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import LocalPages, PeerName, UInt32Array
from pdkv.node.messages import (
    DraftHandoff,
    Float32Array,
    GenerateEvent,
    GenerateRequest,
    LeaseCall,
    LendCall,
    Loan,
    LocateCall,
    NodeIntro,
    PrefillEvent,
    PrefillRequest,
    Sampling,
)
from pdkv.transfer.engine import Probe, ReadOrder, ReadOutcome, TransferStatus

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Computed:
    """One step of an engine, as a draft head needs it."""

    logits: Logits
    """float32 [positions, vocab], or [1, vocab] where only the last position's were asked for."""
    hidden: Float32Array
    """float32 [positions, width]: what the logits were made of; width 0 from an engine that shows none."""


class Engine(Protocol):
    """A model over the pool. Called from one thread at a time; returns when the step has *completed*."""

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        """Compute positions [start, start + len(tokens)) and return float32 [vocab] logits of the last one.

        The rows of [0, start) are in `pages` already (page i of the sequence is `pages[i]`); new rows of both caches
        are written there. Raises `BoundsError` if `pages` is too short.
        """
        ...

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        """As `forward`, with the hidden states of all positions."""
        ...

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        """As `forward`, with logits and hidden states of all positions; row i of both is, bit for bit, what `forward`
        of token i alone gives after those before it. So a draft is judged by what plain decoding would have said.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Where a sequence stands: `token` at `place` is its last, whose rows are yet to be computed."""

    token: int
    place: int
    count: int
    """Tokens wanted, at least 1."""
    sampling: Sampling
    state: DraftHandoff | None


@dataclass(frozen=True, slots=True)
class Drafts:
    tokens: UInt32Array
    """uint32 [count], for the places after `DraftAsk.place`."""
    logits_digests: tuple[int, ...] = ()
    """xxh3_64 of the float32 logits that each came from; empty where there are none."""


class Drafter(Protocol):
    """Proposes tokens; called from the engine's thread. It may write rows of a sequence at `place` and after, in its
    draft layer or in all: they count for nothing, the verification and the roll-back after it overwrite them.
    """

    @property
    def hidden_width(self) -> int:
        """Of `DraftHandoff.hidden`; 0 for a drafter without state."""
        ...

    def extend(self, hidden: Float32Array, after: UInt32Array, start: int, pages: LocalPages) -> DraftHandoff | None:
        """Write the draft rows of positions [start, start + n) and return the state after the last one.

        `hidden` [n, width] are the model's hidden states there, `after` [n] the tokens that *follow* each position.
        """
        ...

    def propose(self, ask: DraftAsk, pages: LocalPages) -> Drafts:
        """`ask.count` drafts for the places after `ask.place`."""
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
    def expect_reads(self, *, peers_may: bool) -> None:
        """Peers hold leases of this node's pages, or none does any more."""
        ...

    def lane(self, peer: PeerName) -> str: ...
    def copies(self, peer: PeerName) -> bool:
        """Pages of the peer are copied by the thread that reads them: an order's witness sees each as it lands."""
        ...

    def status(self) -> TransferStatus: ...
    def close(self) -> None: ...


class Connecting(Protocol):
    """A node as it is met."""

    async def connect(self, intro: NodeIntro) -> NodeIntro: ...


class SourcePeer(Connecting, Protocol):
    """A node that has pages, whatever else it does, as another one sees it."""

    async def locate(self, call: LocateCall) -> int: ...
    async def lend(self, call: LendCall) -> Loan: ...
    async def release_lease(self, call: LeaseCall) -> None: ...


class PrefillPeer(SourcePeer, Protocol):
    """A prefill node as decode sees it, over gRPC or in the same process."""

    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]: ...
    async def renew_lease(self, call: LeaseCall) -> float: ...


Met = TypeVar("Met", bound=Connecting, covariant=True)


class Directory(Protocol[Met]):
    """Turns an address into a peer; the connection is made on first use."""

    def peer(self, address: str) -> Met: ...
    def drop(self, address: str) -> None:
        """The next call to this address connects anew; those that run go on."""
        ...


PrefillDirectory = Directory[PrefillPeer]
SourceDirectory = Directory[SourcePeer]


class DecodeService(Protocol):
    """A decode node as a client or a router sees it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...
