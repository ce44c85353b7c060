"""Processes of a benchmark: asked, answering, and gone when they should be."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from pdkv.cli.bench.pulls import SinkNode, SourceSettings, Wish
from pdkv.cli.bench.workers import Workers
from pdkv.errors import PeerLost, RemoteError
from pdkv.rpc.bench import GrpcBench, Preparation
from pdkv.rpc.channels import Channels
from pdkv.rpc.client import ClientSettings
from pdkv.rpc.security import MutualTls, PlainText
from tests.cli.bench.stand import LIMIT_S, NODE, PROMPT


def alive(pid: int) -> bool:
    """Also of a child of another process, which is nobody's zombie for long."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int]) -> None:
    until = time.monotonic() + LIMIT_S
    while any(map(alive, pids)):
        assert time.monotonic() < until, "processes are left behind"
        os.sched_yield()


def test_a_pull_from_one_process_to_another_and_what_goes_wrong_is_told() -> None:
    async def main() -> list[int]:
        async with asyncio.timeout(LIMIT_S), Workers() as workers:
            address = await workers.source(SourceSettings("source", 64 << 20), PlainText())
            sink = await workers.sink("sink", PlainText())
            wish = Wish(((address, PROMPT),), scattered=True)
            with pytest.raises(RemoteError, match="sink: IntegrityError: a sink that is not open") as refused:
                await sink.ready(wish)
            assert refused.value.fields["kind"] == "IntegrityError"
            channels = Channels(PlainText())
            bench = GrpcBench(address, channels, ClientSettings())
            await bench.build(NODE)
            await bench.prepare(Preparation(PROMPT, cached=True, scattered=True, digests=True))
            opened = await sink.open(SinkNode("tiny", 10), (address,))
            assert opened.lanes == ("cma",)
            await sink.ready(wish)
            assert (await sink.pull(wish)).pages == PROMPT.pages
            assert (await sink.digests(PROMPT) == await bench.digests(PROMPT)).all()
            assert await sink.cpu_s() > 0
            await channels.close()
            source, sink_pid = workers.pids
            os.kill(sink_pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match="sink was killed by SIGKILL"):
                await sink.cpu_s()
            assert alive(source)
            return workers.pids

    gone(asyncio.run(main()))


def test_a_process_that_can_not_begin_says_why() -> None:
    nowhere = Path("no/such.pem")

    async def main() -> list[int]:
        async with asyncio.timeout(LIMIT_S), Workers() as workers:
            with pytest.raises(RemoteError, match="source: ConfigError: tls_ca"):
                await workers.source(SourceSettings("source"), MutualTls(nowhere, nowhere, nowhere))
            return workers.pids

    gone(asyncio.run(main()))
