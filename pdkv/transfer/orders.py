"""What is asked of the transfer engine, how it ends, and how the engine stands: plain values.

Guarantees: the columns of a `ReadOrder` have one entry a page each; a `ReadOutcome` says DONE or FAILED only when
nothing writes to the destination pages any more, and UNSETTLED otherwise.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import LocalPages, PageHashes, PeerName, RemotePages, UInt64Array

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Limits and waits of a transfer engine."""

    read_max_bytes: int = 512 << 20
    """Of one READ: bounds what a fence has to wait for. What is under way (`under_way_s`) bounds it, too."""
    under_way_s: float = 0.008
    """Bytes under way are what arrives in so long: who comes next waits for no more, and the link never waits."""
    look_bytes: int = 4 << 20
    """Read at once where an order's witness looks at it next: more would have left the core's caches by then."""
    landing_rows: int = 1 << 16
    """Page-table rows that can be under way at once; 64 B each."""
    connect_s: float = 5.0
    """A new peer's first read must end within it."""
    probe_s: float = 2.0
    idle_s: float = 0.02
    """Between two polls when nothing moves: how long a peer may wait for a connection. Who has a lease waits for
    `reading_s` at most."""
    reading_s: float = 0.0005
    """The same while reads run."""
    close_s: float = 1.0
    """Running reads may end within it before the agent is destroyed: cut off, they can abort a source over TCP."""
    require_rdma: bool = False
    """Refuse a peer whose pages would travel over anything else."""
    fence_after_s: float = 10.0
    """How long a read may stay unsettled before its agent is fenced off and destroyed."""
    fence_every_s: float = 10.0
    """At most one fence within it: each registers the pool once more."""
    line_stall_s: float = 2.0
    """Where there are several lines to a peer: one is down when nothing came on it for so long, and on others did."""
    line_retry_s: float = 5.0
    """Until one that is down is tried again; twice as long each time."""
    cpus: frozenset[int] = frozenset()
    """Where the thread runs; empty: wherever it is."""


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """What a peer sent about itself. `checksum` is xxh3_64 of `metadata`."""

    metadata: bytes
    checksum: int
    pool: PoolMap


class ReadStatus(StrEnum):
    DONE = "done"
    """Every byte arrived, and then the page-table rows of the same pages."""
    FAILED = "failed"
    """The read ended without all of its data; nothing lands any more: the pages may be given away."""
    UNSETTLED = "unsettled"
    """No end was seen: bytes may still land in the destination pages, so they must be held back."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Orders that take turns on the links as one: those of a request. Unequal ids are other flows."""

    id: int
    pages: int
    """Of all its orders, also those that were not given yet."""
    after: int
    """Of the orders that come after this one."""


class Witness(Protocol):
    """Looks at pages of an order while they land. Called from the transfer thread; a part is of the order's columns."""

    def begins(self, part: slice) -> None:
        """These pages are about to be written: what was seen of them is void."""
        ...

    def landed(self, part: slice) -> None:
        """They have arrived, nothing writes to them any more, and their bytes are still in the caches of this core.

        Not called for every page: only over lanes where the thread itself copies is there such a moment.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read `remote` pages of a peer's pool into `local` pages, page i into page i.

    `generations` (uint64 [n]) and `hashes` are what the peer announced; the read is void for the pages whose
    page-table row says otherwise afterwards. Raises `BoundsError` if the columns differ in length or are empty.
    """

    peer: PeerName
    local: LocalPages
    remote: RemotePages
    generations: UInt64Array
    hashes: PageHashes
    deadline_s: float
    """Seconds from now until the outcome is UNSETTLED at the latest."""
    flow: Flow | None = None
    """None: it is one of its own."""
    witness: Witness | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        lengths = (len(self.local), len(self.remote), int(np.asarray(self.generations).size), len(self.hashes))
        if len(set(lengths)) != 1 or not lengths[0]:
            raise BoundsError("read order, entries of local, remote, generations, hashes", lengths, "equal, at least 1")

    def __len__(self) -> int:
        return len(self.local)


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a read ended, with its account. `bytes` are planned page bytes, without page-table rows."""

    status: ReadStatus
    stale: BoolArray
    """bool [n]: the source page's generation or hash is not the announced one. All False unless DONE."""
    bytes: int
    backend_bytes: int
    """What the backend's own telemetry counted for the data reads that ended DONE, in bytes."""
    descriptors: int
    """What the backend posted, after merging of consecutive pages."""
    post_s: float
    elapsed_s: float
    reason: str = ""
    settled: Future[None] | None = None
    """UNSETTLED only: resolves when nothing can land in the destination pages any more."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A read of one page-table row that ended well."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What reads of one peer hold back."""

    peer: PeerName
    reads: int
    pages: int
    oldest_s: float
    """Since the first of them was given up."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What making a pool known to one agent took; where there is an RDMA device, it was pinned meanwhile."""

    regions: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        regions = "1 region" if self.regions == 1 else f"{self.regions} regions"
        return f"{self.bytes:,} B as {regions} in {self.seconds * 1e3:.3g} ms"


@dataclass(frozen=True, slots=True)
class RailStatus:
    """A rail of this node."""

    device: str
    """Empty: any."""
    lanes: tuple[str, ...]
    """What carries reads on it, by name."""
    down: tuple[str, ...]
    """Peers that are not read from on it, each with the reason."""

    def __str__(self) -> str:
        lanes = "+".join(self.lanes) or "nothing read yet"
        return f"{lanes}; down to {', '.join(self.down)}" if self.down else lanes


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """The engine at one moment."""

    agents: tuple[str, ...]
    """Those that serve, one a rail; those that read, and those that are being fenced off; empty after `close`."""
    rotations: int
    unsettled: tuple[Unsettled, ...]
    """A row a peer."""
    fence_error: str = ""
    """Why the last fence came to nothing, if it did."""
    registration: Registration = Registration()
    """Of the pool, by the agents that serve."""
    rails: tuple[RailStatus, ...] = ()
