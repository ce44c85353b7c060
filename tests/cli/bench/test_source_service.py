"""A source and its sink, each started by hand, as on two hosts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest

from pdkv.cli.bench.source_service import raw_sources
from pdkv.errors import PeerLost

PDKV = (sys.executable, "-m", "pdkv.cli", "bench", "transfer", "--insecure", "--json")
LIMIT_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_sink_pulls_from_a_source_that_was_started_by_hand() -> None:
    raw = f"127.0.0.1:{free_port()}"
    line = [*PDKV, "--role", "source", "--raw-bind", raw]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            said = json.loads(source.stdout.readline())
            assert said["role"] == "source"
            line = [*PDKV, "--role", "sink", "--connect", said["address"], "--raw-source", raw]
            line += ["--model", "tiny", "--pages", "4", "--repetitions", "1", "--digests", "on", "--hit", "0"]
            line += ["--mode", "warm", "--order", "scattered", "--placement", "page_major,layer_major"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stderr
            rows = json.loads(done.stdout)["rows"]
            assert [(row["sink"], row["wrong"]) for row in rows] == [("page_major", 0), ("layer_major", 0)]
            assert all(row["of_ceiling"] > 0 for row in rows)
            source.send_signal(signal.SIGTERM)
            assert source.wait(LIMIT_S) == 0, source.communicate()[1]
        finally:
            source.kill()


def test_a_raw_source_that_can_not_listen_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PeerLost, match="raw source"):
        asyncio.run(asyncio.wait_for(raw_sources(f"127.0.0.1:{taken.getsockname()[1]}"), LIMIT_S))
