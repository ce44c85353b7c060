"""What the leader of a decode group and its other ranks say to each other: plain values, and the port.

Guarantees: everything that happens to pages on a rank is an entry of one log, which the leader writes and every rank
carries out in that order; a read, a verification and an engine's step say how much of the log they come after, and wait
for it. Page ids are the same on all ranks, so a page table of the leader's is every rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pdkv.contract import Contract
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import Int32Array, PageHashes, PeerName, ReservationId, UInt32Array, UInt64Array
from pdkv.kvcache.arrival import Arrival
from pdkv.transfer.engine import ReadOrder, ReadStatus
from pdkv.transfer.orders import BoolArray

NO_HASHES = PageHashes()


class Op(StrEnum):
    """The calls of a `CacheManager` that change it, as decode makes them."""

    RESERVE = "reserve"
    COMMIT = "commit"
    EXTEND = "extend"
    TAKE = "take_private"
    SEAL = "seal_private"
    REOPEN = "reopen_private"
    QUARANTINE = "quarantine"
    RELEASE = "release_quarantine"
    END = "end"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One call. `numbers` are its integers in order: total, most hit, dropped and priority of RESERVE; first page index
    of COMMIT and SEAL; whether local writers may run of END."""

    op: Op
    reservation: ReservationId
    pages: Int32Array
    """Of RESERVE and COMMIT what came out of it at the leader, so must here."""
    hashes: PageHashes = NO_HASHES
    numbers: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Joining:
    """What the leader is: a rank joins only if it is the same in all but name."""

    leader: PeerName
    contract: Contract
    num_pages: int


@dataclass(frozen=True, slots=True)
class RankRead:
    """A read of the leader's, for this rank's own pages of the same ids."""

    read_id: int
    after: int
    """Entries of the log that come before."""
    order: ReadOrder


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How the rank's own read ended; UNSETTLED: `RankPort.settled` answers when nothing lands any more."""

    status: ReadStatus
    stale: BoolArray
    reason: str = ""


class StepKind(StrEnum):
    FORWARD = "forward"
    CHUNK = "chunk"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, eq=False)
class RankStep:
    """A step of the engine: `node.ports.Engine`'s call of that name."""

    kind: StepKind
    after: int
    tokens: UInt32Array
    start: int
    pages: Int32Array


@dataclass(frozen=True, slots=True)
class NewPeer:
    """A prefill node that the leader connected to: all ranks read from it."""

    name: PeerName
    metadata: bytes
    metadata_checksum: int
    pool: PoolMap


class RankPort(Protocol):
    """A rank as its leader sees it, in the same process or over gRPC. What can't be reached raises `PeerLost`."""

    async def join(self, joining: Joining) -> PeerName:
        """The rank's name. Raises `ContractMismatch`, `BoundsError` for another size of pool, and `ProtocolError` if
        it has a leader already: a rank serves one life of a leader."""
        ...

    async def apply(self, first: int, entries: Sequence[Entry]) -> None:
        """Carry out entries [first, first + n) of the log. Raises `IntegrityError` if one doesn't give here what it
        gave at the leader; the rank is of no use then."""
        ...

    async def add_peer(self, peer: NewPeer) -> None: ...
    async def remove_peer(self, peer: PeerName) -> None: ...
    async def read(self, read: RankRead) -> RankOutcome: ...
    async def cancel(self, read_id: int) -> None:
        """Give up waiting: the read's outcome comes at once."""
        ...

    async def settled(self, read_id: int) -> None: ...

    async def verify(self, arrival: Arrival, after: int) -> UInt64Array:
        """VERIFIED: uint64 [pages, 2] digests of what is in this rank's pages. Where they are the announced ones, an
        entry that commits these pages finds its proof here."""
        ...

    async def step(self, step: RankStep) -> int:
        """xxh3_64 of the step's float32 logits, once it has completed."""
        ...
