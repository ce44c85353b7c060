"""The port to whatever moves the bytes: prepared descriptor lists, reads, and how reads end.

Guarantees: `post` and `poll` never raise for what a peer or a network does, they report an `End`; an `End` says FAILED
only when it is proven that nothing lands any more, and LOST when the backend gave up without such a proof; `close`
is the fence: after it, nothing lands in local memory. A backend belongs to the one thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType, Protocol

from pdkv.ids import Int32Array, UInt64Array

Memory = Literal["DRAM", "VRAM"]
AgentName = NewType("AgentName", str)


class EndState(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """Ended without its data, and nothing lands any more."""
    LOST = "lost"
    """Ended without its data, and without proof that nothing lands any more."""


@dataclass(frozen=True, slots=True)
class End:
    """How one posted read ended. `bytes` and `descriptors` are the backend's own count, 0 unless DONE."""

    state: EndState
    reason: str = ""
    disconnected: bool = False
    """The peer or the connection to it is gone: all reads of that peer will end."""
    bytes: int = 0
    descriptors: int = 0


class Prepared(Protocol):
    """A prepared descriptor list; opaque."""


class Posted(Protocol):
    """A read that was posted; opaque."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a read: a prepared list and an int32 column of descriptors in it."""

    prepared: Prepared
    indices: Int32Array


@dataclass(frozen=True, slots=True)
class Lane:
    """What carries the reads of a peer, as the transport itself says."""

    name: str
    """Transports joined by "+", such as "cma", "tcp", "rc_mlx5"; "unknown" if the transport said nothing."""
    detail: str = ""
    """The transport's own words."""
    rdma: bool = False
    ends_clean: bool = False
    """A read that ended with a disconnect writes nothing any more. False where that is not proven, as with RDMA."""
    copied: bool = False
    """The thread that posts a read copies its bytes: by then it has ended."""


UNKNOWN_LANE = Lane("unknown")


class Backend(Protocol):
    """An agent. Every method is called from one thread."""

    @property
    def name(self) -> str:
        """Of the backend that was instantiated, not the one that was asked for."""
        ...

    def register(self, address: int, length: int, memory: Memory, device: int) -> None:
        """Make memory readable by peers and writable by own reads. Raises `TransferError`."""
        ...

    def metadata(self) -> bytes:
        """Of everything registered so far."""
        ...

    def add_peer(self, peer: AgentName, metadata: bytes) -> None:
        """Raises `ProtocolError` if the metadata can't be used or is another agent's, `PeerLost` if nobody is there."""
        ...

    def remove_peer(self, peer: AgentName) -> None:
        """Only when no read of that peer runs and its prepared lists are released."""
        ...

    def prepare(self, peer: AgentName | None, table: UInt64Array, memory: Memory) -> Prepared:
        """Strided table, uint64 [rows, 5] of (address, length, device, stride, count); peer None is this side.

        Raises `BoundsError` for memory that is not registered there.
        """
        ...

    def release(self, prepared: Prepared) -> None: ...

    def post(self, local: Side, remote: Side) -> Posted:
        """Start a READ. A failure to start is reported by `poll`."""
        ...

    def poll(self, read: Posted) -> End | None:
        """None while it runs. Once it returns an `End` the read is over and must not be polled again."""
        ...

    def progress(self) -> None:
        """Serve peers: connections, and the target's side of reads that need it."""
        ...

    def lane(self, peer: AgentName) -> Lane:
        """Known after a first read of that peer's pages."""
        ...

    def close(self) -> None:
        """Destroy the agent. Idempotent."""
        ...


BackendFactory = Callable[[AgentName], Backend]
"""Called in the transfer thread."""
