"""The loopback's own faults do what their names say."""

import json

import numpy as np
import pytest

from pdkv.errors import BoundsError, ProtocolError
from pdkv.transfer.backends.base import AgentName, End, EndState, Side
from pdkv.transfer.backends.loopback import Fault, FaultKind, LoopbackBackend, LoopbackNet

A, B = AgentName("a"), AgentName("b")


class Rig:
    """Agent a reads 4 blocks of 16 bytes from b."""

    def __init__(self) -> None:
        self.net = LoopbackNet()
        self.mine, self.theirs = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)
        self.a, self.b = self.net.backend(A), self.net.backend(B)
        self.a.register(self.address(self.mine), 64, "DRAM", 0)
        self.b.register(self.address(self.theirs), 64, "DRAM", 0)
        self.a.add_peer(B, self.b.metadata())
        self.local = self.a.prepare(None, self.table(self.mine), "DRAM")
        self.remote = self.a.prepare(B, self.table(self.theirs), "DRAM")

    @staticmethod
    def address(memory: np.ndarray) -> int:
        return int(memory.ctypes.data)

    def table(self, memory: np.ndarray) -> np.ndarray:
        return np.array([(self.address(memory), 16, 0, 16, 4)], np.uint64)

    def post(self, to: list[int], source: list[int]) -> object:
        sides = (Side(self.local, np.array(to, np.int32)), Side(self.remote, np.array(source, np.int32)))
        return self.a.post(*sides)


def polls_to_end(backend: LoopbackBackend, read: object, most: int = 10) -> tuple[int, End | None]:
    for i in range(most):
        end = backend.poll(read)
        if end is not None:
            return i, end
    return most, None


def test_a_read_copies_and_counts_merged_descriptors() -> None:
    rig = Rig()
    _, end = polls_to_end(rig.a, rig.post([0, 1, 3], [2, 3, 0]))
    assert end == End(EndState.DONE, bytes=48, descriptors=2)
    assert rig.mine.tolist() == [*range(32, 64), *[0] * 16, *range(16)]


def test_late_ends_after_so_many_polls_and_writes_then() -> None:
    rig = Rig()
    rig.net.script(B, Fault(FaultKind.LATE, polls=3))
    read = rig.post([0], [1])
    assert [rig.a.poll(read) for _ in range(3)] == [None] * 3
    assert not rig.mine.any()
    assert rig.a.poll(read) is not None
    assert rig.mine.any()


def test_hang_runs_until_settled() -> None:
    rig = Rig()
    rig.net.settle(B)
    rig.net.script(B, Fault(FaultKind.HANG))
    read = rig.post([0], [1])
    assert polls_to_end(rig.a, read) == (10, None)
    rig.net.settle(B)
    assert rig.a.poll(read) == End(EndState.DONE, bytes=16, descriptors=1)


@pytest.mark.parametrize(
    ("kind", "state", "disconnected"),
    [(FaultKind.FAIL, EndState.FAILED, False), (FaultKind.LOSE, EndState.LOST, True)],
)
def test_scripted_ends_are_used_up_by_one_read(kind: FaultKind, state: EndState, *, disconnected: bool) -> None:
    rig = Rig()
    rig.net.script(B, Fault(kind))
    _, end = polls_to_end(rig.a, rig.post([0], [1]))
    assert end is not None
    assert (end.state, end.disconnected) == (state, disconnected)
    assert not rig.mine.any()
    _, end = polls_to_end(rig.a, rig.post([0], [1]))
    assert end is not None
    assert end.state is EndState.DONE


def test_a_closed_agent_is_gone() -> None:
    rig = Rig()
    read = rig.post([0], [1])
    rig.b.close()
    end = rig.a.poll(read)
    assert end is not None
    assert (end.state, end.disconnected) == (EndState.FAILED, True)
    assert not rig.mine.any()


def test_memory_that_is_not_registered_is_refused() -> None:
    rig = Rig()
    outside = np.array([(rig.address(rig.theirs), 16, 0, 16, 5)], np.uint64)
    with pytest.raises(BoundsError, match="registered memory"):
        rig.a.prepare(B, outside, "DRAM")
    with pytest.raises(BoundsError, match="DRAM"):
        rig.a.register(1, 1, "VRAM", 0)


def test_names_are_one_agents() -> None:
    rig = Rig()
    with pytest.raises(ProtocolError, match="there already"):
        rig.net.backend(A)
    with pytest.raises(ProtocolError, match="metadata of b came for c"):
        rig.a.add_peer(AgentName("c"), rig.b.metadata())
    for spoilt in (rig.b.metadata()[:-4], json.dumps({"agent": "b"}).encode(), b"[]"):
        with pytest.raises(ProtocolError, match="can't be read"):
            rig.a.add_peer(B, spoilt)
