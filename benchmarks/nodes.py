"""Nodes and requests of a benchmark: real processes with an engine that computes nothing, asked over gRPC.

Guarantees: every process has ended when its context is left; an account that is not that of the whole prompt ends the
benchmark; no two prompts of one asker share a page.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdkv.cli.demo.asks import text_tokens
from pdkv.cli.demo.fleet import command
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateDone, GenerateRequest, NodeStatus, Sampling, Shipment
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText

LIMIT_S = 120.0
Flags = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Node:
    address: str
    pid: int

    def cpu_s(self) -> float:
        """Of the whole process, since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def node(prefix: Sequence[str], role: str, name: str, **flags: str | int | float | bool) -> AsyncIterator[Node]:
    """A serving process, as long as the body runs; `prefix` stands before its command, such as a namespace's."""
    common: Flags = {"engine": "synthetic", "threads": 1, "insecure": True, "log_level": "error", "ucx_tls": "tcp"}
    line = [*prefix, *command(role, name, {**common, **flags})]  # type: ignore[dict-item]
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        if not said:
            raise SystemExit(f"{name} ended before it served")
        yield Node(str(json.loads(said)["address"]), process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Asker:
    """A client of decode nodes."""

    def __init__(self, page_tokens: int) -> None:
        self._nodes = GrpcDirectory(PlainText())
        self._page_tokens = page_tokens
        self._asked = 0

    def prompt(self, pages: int) -> UInt32Array:
        """Tokens that no prompt before has."""
        self._asked += 1
        tokens = text_tokens(4_000 + self._asked, min(pages, 64) * self._page_tokens)
        # the beginning makes it another prompt; a long one repeats itself
        return np.resize(tokens, pages * self._page_tokens)

    async def ask(self, decode: Node, prefill: Node, tokens: UInt32Array) -> Shipment:
        """The account of a request that decode had no page of. Raises `SystemExit` if it isn't that of all of them."""
        self._asked += 1
        request = GenerateRequest(
            RequestId(f"bench-{self._asked}"), tokens, Sampling(max_tokens=1), prefill_address=prefill.address
        )
        async with aclosing(self._nodes.decode(decode.address).generate(request)) as events:
            done = [event async for event in events if isinstance(event, GenerateDone)]
        shipment, pages = done[0].shipment, len(tokens) // self._page_tokens
        if (shipment.pages_shipped, shipment.digests_verified) != (pages, pages):
            raise SystemExit(f"{shipment.pages_shipped} pages shipped, {shipment.digests_verified} verified of {pages}")
        return shipment

    async def prefill_status(self, prefill: Node) -> NodeStatus:
        return await self._nodes.peer(prefill.address).status()

    async def close(self) -> None:
        await self._nodes.close()
