"""A plan's text, and that each of its faults happens where it says, is told, and happens nowhere else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from pdkv.errors import ConfigError, DuplicateRequest, InjectedFault, PeerLost, ProtocolError
from pdkv.ids import LeaseId, RequestId
from pdkv.node.fault_plan import AT_STAGES, CALLS, IN_CALLS, Deed, FaultPlan
from pdkv.node.messages import Accepted, PrefillEvent
from pdkv.node.stages import Stage, no_hook
from pdkv.transfer.backends.base import AgentName
from pdkv.transfer.backends.faulty import Trouble
from pdkv.transfer.backends.loopback import LoopbackNet

REQUEST = RequestId("r")


class Peer:
    """A prefill node that counts what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def connect(self, intro: Any) -> Any:
        self.calls.append("connect")
        return intro

    async def renew_lease(self, call: Any) -> float:
        self.calls.append("renew_lease")
        return 30.0

    async def release_lease(self, call: Any) -> None:
        self.calls.append("release_lease")

    async def locate(self, call: Any) -> int:
        self.calls.append("locate")
        return 3

    async def lend(self, call: Any) -> str:
        self.calls.append("lend")
        return "a loan"

    async def prefill(self, request: Any) -> AsyncGenerator[PrefillEvent, None]:
        self.calls.append("prefill")
        for number in range(6):
            yield Accepted(LeaseId(str(number)), 1.0)


class Directory:
    def __init__(self) -> None:
        self.node = Peer()
        self.dropped: list[str] = []

    def peer(self, address: str) -> Peer:
        return self.node

    def drop(self, address: str) -> None:
        self.dropped.append(address)


def faulty_peer(text: str) -> tuple[Any, Peer, list[tuple[str, str, int]]]:
    told: list[tuple[str, str, int]] = []
    directory = Directory()
    peer = FaultPlan.parse(text).directory(directory, lambda *fault: told.append(fault)).peer("p0:1")
    return peer, directory.node, told


def test_a_plan_in_words() -> None:
    plan = FaultPlan.parse("kill@decode.reading:nth=3, delay@prefill.sealed:p=0.1:s=0.2,corrupt:p=0.01;seed=7")
    assert [str(rule) for rule in plan.rules] == [
        "kill@decode.reading:nth=3:s=0.5",
        "delay@prefill.sealed:p=0.1:s=0.2",
    ]
    assert [rule.kind for rule in plan.reads.rules] == [Trouble.CORRUPT]
    assert plan.seed == plan.reads.seed == 7


def test_no_plan_leaves_everything_as_it_is() -> None:
    directory = Directory()
    for text in ("", "corrupt:p=0.5"):
        plan = FaultPlan.parse(text)
        assert plan.hook() is no_hook
        assert plan.directory(directory) is directory


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kill@nowhere:nth=1", "nowhere"),
        ("drop@decode.reading:nth=1", "drop"),
        ("kill@renew_lease:nth=1", "kill"),
        ("explode@decode.reading:nth=1", "explode"),
        ("kill@decode.reading", "p or nth"),
        ("kill@decode.reading:nth=1:p=0.5", "p or nth"),
        ("kill@decode.reading:nth=0", "nth"),
        ("kill@decode.reading:p=1.5", "at most 1"),
        ("kill@decode.reading:p=often", "often"),
        ("delay@decode.reading:nth=1:s=-1", "s in"),
        ("delay@decode.reading:nth=1:for=1", "p or nth, and s"),
        ("kill@decode.reading:nth=1;salt=7", "seed=NUMBER"),
        ("kaputt:p=0.5", "kaputt"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FaultPlan.parse(text)


def test_every_deed_can_be_planned_at_every_place() -> None:
    for deed in AT_STAGES:
        for stage in Stage:
            assert FaultPlan.parse(f"{deed}@{stage.value}:nth=1").rules[0].deed is deed
    for deed in IN_CALLS:
        for call in CALLS:
            assert FaultPlan.parse(f"{deed}@{call}:p=1").rules[0].place == call
    assert set(AT_STAGES) | set(IN_CALLS) == set(Deed)


def test_the_nth_time_fails_and_no_other_and_says_so() -> None:
    told: list[tuple[str, str, int]] = []
    at = FaultPlan.parse("fail@decode.reading:nth=2").hook(lambda *fault: told.append(fault))
    for stage in (Stage.READING, Stage.ARRIVED, Stage.ARRIVED):
        at(stage, REQUEST)
    with pytest.raises(InjectedFault, match=r"decode\.reading"):
        at(Stage.READING, REQUEST)
    at(Stage.READING, REQUEST)
    assert told == [("fail", "decode.reading", 1)]


def test_dice_fall_alike_for_one_seed_and_otherwise_for_another() -> None:
    def thrown(seed: int) -> list[bool]:
        at = FaultPlan.parse(f"fail@decode.decoding:p=0.3;seed={seed}").hook(lambda *fault: None)
        return [_fails(lambda: at(Stage.DECODING, REQUEST)) for _ in range(60)]

    assert thrown(1) == thrown(1) != thrown(2)
    assert 5 < sum(thrown(1)) < 35


def _fails(call: Callable[[], None]) -> bool:
    try:
        call()
    except InjectedFault:
        return True
    return False


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_a_process_kills_or_stops_itself_and_has_said_so_before(deed: str) -> None:
    code = (
        "from pdkv.node.fault_plan import FaultPlan; from pdkv.node.stages import Stage\n"
        f"at = FaultPlan.parse('{deed}@prefill.sealed:nth=2').hook()\n"
        "at(Stage.SEALED, 'r'); print('once', flush=True); at(Stage.SEALED, 'r'); print('twice', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stderr.readline()) == {"fault": deed, "stage": "prefill.sealed", "count": 1}
    assert process.stdout.readline() == "once\n"
    if deed == "stop":
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
    assert process.wait(20) == (0 if deed == "stop" else -signal.SIGKILL)
    assert process.stdout.read() == ("twice\n" if deed == "stop" else "")
    process.stdout.close()
    process.stderr.close()


def test_a_delay_holds_the_process_up() -> None:
    at = FaultPlan.parse("delay@decode.queued:nth=1:s=0.05").hook(lambda *fault: None)
    loop = asyncio.new_event_loop()
    began = loop.time()
    at(Stage.QUEUED, REQUEST)
    assert loop.time() - began >= 0.05
    loop.close()


async def _said(peer: Any, events: list[PrefillEvent] | None = None) -> list[PrefillEvent]:
    """`events` has what came, also when it raises."""
    heard = [] if events is None else events
    async for event in peer.prefill(None):
        heard.append(event)
    return heard


def test_calls_are_lost_doubled_delayed_and_failed_and_the_others_are_not() -> None:
    async def main() -> None:
        peer, node, told = faulty_peer("duplicate@release_lease:nth=1,fail@connect:nth=1,delay@connect:nth=2:s=0.01")
        await peer.release_lease(None)
        assert node.calls == ["release_lease", "release_lease"]
        with pytest.raises(InjectedFault):
            await peer.connect(None)
        assert await peer.connect("me") == "me"
        assert await peer.renew_lease(None) == 30.0
        assert node.calls[2:] == ["connect", "renew_lease"]
        assert told == [("duplicate", "release_lease", 1), ("fail", "connect", 1), ("delay", "connect", 1)]

    asyncio.run(main())


def test_a_lost_call_was_made_or_not_but_never_answered() -> None:
    async def main() -> None:
        made = set()
        for seed in range(12):
            peer, node, _ = faulty_peer(f"drop@renew_lease:nth=1:s=0.001;seed={seed}")
            with pytest.raises(PeerLost, match="on purpose"):
                await peer.renew_lease(None)
            made.add(len(node.calls))
        assert made == {0, 1}

    asyncio.run(main())


def test_a_stream_is_cut_within_or_opened_twice() -> None:
    async def main() -> None:
        heard = set()
        for seed in range(12):
            peer, _, _ = faulty_peer(f"drop@prefill:nth=1;seed={seed}")
            events: list[PrefillEvent] = []
            with pytest.raises(PeerLost, match="cut on purpose"):
                await _said(peer, events)
            heard.add(len(events))
            assert len(await _said(peer)) == 6
        assert heard == {0, 1, 2, 3}
        peer, node, _ = faulty_peer("duplicate@prefill:nth=1,delay@prefill:nth=1:s=0.001,fail@prefill:nth=2")
        assert len(await _said(peer)) == 6
        assert node.calls == ["prefill", "prefill"]
        with pytest.raises(InjectedFault):
            await _said(peer)

    asyncio.run(main())


def test_a_twin_that_is_refused_is_nobodys_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(self: Peer, request: Any) -> AsyncGenerator[PrefillEvent, None]:
        self.calls.append("prefill")
        if len(self.calls) == 1:
            raise DuplicateRequest("it runs already")
        yield Accepted(LeaseId("0"), 1.0)

    async def main() -> None:
        peer, _, _ = faulty_peer("duplicate@prefill:nth=1")
        assert len(await _said(peer)) == 1

    monkeypatch.setattr(Peer, "prefill", refused)
    asyncio.run(main())


@pytest.mark.parametrize("call", ["locate", "lend"])
def test_calls_to_a_source_fail_too(call: str) -> None:
    async def main() -> None:
        directory, told = Directory(), []
        plan = FaultPlan.parse(f"fail@{call}:nth=1,duplicate@{call}:nth=2")
        peer: Any = plan.sources(directory, lambda *fault: told.append(fault)).peer("d0:1")
        with pytest.raises(InjectedFault, match=call):
            await getattr(peer, call)(None)
        assert await getattr(peer, call)(None) in (3, "a loan")
        assert directory.node.calls == [call, call]
        assert told == [("fail", call, 1), ("duplicate", call, 1)]
        assert FaultPlan.parse("").sources(directory) is directory

    asyncio.run(main())


def test_a_connection_is_dropped_through_the_faults() -> None:
    directory = Directory()
    FaultPlan.parse("drop@connect:p=0.5").directory(directory).drop("p0:1")
    assert directory.dropped == ["p0:1"]


def test_faults_of_reads_are_told_alike(capsys: pytest.CaptureFixture[str]) -> None:
    net = LoopbackNet()
    made = {"one": net.backend, "two": net.backend}
    assert FaultPlan.parse("kill@decode.reading:nth=9").backends(made) is made
    rails = FaultPlan.parse("garble:nth=2").backends(made)
    one, backend = rails["one"](AgentName("a")), rails["two"](AgentName("a2"))
    one.add_peer(AgentName("b"), net.backend(AgentName("b")).metadata())
    with pytest.raises(ProtocolError):
        backend.add_peer(AgentName("b"), b"{}")
    assert json.loads(capsys.readouterr().err) == {"fault": "garble", "stage": "read.peers", "count": 1}
