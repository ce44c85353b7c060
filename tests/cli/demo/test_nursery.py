"""Processes that are forked serve, log and die as those that were started."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from pdkv.cli.demo.fleet import START_DEADLINE_S
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.soak.keeper import free_address
from pdkv.errors import PeerLost

ROUTER: dict[str, str | int | bool] = {
    "insecure": True,
    "prefill_addresses": "127.0.0.1:1",
    "decode_addresses": "127.0.0.1:2",
}


def test_a_router_lives_and_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        address, lines = free_address(), list[str]()
        async with Nursery() as nursery:
            process = await nursery.start("router", "r0", {**ROUTER, "bind": address}, lines.append)
            assert process.address == address
            assert process.running
            process.signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            again = await nursery.start("router", "r0", {**ROUTER, "bind": address}, lines.append)
            await again.stop()
            assert await again.wait() == 0
            left = await nursery.start("router", "r1", ROUTER, lines.append)
            # what was set after the nursery had begun is there; without somebody who hears, the log goes to its file
            monkeypatch.setenv("PDKV_LOG_FORMAT", "json")
            alone = await nursery.start("router", "r3", ROUTER)
            assert all(json.loads(line)["node"] == "r3" for line in alone.log.read_text().splitlines())
            with pytest.raises(PeerLost, match="bind"):
                await nursery.start("router", "r2", {**ROUTER, "bind": left.address}, lines.append)
        assert any("serving role=router" in line for line in lines)
        with pytest.raises(ProcessLookupError):
            os.kill(left.pid, 0)

    asyncio.run(asyncio.wait_for(body(), START_DEADLINE_S))
