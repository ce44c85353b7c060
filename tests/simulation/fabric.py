"""Reads between processes as a NIC does them: in pieces over time, from whatever stands in the memory by then.

Guarantees: a read's pieces are copied one by one, in a drawn order, so that a source page may change amid a read; what
was promised of a destination is checked when it is written: it still belongs to the read or is held back, and no other
read writes there. A read whose end nobody saw goes on writing until its agent is closed.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import UInt64Array
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, End, EndState, Lane, Memory, Prepared, Side
from tests.simulation.world import Process, World

STALL_S = 0.1
"""Until a read that doesn't move is looked at again."""
HITS, STAYS = 0.3, 0.9
"""Where reads are copied, what corrupts one hits so many of the next, and goes on after a hit so often."""
UNDER_WAY = 0.2
"""Of reads whose bytes are copied by who posts them, those that have not ended yet when they are polled first."""
CORRUPTS = ("corrupt-main", "corrupt-index")
ANYBODY = -1
"""Who may write to the sink page."""


@dataclass(frozen=True, slots=True)
class ReadFault:
    """What becomes of the next data read of an agent."""

    kind: str
    """fail, lose, late, hang, corrupt-main or corrupt-index."""
    seconds: float = 0.0
    """How long it takes, if not as long as others."""
    of_rows: bool = False
    """Of the next read of page-table rows, not of data."""


@dataclass(slots=True, eq=False)
class _List:
    owner: str
    base: list[int]
    lengths: list[int]


@dataclass(slots=True, eq=False)
class Read:
    """A posted read: `left` of its pieces are still to be copied."""

    source: str
    local: list[int]
    remote: list[int]
    lengths: list[int]
    fault: ReadFault | None
    left: list[int]
    claims: list[int] = field(default_factory=list)
    """Who had the destination pages when it was posted; empty for other memory."""
    end: End | None = None
    corrupts: bool = False
    """A wrong bit is still to come."""
    survives: bool = False
    """Its source's process died unnoticed: it goes on from the memory of the next one at that place."""


class Watch:
    """What a node tells the fabric about its memory, for the laws; without one nothing is checked."""

    def claims(self, address: int) -> int | None:
        """Who may have a page's bytes at this address; None for memory that isn't the pool's."""
        return None

    def corrupted(self, address: int) -> None:
        """A fault has put a wrong bit there."""


class Fabric:
    """Agents by name, and the reads that run between them."""

    def __init__(self, world: World, *, one_sided: bool, copied: bool = False) -> None:
        """`one_sided`: a source needn't run for its memory to be read, as with RDMA; over TCP it must. `copied`: who
        posts a read copies its bytes, as over CMA, unless something is in the way."""
        self.world = world
        self.one_sided = one_sided
        self.copied = copied
        self.agents: dict[str, SimulatedBackend] = {}
        self.of: dict[Process, list[SimulatedBackend]] = {}
        self.scripts: dict[str, list[ReadFault]] = {}
        """By node: what becomes of its next data reads."""
        self.slow_until: dict[str, float] = {}
        """By node: its reads take long."""
        self.amid: dict[str, Callable[[], None]] = {}
        """By node: what is to happen amid its next data read."""
        self._cut_until: dict[frozenset[str], float] = {}
        self._down_until: dict[tuple[str, int], float] = {}
        """By node and rail."""
        self._graves: dict[str, SimulatedBackend] = {}
        """Agents whose process died."""
        self._heirs: dict[str, str] = {}
        """By the agent that died: that of the node's next life."""

    def script(self, node: str, fault: ReadFault) -> None:
        self.scripts.setdefault(node, []).append(fault)

    def landing(self, process: Process) -> list[Read]:
        """Reads of the process that still write."""
        return [read for agent in self.of.get(process, ()) for read in agent.running if read.left]

    def lost(self, process: Process) -> None:
        """What it reads goes nowhere, and reads from it end one way or another."""
        unnoticed = self.world.chance(0.3)
        for gone in tuple(self.of.get(process, ())):
            gone.close()
            self._graves[gone.agent] = gone
            for reader in self.agents.values():
                for read in reader.running:
                    if read.source == gone.agent and read.end is None:
                        read.survives = unnoticed
                        if not unnoticed:
                            self.world.after(self.world.between(0.0005, 0.02), reader.source_lost, read)

    def inherit(self, agent: str, heir: str) -> None:
        """The next life of the node has its memory where the one before had it."""
        self._heirs[agent] = heir

    def cut(self, a: str, b: str, seconds: float) -> None:
        """Nothing moves between two nodes for a while."""
        until = self.world.now + seconds
        self._cut_until[frozenset((a, b))] = max(until, self._cut_until.get(frozenset((a, b)), 0.0))

    def cut_rail(self, node: str, rail: int, seconds: float) -> None:
        """Nothing moves over one rail of a node for a while."""
        until = self.world.now + seconds
        self._down_until[node, rail] = max(until, self._down_until.get((node, rail), 0.0))

    def mend(self) -> None:
        """Everything moves, and nothing is planned any more."""
        for plans in (self.scripts, self.slow_until, self.amid, self._cut_until, self._down_until):
            plans.clear()

    def stalls(self, reader: SimulatedBackend, read: Read) -> bool:
        """The link or a rail is cut, or the source stands still and has to do something for its bytes to move."""
        source = self.agents.get(read.source)
        if source is None:
            return False
        now = self.world.now
        ends = (reader, source) if self._down_until else ()
        if any(now < self._down_until.get((end.process.name, end.rail), 0.0) for end in ends):
            return True
        if self._cut_until and now < self._cut_until.get(frozenset((reader.process.name, source.process.name)), 0.0):
            return True
        return not self.one_sided and source.process.stopped_until > now

    def address(self, read: Read, piece: int) -> int | None:
        """Where a piece is read from; None while nothing is there."""
        remote = read.remote[piece]
        if read.source in self.agents:
            return remote
        heir, grave = self.agents.get(self._heirs.get(read.source, "")), self._graves.get(read.source)
        if heir is None or grave is None:
            return None
        for (old, length), (new, _) in zip(grave.regions, heir.regions, strict=True):
            if old <= remote < old + length:
                return new + remote - old
        return None


@lru_cache(64)
def _read(metadata: bytes) -> tuple[str, list[tuple[int, int]]]:
    content = json.loads(metadata)
    return content["agent"], [(int(a), int(n)) for a, n in content["regions"]]


class SimulatedBackend:
    """`transfer.backends.base.Backend` in a world."""

    def __init__(self, fabric: Fabric, process: Process, name: str, rail: int = 0) -> None:
        if name in fabric.agents:
            raise ProtocolError(f"an agent named {name} is there already")
        self.fabric = fabric
        self.world = fabric.world
        self.process = process
        self.rail = rail
        self.agent = name
        self.regions: list[tuple[int, int]] = []
        self.running: list[Read] = []
        self.watch = Watch()
        self.moved: Callable[[], None] = lambda: None
        """Called when a read has ended."""
        self.closed = False
        self._peers: dict[str, list[tuple[int, int]]] = {}
        fabric.agents[name] = self
        fabric.of.setdefault(process, []).append(self)

    # --- the port -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return "simulated"

    def register(self, address: int, length: int, memory: Memory, device: int) -> None:
        self.regions.append((address, length))

    def metadata(self) -> bytes:
        return json.dumps({"agent": self.agent, "regions": self.regions}).encode()

    def add_peer(self, peer: AgentName, metadata: bytes) -> None:
        try:
            agent, regions = _read(metadata)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"metadata of {peer} can't be read: {error}") from error
        if agent != peer:
            raise ProtocolError(f"metadata of {agent} came for {peer}", have=agent, expected=peer)
        self._peers[peer] = regions

    def remove_peer(self, peer: AgentName) -> None:
        under = [r for r in self.running if r.source == peer and r.end is None]
        self.world.require(not under, f"{self.agent}: {peer} was removed under a read")
        self._peers.pop(peer, None)

    def prepare(self, peer: AgentName | None, table: UInt64Array, memory: Memory) -> Prepared:
        regions = self.regions if peer is None else self._peers[peer]
        bases: list[int] = []
        lengths: list[int] = []
        for address, length, _, stride, count in table.tolist():
            end = address + (count - 1) * stride + length
            if not any(start <= address and end <= start + size for start, size in regions):
                raise BoundsError("descriptors", f"[{address}, {end})", "registered memory")
            bases += range(address, address + count * stride, stride)
            lengths += [length] * count
        return _List(peer or self.agent, bases, lengths)

    def release(self, prepared: Prepared) -> None:
        return None

    def post(self, local: Side, remote: Side) -> Read:
        mine: Any = local.prepared
        theirs: Any = remote.prepared
        to, at = [mine.base[i] for i in local.indices.tolist()], remote.indices.tolist()
        claims = [self.watch.claims(address) for address in to]
        fault = None if claims[0] == ANYBODY else self._fault(of_rows=claims[0] is None)
        read = Read(
            source=theirs.owner,
            local=to,
            remote=[theirs.base[i] for i in at],
            lengths=[theirs.lengths[i] for i in at],
            fault=fault,
            left=list(range(len(to))),
            claims=[c for c in claims if c is not None],
            corrupts=fault is not None and fault.kind in CORRUPTS,
        )
        self._require_sole_writer(read)
        self.running.append(read)
        if read.source in self.fabric.agents:
            if not (self.fabric.copied and self._copied_at_once(read)):
                self._schedule(read)
        else:
            self.world.after(self.world.between(0.0001, 0.02), self.source_lost, read)
        return read

    def poll(self, read: Any) -> End | None:
        return read.end  # type: ignore[no-any-return]

    def progress(self) -> None:
        return None

    def lane(self, peer: AgentName) -> Lane:
        return Lane("simulated", "virtual time", copied=self.fabric.copied) if peer in self._peers else UNKNOWN_LANE

    def close(self) -> None:
        self.closed = True
        if self.fabric.agents.pop(self.agent, None) is not None:
            self.fabric.of[self.process].remove(self)
        self.running.clear()

    # --- how a read goes ------------------------------------------------------------------------------------------

    def _require_sole_writer(self, read: Read) -> None:
        if read.claims and read.claims[0] == ANYBODY:
            return
        for other in self.fabric.landing(self.process):
            if not set(read.local).isdisjoint([other.local[i] for i in other.left]):
                self.world.fail(f"{self.agent}: two reads write to the same bytes")

    def _fault(self, *, of_rows: bool) -> ReadFault | None:
        script = self.fabric.scripts.get(self.process.name, [])
        due = (fault for fault in script if fault.of_rows is of_rows)
        if self.fabric.copied:
            due = (fault for fault in due if fault.kind not in CORRUPTS or self.world.chance(HITS))
        fault = next(due, None)
        if fault is not None and not (self.fabric.copied and fault.kind in CORRUPTS and self.world.chance(STAYS)):
            script.remove(fault)
        return fault

    def _copied_at_once(self, read: Read) -> bool:
        """Unless it is told to take longer, or something happens amid it."""
        told = read.fault is not None and (read.fault.seconds or not read.corrupts)
        if told or self.process.name in self.fabric.amid or self.fabric.stalls(self, read):
            return False
        slow = self.fabric.slow_until.get(self.process.name, 0.0) > self.world.now
        if slow or self.world.chance(0.5 if read.corrupts else UNDER_WAY):
            return False
        self._land(read, read.left.copy())
        self._end(read)
        return True

    def _schedule(self, read: Read) -> None:
        """Its pieces in a drawn order, in up to three bursts; then its end."""
        world, kind = self.world, read.fault.kind if read.fault else ""
        slow = self.fabric.slow_until.get(self.process.name, 0.0) > world.now
        took = world.between(0.05, 0.6) if slow else world.between(0.0002, 0.004)
        if read.fault is not None and read.fault.seconds:
            took = read.fault.seconds
        if read.claims and read.claims[0] != ANYBODY and (deed := self.fabric.amid.pop(self.process.name, None)):
            world.after(world.between(0.0, took), deed)
        order = read.left.copy()
        bursts = min(len(order), 1 + int(world.random.random() * 3))
        if bursts > 1 or read.fault is not None:
            world.random.shuffle(order)
        at = sorted(world.random.random() * took for _ in range(bursts))
        edges = [len(order) * i // bursts for i in range(bursts + 1)]
        known = int(world.random.random() * bursts) if kind in ("fail", "lose", "hang") else bursts
        for number, when in enumerate(at):
            part = order[edges[number] : edges[number + 1]]
            if number < known:
                world.after(when, self._land, read, part)
            elif kind == "lose" or (kind == "hang" and world.chance(0.5)):
                # nobody knows of them any more, but they are still on their way; the others may come at any time
                world.after(took + world.between(0.0, 8.0), self._land, read, part)
        if kind != "hang":
            world.after(took, self._end, read)

    def _land(self, read: Read, part: list[int]) -> None:
        if self.closed or not read.left:
            return
        if self.fabric.stalls(self, read):
            self.world.after(STALL_S, self._land, read, part)
            return
        places = [self.fabric.address(read, piece) for piece in part]
        if None in places:
            if read.survives:
                self.world.after(STALL_S, self._land, read, part)
            return
        for piece, place in zip(part, places, strict=True):
            self._require_claim(read, piece)
            ctypes.memmove(read.local[piece], place, read.lengths[piece])
            read.left.remove(piece)
        if read.corrupts and not self.fabric.copied:
            self._corrupt(read, part[0])
        if read.end is not None and not read.left:
            self.running.remove(read)

    def _require_claim(self, read: Read, piece: int) -> None:
        if read.claims and self.watch.claims(read.local[piece]) != read.claims[piece]:
            self.world.fail(f"{self.agent}: a read of {read.source} writes to a page it lost")

    def _corrupt(self, read: Read, piece: int) -> None:
        """One bit: of main KV, which is the first two thirds of a page, or of index-K."""
        self._require_claim(read, piece)
        length, main = read.lengths[piece], read.fault is not None and read.fault.kind == "corrupt-main"
        at = int(self.world.random.random() * length / 3)
        ctypes.c_uint8.from_address(read.local[piece] + (at if main else length - 1 - at)).value ^= 64
        read.corrupts = False
        self.watch.corrupted(read.local[piece])

    def _end(self, read: Read) -> None:
        if self.closed or read.end is not None:
            return
        kind = read.fault.kind if read.fault else ""
        if kind == "fail":
            self._over(read, End(EndState.FAILED, "simulated failure"), landing=False)
        elif kind == "lose":
            self._over(read, End(EndState.LOST, "simulated loss"), landing=True)
        elif read.left or self.fabric.stalls(self, read):
            self.world.after(STALL_S, self._end, read)
        else:
            if read.corrupts:  # where it is copied: right at first, and written once more before its end
                self._corrupt(read, self.world.random.randrange(len(read.local)))
            self._over(read, End(EndState.DONE, bytes=sum(read.lengths), descriptors=len(read.lengths)), landing=False)

    def source_lost(self, read: Read) -> None:
        """The process at the other end has died: the read fails, or ends without anybody knowing what still lands."""
        if self.closed or read.end is not None:
            return
        lost = self.world.chance(0.5)
        state = EndState.LOST if lost else EndState.FAILED
        self._over(read, End(state, f"{read.source} is gone", disconnected=True), landing=lost)

    def _over(self, read: Read, end: End, *, landing: bool) -> None:
        read.end = end
        if not landing:
            read.left = []
        if not read.left:
            self.running.remove(read)
        self.moved()
