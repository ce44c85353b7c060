"""The ways to a peer: lines, each from a rail here to a rail there.

Guarantees: every rail of either side is on a line: line i joins rail i mod n here and rail i mod m there, so that
equal numbers are paired in the order in which both sides name them; metadata that is no whole list of entries is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pdkv.errors import BoundsError, LaneRefused, ProtocolError
from pdkv.ids import PeerName
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, Lane
from pdkv.transfer.descriptors import ReadPlan
from pdkv.transfer.orders import PeerOffer

MAX_RAILS = 64
_LENGTH_BYTES = 4


def serving_agent(name: PeerName, rail: int) -> AgentName:
    """The agent by which a node serves on one of its rails."""
    return AgentName(f"{name}/{rail}" if rail else str(name))


def pack(metadata: Sequence[bytes]) -> bytes:
    """Of a node's serving agents, in the order of its rails: each with its length before it."""
    return b"".join(len(one).to_bytes(_LENGTH_BYTES, "little") + one for one in metadata)


def unpack(packed: bytes, of: PeerName) -> list[bytes]:
    """Raises `ProtocolError` unless it is a whole list, `BoundsError` for one that is too long."""
    found: list[bytes] = []
    at = 0
    while at < len(packed):
        first = at + _LENGTH_BYTES
        at = first + int.from_bytes(packed[at:first], "little")
        found.append(packed[first:at])
    if at != len(packed) or not all(found):
        raise ProtocolError(f"agent metadata of {of} is no list of whole entries", have=len(packed), needed=at)
    if not 0 < len(found) <= MAX_RAILS:
        raise BoundsError(f"rails of {of}", len(found), f"1 to {MAX_RAILS}")
    return found


@dataclass(slots=True, eq=False)
class Line:
    """One way to a peer, and what runs on it. Times are seconds of the clock that the core is stepped by."""

    rail: int
    """Of this node."""
    agent: AgentName
    """That serves there."""
    metadata: bytes
    lane: Lane = UNKNOWN_LANE
    running: int = 0
    """Reads that the backend has not ended, on whatever agent."""
    parts: int = 0
    """Those of pages among them."""
    under_way: int = 0
    """Bytes of those."""
    posted: int = 0
    """Bytes, ever."""
    down: str = ""
    """Why no new read is posted on it, for as long as there is another one."""
    quiet_s: float = 0.0
    """Since when no read has ended on it, while one runs."""
    moved_s: float = -math.inf
    """When a read last ended well on it."""
    up_s: float = -math.inf
    """When it came back."""
    retry_s: float = 0.0
    """When it is tried again, once it is down."""
    failures: int = 0
    """In a row."""

    def began(self, count: int, now: float) -> None:
        """A read of so many bytes of pages, or of 0, was posted."""
        if not self.running:
            self.quiet_s = now
        self.running += 1
        self.parts += bool(count)
        self.under_way += count
        self.posted += count

    @property
    def load(self) -> tuple[int, int]:
        """The next read goes where this is least."""
        return self.under_way, self.posted

    def finished(self, count: int) -> None:
        """The backend has ended that read, or its agent is gone."""
        self.running -= 1
        self.parts -= bool(count)
        self.under_way -= count


@dataclass(slots=True, eq=False)
class Peer:
    """A peer that was added, and all that is needed to add it to another agent."""

    name: PeerName
    offer: PeerOffer
    plan: ReadPlan
    lines: tuple[Line, ...]
    lost: str = ""
    """Why no new read is posted, once the peer is gone."""
    leaving: bool = False
    arrivals: list[Future[None]] = field(default_factory=list)
    """Waiting for its first read to end."""
    departures: list[Future[None]] = field(default_factory=list)
    """Waiting for its removal."""

    @classmethod
    def offered(cls, name: PeerName, offer: PeerOffer, plan: ReadPlan, rails: int) -> Peer:
        """With its lines to this node's rails. Raises as `unpack`."""
        theirs = unpack(offer.metadata, name)
        lines = [
            Line(i % rails, serving_agent(name, i % len(theirs)), theirs[i % len(theirs)])
            for i in range(max(rails, len(theirs)))
        ]
        return cls(name, offer, plan, tuple(lines))

    def departed(self, error: Exception | None) -> None:
        """Tell whoever waits for its removal, or why it couldn't be removed."""
        for future in self.departures:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    @property
    def running(self) -> int:
        return sum(line.running for line in self.lines)

    @property
    def up(self) -> list[Line]:
        """At least one, for as long as the peer isn't lost."""
        return [line for line in self.lines if not line.down]

    def refusal(self) -> LaneRefused | None:
        """Where RDMA is required: what is said to a peer that a line reads from over anything else."""
        lanes = [line.lane for line in self.lines if line.lane != UNKNOWN_LANE] or [UNKNOWN_LANE]
        lane = next((lane for lane in lanes if not lane.rdma), None)
        if lane is None:
            return None
        words = f"RDMA is required, but reads from {self.name} go over {lane.name}"
        return LaneRefused(words, peer=self.name, lane=lane.name, detail=lane.detail)

    @property
    def lane(self) -> Lane:
        """Of the first line that is up and has carried a read."""
        return next((line.lane for line in self.up if line.lane != UNKNOWN_LANE), UNKNOWN_LANE)
