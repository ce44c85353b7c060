"""What signals do: where nobody handles them, where a command cleans up, and to children that shouldn't hear them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pdkv.cli.signals import INTERRUPTED, ending

PROCESS = """
import os, signal, sys
from pdkv.cli import signals
if sys.argv[1] == "first":
    signals.FIRST_PROCESS = os.getpid()
signals.end_at_once(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


@pytest.mark.parametrize(("which", "status"), [("first", 128 + signal.SIGTERM), ("other", -signal.SIGTERM)])
def test_it_ends(which: str, status: int) -> None:
    assert subprocess.run([sys.executable, "-c", PROCESS, which], timeout=60).returncode == status


WORK = """
import asyncio, os, signal, sys
from pdkv.cli.signals import run
async def work():
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)
        if sys.argv[2] == "stuck":
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
            await asyncio.Event().wait()
if sys.argv[2] == "background":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
run(work())
"""


@pytest.mark.parametrize(
    ("name", "how", "code", "said"),
    [
        ("SIGTERM", "", INTERRUPTED, "pdkv: interrupted\n"),
        ("SIGINT", "", INTERRUPTED, "pdkv: interrupted\n"),
        ("SIGTERM", "background", INTERRUPTED, "pdkv: interrupted\n"),
        ("SIGTERM", "stuck", -signal.SIGTERM, ""),
    ],
)
def test_a_long_command_cleans_up_and_says_so_without_a_traceback(name: str, how: str, code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WORK, name, how], timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "cleaned up\n", said)


CHILD = """
import os, signal, subprocess, sys
from contextlib import nullcontext
from pdkv.cli.signals import deaf_children
with deaf_children() if sys.argv[1] == "deaf" else nullcontext():
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); print(1)"])
print(child.wait(60), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_child_is_deaf_to_ctrl_c_and_its_parent_is_not() -> None:
    def ended(how: str) -> str:
        line = [sys.executable, "-c", CHILD, how]
        return subprocess.run(line, timeout=60, capture_output=True, text=True).stdout

    assert ended("deaf") == "1\n0 True\n"
    assert ended("hearing") == f"{-signal.SIGINT} True\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with 3"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-signal.SIGKILL, "was killed by SIGKILL, as the system does that runs out of memory"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert ending(code) == words
