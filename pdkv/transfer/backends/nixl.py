"""Reads over NIXL with its UCX backend. The only file that imports nixl.

Guarantees: no nixl exception leaves this file; what was instantiated is checked, not assumed; a peer's metadata
reaches NIXL only if it carries that peer's name; a handle is released before its peer is removed; `close` has
destroyed the agent when it returns (the only thing after which nothing lands), or raises.

NIXL's progress thread stays off: it burns a core and slows small reads down. So `progress` has to be called every few
milliseconds, also by a node that only serves.

Not in our hands: over TCP, UCX 1.23 can abort the process that *serves* a read when its reader is killed in the middle
of it (measured: docs/decisions/0015; never over CMA). An agent that is destroyed in order does no such harm
(`farewell`).
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from pdkv.errors import (
    BoundsError,
    ContractMismatch,
    Difference,
    MissingDependency,
    PeerLost,
    ProtocolError,
    TransferError,
)
from pdkv.ids import UInt64Array
from pdkv.machine.devices import devices
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, End, EndState, Lane, Memory, Side
from pdkv.transfer.backends.farewell import Connections
from pdkv.transfer.backends.ucx_log import UcxLog
from pdkv.transfer.backends.ucx_settings import missing, shown, tcp_segments, tuning

NIXL_BACKEND = "UCX"
FAREWELL_POLLS = 64
"""Polls before an agent is destroyed: one that still sends to a peer that is gone would abort the process."""
LANE_READ_S = 2.0

logger = logging.getLogger(__name__)
_loading = threading.Lock()
_log: UcxLog | None = None
_devices = cache(devices)


@dataclass(slots=True, eq=False)
class _Prepared:
    handle: Any
    peer: AgentName | None


@dataclass(slots=True, eq=False)
class _Read:
    peer: AgentName
    handle: Any = None
    end: End | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    metadata: bytes
    tables_before: int
    """Read tables that UCX had written for this agent when the peer was added."""
    row: tuple[UInt64Array, Memory] | None = None
    lane: Lane = UNKNOWN_LANE


class NixlBackend:
    """`Backend` over one NIXL agent.

    `device`: the only network device that it uses, as in UCX_NET_DEVICES; where that is set, NIXL takes it instead.

    Raises `TransferError` if NIXL can't make a UCX backend, `MissingDependency` without nixl.
    """

    def __init__(self, name: AgentName, device: str = "") -> None:
        self._api, self._log = _load()
        binding = self._api.nixlBind
        self._errors: tuple[type[BaseException], ...] = tuple(
            v for k, v in vars(binding).items() if k.startswith("nixl") and k.endswith("Error") and isinstance(v, type)
        )
        self._disconnected = binding.nixlRemoteDisconnectError
        self._unreachable = (binding.nixlRemoteDisconnectError, binding.nixlBackendError)
        self._own_name = name
        self._parameters = {"engine_config": f"NET_DEVICES={device}"} if device else {}
        self._segments = tcp_segments().encode()
        self._connections = Connections()
        self._agent = self._new_agent(name, self._connections)
        self._memory: Memory = "DRAM"
        self._local_row: tuple[UInt64Array, Memory] | None = None
        self._peers: dict[AgentName, _Peer] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._reads: dict[int, _Read] = {}
        self._last_complaint = ""

    @property
    def name(self) -> str:
        return f"nixl {'+'.join(self._agent.backends)}"

    def register(self, address: int, length: int, memory: Memory, device: int) -> None:
        if memory == "VRAM":
            self._memory = memory
        try:
            self._agent.register_memory([(address, length, device, "")], memory)
        except self._errors as error:
            raise TransferError(
                f"{length} B of {memory} at {address:#x} can't be registered: {error}", memory=memory, length=length
            ) from error

    def metadata(self) -> bytes:
        """NIXL's metadata behind a line with the settings that both ends must share."""
        return self._segments + b"\n" + bytes(self._agent.get_agent_metadata())

    def add_peer(self, peer: AgentName, metadata: bytes) -> None:
        segments, _, metadata = metadata.partition(b"\n")
        if peer.encode() not in metadata:
            raise ProtocolError(f"agent metadata is not that of {peer}", expected=peer)
        if segments != self._segments:
            mine, theirs = self._segments.decode(), segments.decode(errors="replace")
            raise ContractMismatch([Difference("UCX TCP segments", mine, theirs, "pair")])
        before = len(self._log.tables(self._own_name, self._memory))
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except self._unreachable as error:
            raise PeerLost(f"NIXL can't reach {peer}: {error}", peer=peer) from error
        except self._errors as error:
            raise ProtocolError(f"NIXL refused the metadata of {peer}: {error}", peer=peer) from error
        loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if loaded != peer:
            raise ProtocolError(f"agent metadata of {loaded} came for {peer}", have=loaded, expected=peer)
        self._peers[peer] = _Peer(metadata, before)

    def remove_peer(self, peer: AgentName) -> None:
        if self._peers.pop(peer, None) is None:
            return
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:
            raise TransferError(f"NIXL can't remove {peer}: {error}", peer=peer) from error

    def prepare(self, peer: AgentName | None, table: UInt64Array, memory: Memory) -> _Prepared:
        try:
            handle = self._agent.prep_xfer_dlist(peer or "", table, memory)
        except self._errors as error:
            owner = peer or self._own_name
            raise BoundsError(f"descriptors of {owner}", str(error), "memory that is registered there") from error
        if peer is None:
            self._local_row = (table[:1], memory)
        elif self._peers[peer].row is None:
            self._peers[peer].row = (table[:1], memory)
        prepared = _Prepared(handle, peer)
        self._prepared[id(prepared)] = prepared
        return prepared

    def release(self, prepared: object) -> None:
        known = self._prepared.pop(id(prepared), None)
        if known is not None:
            known.handle.release()
            known.handle = None

    def post(self, local: Side, remote: Side) -> _Read:
        mine, theirs = local.prepared, remote.prepared
        assert isinstance(mine, _Prepared)
        assert isinstance(theirs, _Prepared)
        assert theirs.peer is not None
        read = _Read(theirs.peer)
        self._reads[id(read)] = read
        try:
            read.handle = self._agent.make_prepped_xfer(
                "READ", mine.handle, local.indices, theirs.handle, remote.indices
            )
            self._agent.transfer(read.handle)
        except self._errors as error:
            read.end = self._failed(read, error)
        return read

    def poll(self, read: object) -> End | None:
        assert isinstance(read, _Read)
        end = read.end or self._state(read)
        if end is not None:
            self._reads.pop(id(read), None)
            self._drop(read)
        return end

    def progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            if str(error) != self._last_complaint:
                logger.warning("progress of %s: %s", self._own_name, error)
            self._last_complaint = str(error)

    def lane(self, peer: AgentName) -> Lane:
        known = self._peers.get(peer)
        if known is None:
            return UNKNOWN_LANE
        if known.lane == UNKNOWN_LANE:
            known.lane = self._find_lane(peer, known)
        return known.lane

    def close(self) -> None:
        if self._agent is None:
            return
        for _ in range(FAREWELL_POLLS):
            self.progress()
        for read in self._reads.values():
            self._drop(read)
        for prepared in list(self._prepared.values()):
            self.release(prepared)
        self._reads.clear()
        agent, self._agent = self._agent, None
        with self._connections.parting():
            _destroy(agent)
        self._log.catch_up()

    def _new_agent(self, name: str, connections: Connections) -> Any:
        config = self._api.nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, backends=[])
        with _loading, self._log.listening(missing(tuning(_devices()))), connections.of_agent():
            try:
                agent = self._api.nixl_agent(name, config)
                agent.create_backend(NIXL_BACKEND, self._parameters)
            except self._errors as error:
                raise TransferError(f"NIXL can't make a {NIXL_BACKEND} backend: {error}", agent=name) from error
        if NIXL_BACKEND not in agent.backends:
            raise TransferError(f"NIXL made no {NIXL_BACKEND} backend but {list(agent.backends)}", agent=name)
        return agent

    def _state(self, read: _Read) -> End | None:
        try:
            state = self._agent.check_xfer_state(read.handle)
            if state == "PROC":
                return None
            if state == "DONE":
                count = self._agent.get_xfer_telemetry(read.handle)
                return End(EndState.DONE, bytes=int(count.totalBytes), descriptors=int(count.descCount))
        except self._errors as error:
            return self._failed(read, error)
        return self._failed(read, RuntimeError(state))

    def _failed(self, read: _Read, error: BaseException) -> End:
        """A disconnect ends all requests of its connection; after another error, some of this read's may still run."""
        self._log.catch_up()
        gone = isinstance(error, self._disconnected)
        proven = read.handle is None or (gone and self._peers[read.peer].lane.ends_clean)
        return End(EndState.FAILED if proven else EndState.LOST, f"{type(error).__name__}: {error}", disconnected=gone)

    def _drop(self, read: _Read) -> None:
        """Let a handle go. NIXL may call a running one released: its bytes still land until the agent is destroyed."""
        if read.handle is None:
            return
        try:
            read.handle.release()
        except self._errors:
            # kept from a second try in its finalizer
            read.handle._released = True
        read.handle = None

    def _find_lane(self, peer: AgentName, known: _Peer) -> Lane:
        """UCX writes one table for all peers of one configuration: a new one is this peer's, or else an earlier one."""
        tables = self._log.tables(self._own_name, self._memory)
        lanes = {t.lane() for t in tables[known.tables_before :]} or {t.lane() for t in tables}
        if len(lanes) > 1:
            lanes = self._ask_alone(peer, known)
        return lanes.pop() if len(lanes) == 1 else UNKNOWN_LANE

    def _ask_alone(self, peer: AgentName, known: _Peer) -> set[Lane]:
        """Lanes of an agent made for one read of this one peer, of its first descriptor into our latest."""
        if known.row is None or self._local_row is None:
            return set()
        (mine, memory), (theirs, their_memory) = self._local_row, known.row
        address, device = int(mine[0, 0]), int(mine[0, 2])
        length = min(int(mine[0, 1]), int(theirs[0, 1]))
        name = f"lane-{secrets.token_hex(8)}"
        agent = self._new_agent(name, Connections())
        try:
            agent.register_memory([(address, length, device, "")], memory)
            agent.add_remote_agent(known.metadata)
            local = agent.get_xfer_descs([(address, length, device)], memory)
            remote = agent.get_xfer_descs([(int(theirs[0, 0]), length, int(theirs[0, 2]))], their_memory)
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state, until = agent.transfer(handle), time.monotonic() + LANE_READ_S
            while state == "PROC" and time.monotonic() < until:
                self.progress()
                state = agent.check_xfer_state(handle)
            handle.release()
        except self._errors as error:
            logger.warning("lane of %s can't be asked for: %s", peer, error)
        return {t.lane() for t in self._log.tables(name, self._memory)}


def _load() -> tuple[Any, UcxLog]:
    """NIXL's API and the log of the UCX library it brings, quiet on the process's own output."""
    global _log
    with _loading:
        settings = tuning(_devices())
        if _log is None:
            _log = UcxLog()
            logger.info("UCX is set to %s", shown(settings))
        try:
            with _log.listening(missing(settings)):
                from nixl import _api
        except ImportError as error:
            raise MissingDependency("nixl", "the nixl transfer backend", detail=str(error)) from error
        noise = logging.getLogger("nixl")
        noise.handlers.clear()
        noise.propagate = True
        if "NIXL_LOG_LEVEL" not in os.environ:
            noise.setLevel(logging.WARNING)
        return _api, _log


def _destroy(agent: Any) -> None:
    """Destroy the agent behind NIXL's wrapper. Raises `TransferError` if something still holds it."""
    inner, agent.agent = agent.agent, None
    holders = sys.getrefcount(inner) - 2
    if holders:
        raise TransferError("an agent can't be destroyed: bytes may still land", holders=holders)
