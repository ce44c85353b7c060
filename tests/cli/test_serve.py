"""The life of a serving process: what it says, in which order it ends, and that it doesn't outlive its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdkv.cli.options import ServeOptions
from pdkv.cli.serve import Served, run_service, run_until_told
from pdkv.config import RouterConfig
from pdkv.errors import PdkvError
from pdkv.node.readiness import Readiness
from tests.waiting import until_ended

CONFIG = RouterConfig(
    node_id="r0", prefill_addresses=("a:1",), decode_addresses=("b:2",), drain_grace_s=30.0, insecure=True
)
SAID = ServeOptions(json=True, exit_with=None)
SERVES = ("start", "serving False")
CUT = ("Draining: r0 has ended", "stop 1")
ENDS = ("calls ended", *CUT)
UNREADY = "no peer of 2 can be reached"


@dataclass
class Script:
    """A server, and what stands behind it, that note what is done with them in which order."""

    steps: list[str] = field(default_factory=list)
    signal: signal.Signals = signal.SIGTERM
    """Sent as soon as the server listens."""
    drains: bool = True
    readiness: Readiness = field(default_factory=Readiness)
    late: Exception | None = None

    async def start(self) -> str:
        self.steps.append("start")
        os.kill(os.getpid(), self.signal)
        return "127.0.0.1:7000"

    async def set_serving(self, *, serving: bool) -> None:
        self.steps.append(f"serving {serving}")

    async def drain(self) -> None:
        self.steps.append("drain")
        if not self.drains:
            try:
                await asyncio.Event().wait()
            finally:
                self.steps.append("drain cancelled")

    async def calls_ended(self) -> None:
        self.steps.append("calls ended")

    async def end_calls(self, error: PdkvError) -> None:
        self.steps.append(f"{error.kind}: {error}")

    async def stop(self, grace_s: float) -> None:
        self.steps.append(f"stop {grace_s:g}")

    def run(self, options: ServeOptions = SAID, **settings: Any) -> None:
        config = CONFIG.model_copy(update=settings)

        async def serve() -> None:
            served = Served(config, self, "router", "r0", self.drain, self.readiness)  # type: ignore[arg-type]
            await run_until_told(served, options)

        run_service(config, serve, options)


@pytest.fixture(autouse=True)
def signals_as_before() -> Any:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [(number, signal.getsignal(number)) for number, _ in before] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_end_it_in_order(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(signal=number)
    script.run()
    assert script.steps == [*SERVES, "drain", *ENDS]
    assert json.loads(capsys.readouterr().out) == {"role": "router", "name": "r0", "address": "127.0.0.1:7000"}


def test_nothing_is_said_on_stdout_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Script().run(ServeOptions(json=False, exit_with=None))
    assert capsys.readouterr().out == ""


def test_what_does_not_end_within_the_grace_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(drains=False)
    with caplog.at_level("INFO"):
        script.run(drain_grace_s=0.01)
    assert script.steps == [*SERVES, "drain", "drain cancelled", *CUT]
    assert "draining did not end within 0.01 s: what is left is cancelled" in caplog.text


def test_the_health_service_says_what_the_node_says_while_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    class Sick(Script):
        """Unready at first, then once more; told to end when it is ready for the second time."""

        async def start(self) -> str:
            self.steps.append("start")
            self.readiness.say("peers", UNREADY)
            return "127.0.0.1:7000"

        async def set_serving(self, *, serving: bool) -> None:
            await super().set_serving(serving=serving)
            if self.steps.count("serving True") == 2:
                if serving:
                    os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.readiness.say("peers", UNREADY if serving else "")

    sick = Sick()
    with caplog.at_level("INFO"):
        sick.run()
    assert sick.steps == ["start", *["serving False", "serving True"] * 2, "serving False", "drain", *ENDS]
    lines = [record.message for record in caplog.records if "ready" in record.message]
    assert lines == [f"not ready: {UNREADY}", "ready", f"not ready: {UNREADY}", "ready again"]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
sys.stdin.read()
"""
CHILD = "import os\nfrom pdkv.cli.serve import die_with\n{0}print('ready', flush=True)\nimport signal; signal.pause()"


def test_the_kernel_ends_it_with_its_parent() -> None:
    """And not without: the same child that didn't ask for it outlives its parent."""
    pids = []
    for asked in ("die_with(os.getppid())\n", ""):
        command = [sys.executable, "-c", PARENT, CHILD.format(asked)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid, ready = parent.stdout.readline().split()
            assert ready == "ready"
            parent.kill()
        pids.append(int(pid))
    until_ended(pids[:1])
    os.kill(pids[1], signal.SIGKILL)
    until_ended(pids[1:])


def test_a_parent_that_has_ended_already_is_named() -> None:
    code = (
        "import os\n"
        "from pdkv.cli.serve import die_with\n"
        "die_with(os.getpid())\n"  # not the parent: as if that had ended and another one stood in its place
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "PeerLost: the process that started this one has ended" in done.stderr


def test_an_operator_can_end_it_too() -> None:
    script = Script()

    async def serve() -> None:
        told = asyncio.Event()

        async def start() -> str:
            script.steps.append("start")
            told.set()
            return "127.0.0.1:7000"

        script.start = start  # type: ignore[method-assign]
        served = Served(CONFIG, script, "router", "r0", script.drain, script.readiness, told)  # type: ignore[arg-type]
        await run_until_told(served, SAID)

    run_service(CONFIG, serve, SAID)
    assert script.steps == [*SERVES, "drain", *ENDS]


def test_an_http_front_begins_before_it_and_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()

    class Front:
        async def start(self) -> str:
            script.steps.append("http start")
            return "127.0.0.1:8080"

        async def drain(self) -> None:
            script.steps.append("http drain")

        async def ended(self) -> None:
            script.steps.append("http ended")

        async def stop(self, error: PdkvError) -> None:
            script.steps.append(f"http stop, {error}")

    async def serve() -> None:
        served: Any = Served(CONFIG, script, "router", "r0", script.drain, script.readiness, http=Front())  # type: ignore[arg-type]
        await run_until_told(served, SAID)

    run_service(CONFIG, serve, SAID)
    http = [step for step in script.steps if step.startswith("http")]
    assert http == ["http start", "http drain", "http ended", "http stop, r0 has ended"]
    assert script.steps.index("http start") < script.steps.index("start")
    assert script.steps.index("http drain") < script.steps.index("drain") < script.steps.index("http ended")
    assert json.loads(capsys.readouterr().out)["http"] == "127.0.0.1:8080"
