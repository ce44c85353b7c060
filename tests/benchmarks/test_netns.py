"""Two namespaces and shaped links: there while the `with` lasts, and gone however it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netns
from benchmarks.netns import NotPossible, Space, TwoSpaces, devices, missing_tools, remove_leftovers, spaces
from tests.waiting import DEADLINE_S

SCRIPT = Path(netns.__file__)


@pytest.fixture(scope="module")
def possible() -> bool:
    """Where it isn't, entering has to say why, and each test here has nothing more to say."""
    try:
        with TwoSpaces():
            return True
    except NotPossible as error:
        said = str(error)
    assert said
    return False


def left_of(pid: int) -> list[str]:
    return [name for name in (*spaces(), *devices()) if str(pid) in name]


def until_carrier(space: Space, device: str, *, up: bool) -> None:
    line, until, state = ["ip", "-n", space.name, "-json", "link", "show", device], time.monotonic() + DEADLINE_S, ""
    while not state or (state == "UP") is not up:
        assert time.monotonic() < until, f"{device} is {state}"
        state = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)[0]["operstate"]


def test_missing_tools_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing_tools("iperf3") == ["iperf3 (apt-get install iperf3)"]
    with pytest.raises(NotPossible, match=r"root and ip \(apt-get install iproute2\) and tc"), TwoSpaces():
        pass
    assert netns.main([]) == 2


def test_links_are_there_and_shaped(possible: bool) -> None:
    if not possible:
        return
    with TwoSpaces(links=2, mbit=70) as two:
        assert [link.near_address for link in two.links] == ["10.98.7.1", "10.98.8.1"]
        for space, at in ((two.near, 0), (two.far, 1)):
            line = [*space.prefix, "tc", "-json", "qdisc", "show"]
            found = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)
            shaped = {q["dev"]: q["options"]["rate"] for q in found if q["kind"] == "tbf"}
            # bytes a second
            ends = [(link.near_device, link.far_device)[at] for link in two.links]
            assert shaped == dict.fromkeys(ends, 70_000_000 // 8)
        assert not set(devices()) & {link.near_device for link in two.links}


def test_a_link_goes_down_and_comes_up_without_the_other(possible: bool) -> None:
    if not possible:
        return
    with TwoSpaces(links=2) as two:
        first, second = (link.near_device for link in two.links)
        two.set("down")
        until_carrier(two.near, first, up=False)
        until_carrier(two.near, second, up=True)
        two.set("up")
        until_carrier(two.near, first, up=True)


@pytest.mark.parametrize("near_here", [False, True])
def test_nothing_is_left_after_an_exception(possible: bool, near_here: bool) -> None:
    if not possible:
        return
    held = []

    def leave() -> None:
        with TwoSpaces(near_here=near_here) as two:
            assert len(left_of(os.getpid())) == 2
            line = [*two.far.prefix, sys.executable, "-c", "print('ready', flush=True); input()"]
            held.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert held[0].stdout is not None
            assert held[0].stdout.readline() == b"ready\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert left_of(os.getpid()) == []
    with held[0]:
        assert held[0].wait(DEADLINE_S) == -signal.SIGKILL


def test_nothing_is_left_of_a_start_that_failed(possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not possible:
        return
    monkeypatch.setattr(netns, "MTU", 1)
    with pytest.raises(NotPossible, match="mtu 1"), TwoSpaces(links=2):
        pass
    assert left_of(os.getpid()) == []


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(NotPossible, match="-1 Mbit/s"):
        TwoSpaces(mbit=-1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_killed_run(possible: bool, how: signal.Signals) -> None:
    if not possible:
        return
    inside = [sys.executable, "-c", "print('ready', flush=True); input()"]
    line = [sys.executable, str(SCRIPT), "--", *inside]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        assert len(left_of(run.pid)) == 2
        run.send_signal(how)
        assert run.wait(DEADLINE_S) != 0
    if how is signal.SIGKILL:
        # nobody can tidy up behind it but the next run
        assert sorted(remove_leftovers()) == sorted(f"pdkv-{run.pid}-{side}" for side in ("far", "near"))
    assert left_of(run.pid) == []


def test_a_command_runs_at_the_near_end_when_the_far_one_listens(possible: bool) -> None:
    if not possible:
        return
    far = f"{sys.executable} -c \"import socket; socket.create_server(('10.98.7.2', 9)).accept(); input()\""
    near = "import socket, sys; socket.create_connection(('10.98.7.2', 9), 10); sys.exit(7)"
    assert netns.main(["--far", far, "--", sys.executable, "-c", near]) == 7


def test_a_far_end_that_ends_is_told_of(possible: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if not possible:
        return
    assert netns.main(["--far", "true", "--", "true"]) == 2
    assert "'true']: does not listen" in capsys.readouterr().err


def test_a_link_carries_its_rate(possible: bool) -> None:
    if not possible:
        return
    with TwoSpaces(mbit=100) as two:
        if missing_tools("iperf3"):
            with pytest.raises(NotPossible, match="apt-get install iperf3"):
                two.iperf3()
            return
        assert 0.094 < two.iperf3(seconds=1) < 0.103
        two.set("down")
        with pytest.raises(NotPossible, match="iperf3"):
            two.iperf3(seconds=1)
