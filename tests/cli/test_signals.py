"""A signal nobody handles ends the process: by the kernel, or by itself where the kernel wouldn't."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
