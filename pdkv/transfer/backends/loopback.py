"""Reads inside one process by memory copy, with scripted faults: what the engine does can be tested without a network.

Guarantees: agents see only those of their own `LoopbackNet`; a read copies its bytes at the moment it ends DONE, so a
read that hangs or comes late really writes late; a fault is used up by one posted read of the agent it is scripted for;
what was posted from an agent that is cut off is written when it is joined again, unless its reader is gone by then.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import UInt64Array
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, End, EndState, Lane, Memory, Prepared, Side


class FaultKind(StrEnum):
    FAIL = "fail"
    """Ends FAILED; nothing is written."""
    LOSE = "lose"
    """Ends LOST, as a disconnect on one of several lanes."""
    HANG = "hang"
    """Runs until `LoopbackNet.settle`, then ends DONE."""
    LATE = "late"
    """Ends DONE after `polls` polls."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    polls: int = 0


class LoopbackNet:
    """The agents that can reach each other, and the faults scripted for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: set[str] = set()
        self._scripts: dict[str, deque[Fault]] = defaultdict(deque)
        self._settled: dict[str, int] = defaultdict(int)
        self._cut: dict[str, list[_Read]] = {}
        """By agent that is cut off: what waits for it."""

    def backend(self, name: AgentName) -> LoopbackBackend:
        """A `BackendFactory`. Raises `ProtocolError` if the name is taken."""
        with self._lock:
            if name in self._agents:
                raise ProtocolError(f"an agent named {name} is there already")
            self._agents.add(name)
        return LoopbackBackend(self, name)

    def script(self, target: object, *faults: Fault) -> None:
        """The next reads *from* the agent `target`, in the order in which they are posted, end like this."""
        with self._lock:
            self._scripts[str(target)].extend(faults)

    def settle(self, target: object) -> None:
        """Every read from `target` that hangs now ends DONE at its next poll."""
        with self._lock:
            self._settled[str(target)] += 1

    def cut(self, target: object) -> None:
        """Nothing is read from the agent, and no read from it ends, until it is joined again."""
        with self._lock:
            self._cut.setdefault(str(target), [])

    def join(self, target: object) -> None:
        """As a NIC does it: what is still wanted lands now, whether or not anybody looks."""
        with self._lock:
            waiting = self._cut.pop(str(target), [])
        for read in waiting:
            if self.alive(read.reader):
                read.copy()

    def is_cut(self, read: _Read) -> bool:
        """And will be copied when it is not."""
        with self._lock:
            waiting = self._cut.get(read.source)
            if waiting is None:
                return False
            if read not in waiting:
                waiting.append(read)
            return True

    def kill(self, agent: object) -> None:
        """The agent is gone, as by SIGKILL: reads from it end FAILED, disconnected."""
        with self._lock:
            self._agents.discard(str(agent))

    def alive(self, agent: str) -> bool:
        with self._lock:
            return agent in self._agents

    def next_fault(self, target: str) -> Fault | None:
        with self._lock:
            script = self._scripts[target]
            return script.popleft() if script else None

    def settlements(self, target: str) -> int:
        with self._lock:
            return self._settled[target]


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A prepared strided table, opened: one entry a descriptor."""

    owner: str
    addresses: UInt64Array
    lengths: UInt64Array


@dataclass(slots=True, eq=False)
class _Read:
    reader: str
    source: str
    local: UInt64Array
    remote: UInt64Array
    lengths: UInt64Array
    fault: Fault | None
    settlements: int
    polls: int = 0

    def copy(self) -> None:
        for target, source, length in zip(
            self.local.tolist(), self.remote.tolist(), self.lengths.tolist(), strict=True
        ):
            ctypes.memmove(target, source, length)


class LoopbackBackend:
    """`Backend` over memory copies."""

    def __init__(self, net: LoopbackNet, name: AgentName) -> None:
        self._net = net
        self._agent = name
        self._regions: list[tuple[int, int]] = []
        self._peers: dict[str, list[tuple[int, int]]] = {}

    @property
    def name(self) -> str:
        return "loopback"

    def register(self, address: int, length: int, memory: Memory, device: int) -> None:
        if memory != "DRAM":
            raise BoundsError("loopback memory", memory, "DRAM")
        self._regions.append((address, length))

    def metadata(self) -> bytes:
        return json.dumps({"agent": self._agent, "regions": self._regions}).encode()

    def add_peer(self, peer: AgentName, metadata: bytes) -> None:
        try:
            content = json.loads(metadata)
            agent, regions = content["agent"], [(int(a), int(n)) for a, n in content["regions"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"metadata of {peer} can't be read: {error}") from error
        if agent != peer:
            raise ProtocolError(f"metadata of {agent} came for {peer}", have=agent, expected=peer)
        self._peers[peer] = regions

    def remove_peer(self, peer: AgentName) -> None:
        self._peers.pop(peer, None)

    def prepare(self, peer: AgentName | None, table: UInt64Array, memory: Memory) -> Prepared:
        regions = self._regions if peer is None else self._peers[peer]
        columns = [_open(row, regions) for row in table]
        addresses, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
        return _List(peer or self._agent, addresses, lengths)

    def release(self, prepared: Prepared) -> None:
        return None

    def post(self, local: Side, remote: Side) -> _Read:
        mine, theirs = local.prepared, remote.prepared
        assert isinstance(mine, _List)
        assert isinstance(theirs, _List)
        return _Read(
            reader=self._agent,
            source=theirs.owner,
            local=mine.addresses[local.indices],
            remote=theirs.addresses[remote.indices],
            lengths=theirs.lengths[remote.indices],
            fault=self._net.next_fault(theirs.owner),
            settlements=self._net.settlements(theirs.owner),
        )

    def poll(self, read: object) -> End | None:
        assert isinstance(read, _Read)
        if not self._net.alive(read.source):
            return End(EndState.FAILED, f"{read.source} is gone", disconnected=True)
        match read.fault:
            case Fault(FaultKind.FAIL):
                return End(EndState.FAILED, "scripted failure")
            case Fault(FaultKind.LOSE):
                return End(EndState.LOST, "scripted loss", disconnected=True)
            case Fault(FaultKind.HANG) if self._net.settlements(read.source) == read.settlements:
                return None
            case Fault(FaultKind.LATE, polls) if read.polls < polls:
                read.polls += 1
                return None
        if self._net.is_cut(read):
            return None
        read.copy()
        return End(EndState.DONE, bytes=int(read.lengths.sum()), descriptors=_runs(read))

    def progress(self) -> None:
        return None

    def lane(self, peer: AgentName) -> Lane:
        return Lane("loopback", "memory copy", ends_clean=True) if peer in self._peers else UNKNOWN_LANE

    def close(self) -> None:
        self._net.kill(self._agent)


def _open(row: UInt64Array, regions: Sequence[tuple[int, int]]) -> tuple[UInt64Array, UInt64Array]:
    address, length, _, stride, count = (int(x) for x in row)
    end = address + (count - 1) * stride + length
    if not any(start <= address and end <= start + size for start, size in regions):
        raise BoundsError("descriptors", f"[{address:#x}, {end:#x})", "registered memory")
    addresses = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
    return addresses, np.full(count, length, np.uint64)


def _runs(read: _Read) -> int:
    """Descriptors after merging of those that follow one another on both sides."""
    ends = read.lengths[:-1]
    together = (read.local[1:] == read.local[:-1] + ends) & (read.remote[1:] == read.remote[:-1] + ends)
    return int(read.lengths.size - np.count_nonzero(together))
