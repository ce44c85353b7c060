"""One trace of a request over four processes, as a collector gets it: the client's, a router's, a decode and a prefill
node's."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.ids import RequestId
from pdkv.node.messages import GenerateRequest, Sampling
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText
from tests.tracing.receiver import Received, Receiver, receiving

SETTINGS = {"model": "tiny", "engine": "synthetic", "insecure": True, "no_touch_pool": True, "threads": 1}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tracing.md"
PROMPT = "Once upon a page, there was a token that nobody had computed. " * 12
STAGES = ["pdkv.queue", "pdkv.prefill", "pdkv.exposed_transfer", "pdkv.verify", "pdkv.first_step"]
INTERNAL, SERVER, CLIENT = 1, 2, 3
ATTEMPT = "pdkv.attempt"
T = TypeVar("T")


class Traced:
    """A fleet whose first prefill node fails the first request that it has taken on."""

    def __init__(self, runner: asyncio.Runner, receiver: Receiver, endpoint: str) -> None:
        self._runner = runner
        self.receiver = receiver
        self.endpoint = endpoint
        self._fleet = Nursery()
        self.prefill: list[NodeProcess] = []

    async def open(self) -> None:
        await self._fleet.__aenter__()
        told = {"trace_endpoint": self.endpoint}
        fault = {"allow_fault_injection": True, "fault_plan": "fail@prefill.done:nth=1"}
        self.prefill = list(
            await asyncio.gather(
                self._fleet.start("prefill", "p0", {**SETTINGS, **told, **fault, "chunk_tokens": 256}),
                self._fleet.start("prefill", "p1", {**SETTINGS, **told, "chunk_tokens": 256}),
            )
        )
        addresses = ",".join(node.address for node in self.prefill)
        of_decode = {"prefill_addresses": addresses, "on_failure": "retry"}
        self.decode = await self._fleet.start("decode", "d0", {**SETTINGS, **told, **of_decode})
        flags = {"prefill_addresses": addresses, "decode_addresses": self.decode.address, "insecure": True, **told}
        self.router = await self._fleet.start("router", "r0", flags)

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(body)

    async def close(self) -> None:
        await self._fleet.__aexit__(None, None, None)

    def generate(self, seed: int, *options: str) -> list[Received]:
        """`pdkv generate`: the spans of its trace, once its leases have ended, which comes last."""
        command = ["-m", "pdkv.cli", "generate", f"{seed}: {PROMPT}", "--insecure", "--trace-endpoint", self.endpoint]

        async def body() -> str:
            pipe = asyncio.subprocess.PIPE
            client = await asyncio.create_subprocess_exec(sys.executable, *command, *options, stdout=pipe, stderr=pipe)
            _, said = await client.communicate()
            assert client.returncode == 0, (said.decode(), [node.log.read_text()[-3000:] for node in self.prefill])
            (line,) = (line for line in said.decode().splitlines() if line.startswith("trace "))
            return line.removeprefix("trace ")

        trace = self._runner.run(body())

        def over(spans: list[Received]) -> bool:
            mine = [span for span in spans if span.trace.hex() == trace]
            ids = {span.id for span in mine}
            names = Counter((span.name, span.kind) for span in mine)
            attempts = names[ATTEMPT, INTERNAL]
            ends = names["pdkv.v1.Prefill/ReleaseLease", CLIENT], names["pdkv.lease", INTERNAL]
            rooted = names["pdkv.generate", INTERNAL] == 1 and all(s.parent in ids for s in mine if s.parent)
            return attempts > 0 and rooted and ends == (attempts, attempts)

        return [span for span in self.receiver.until(over) if span.trace.hex() == trace]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Traced]:
    with asyncio.Runner() as runner, receiving() as (receiver, endpoint):
        made = Traced(runner, receiver, endpoint)
        try:
            runner.run(made.open())
            yield made
        finally:
            runner.run(made.close())


def only(spans: list[Received], name: str, kind: int | None = None) -> Received:
    found = [span for span in spans if span.name == name and kind in (None, span.kind)]
    assert len(found) == 1, (name, [(span.service, span.name) for span in spans])
    return found[0]


def under(spans: list[Received], parent: Received) -> list[Received]:
    return sorted((span for span in spans if span.parent == parent.id), key=lambda span: span.began_ns)


def check(spans: list[Received], attempt: Received) -> str:
    """That all of an attempt is there, each part under its own; returns the prefill node's name."""
    call = only(under(spans, attempt), "pdkv.v1.Prefill/Prefill")
    served = only(under(spans, call), "pdkv.v1.Prefill/Prefill")
    assert (call.kind, served.kind, served.service) == (CLIENT, SERVER, "pdkv-prefill")
    assert call.within(attempt)
    assert served.within(call)
    assert call.failed is served.failed is attempt.failed
    compute = only(under(spans, served), "pdkv.compute")
    assert compute.within(served)
    assert 1 <= compute.attributes["pdkv.chunks"] <= 3, "a retry reads back what the first one brought"
    lease = only(under(spans, served), "pdkv.lease")
    assert lease.began_ns <= compute.began_ns
    transfers = [span for span in under(spans, attempt) if span.name == "pdkv.transfer"]
    assert len(transfers) == 1 or attempt.failed, "one that failed may have read nothing"
    for transfer in transfers:
        assert transfer.within(attempt)
        facts = transfer.attributes
        assert facts["pdkv.transfer.pages"] > 0 or attempt.failed
        assert facts["pdkv.transfer.main_bytes"] >= facts["pdkv.transfer.index_bytes"]
        assert facts["pdkv.transfer.lane"]
        assert facts["pdkv.peer"].startswith(served.instance)
    return served.instance


def test_one_trace_over_four_processes_and_a_retry_shows_both_attempts(fleet: Traced) -> None:
    for seed in range(2):  # its prefill nodes are asked in turn
        spans = fleet.generate(seed, "--decode", fleet.decode.address)
        decode = only(spans, "pdkv.v1.Decode/Generate", SERVER)
        if decode.attributes["pdkv.retries"]:
            break
    first, second = (span for span in under(spans, decode) if span.name == ATTEMPT)
    assert (first.failed, second.failed) == (True, False)
    assert first.attributes["error.type"] == "InjectedFault"
    assert first.attributes["pdkv.accepted"] is True
    addresses = [span.attributes["pdkv.prefill.address"] for span in (first, second)]
    assert addresses == [node.address for node in fleet.prefill]
    assert first.ended_ns <= second.began_ns
    assert [check(spans, attempt) for attempt in (first, second)] == ["p0", "p1"]

    # and over a router: client, router, decode, each the one within the other
    spans = fleet.generate(7, "--router", fleet.router.address)
    chain = [
        only(spans, "pdkv.generate"),
        only(spans, "pdkv.v1.Router/Generate", CLIENT),
        only(spans, "pdkv.v1.Router/Generate", SERVER),
        only(spans, "pdkv.v1.Decode/Generate", CLIENT),
        only(spans, "pdkv.v1.Decode/Generate", SERVER),
    ]
    services = ["pdkv-generate", "pdkv-generate", "pdkv-router", "pdkv-router", "pdkv-decode"]
    assert [span.service for span in chain] == services
    assert chain[0].parent == b""
    for outer, inner in pairwise(chain):
        assert inner.parent == outer.id
        assert inner.within(outer)
    assert only(under(spans, chain[2]), "pdkv.pick").within(chain[2])
    route = only(under(spans, chain[2]), "pdkv.route")
    assert chain[3].within(route)
    assert route.attributes["pdkv.decode.address"] == fleet.decode.address
    decode = chain[-1]
    attempt = only(under(spans, decode), ATTEMPT)
    assert attempt.within(decode)
    assert check(spans, attempt) in ("p0", "p1")
    assert attempt.attributes["pdkv.prefill.address"] == route.attributes["pdkv.prefill.address"]
    stages = [span for span in under(spans, decode) if span.name in STAGES]
    assert sorted(span.name for span in stages) == sorted(STAGES)
    assert all(span.within(decode) for span in stages)
    ids = {span.id for span in spans}
    assert all(span.parent in ids for span in spans if span is not chain[0])
    words = str(fleet.receiver.spans)
    assert "Once" not in words
    assert "nobody" not in words


def undocumented(spans: list[Received], page: str) -> set[str]:
    """Names of spans and attributes that the page doesn't have."""
    written = set(re.findall(r"[a-z][A-Za-z_.0-9/]*[A-Za-z]", page))
    told = {span.name for span in spans} | {name for span in spans for name in span.attributes}
    return {name for name in told if name not in written and not name.startswith("pdkv.error.")}


def test_whatever_is_told_is_in_the_docs(fleet: Traced) -> None:
    fleet.generate(11, "--router", fleet.router.address)
    spans = list(fleet.receiver.spans)
    assert undocumented(spans, PAGE.read_text("utf-8")) == set()
    assert "pdkv.transfer.lane" in undocumented(spans, PAGE.read_text("utf-8").replace("pdkv.transfer.lane", ""))


def test_what_is_left_is_delivered_when_a_process_is_told_to_end(fleet: Traced) -> None:
    async def body() -> int:
        async with Nursery() as own:
            flags = {"prefill_addresses": fleet.prefill[0].address, "decode_addresses": fleet.decode.address}
            router = await own.start("router", "r1", {**flags, "insecure": True, "trace_endpoint": fleet.endpoint})
            nodes = GrpcDirectory(PlainText())
            asked = GenerateRequest(RequestId("last"), np.arange(65, dtype=np.uint32), Sampling(max_tokens=2))
            async with aclosing(nodes.router(router.address).generate(asked)) as events:
                assert [event async for event in events]
            await nodes.close()
            await router.stop()
            return await router.wait()

    assert fleet.run(body()) == 0
    assert "r1" in {span.instance for span in fleet.receiver.spans}
