"""Runs the demo: a prefill and a decode process, the same requests in one process, and what must not pass.

Guarantees: every row compares what two real processes did with what one did; every check that the report names is
made here or counts as failed; whatever happens, no process is left behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.asks import CHUNK_TOKENS, OUTPUT_TOKENS, Ask, Kind, fault_tokens, make_asks
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.demo.pressure import Pressure, pressure_checks
from pdkv.cli.demo.reference import Reference
from pdkv.cli.demo.report import ControlRow, RefusalRow, Report, RequestRow
from pdkv.cli.demo.speculative import Speculative, checks_of
from pdkv.config import PrefillConfig
from pdkv.errors import ContractMismatch, DigestMismatch, PdkvError, PeerLost
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, page_format
from pdkv.ids import RequestId
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling
from pdkv.rpc.client import GrpcDirectory
from pdkv.rpc.security import PlainText

MODEL = "tiny"
OTHER_LIST = "full,full,shared,shared,shared,full,shared,full"
"""As many full layers as the model has, in the places of another offset: equal counts, unequal lists."""
OTHER_ROLLBACK = 4
UNREAD_INDEX_TOKENS = 2000

# Faults strike each read of a request. The first one ends it, and is the first chunk: CHUNK_TOKENS // 64 = 8 pages.
CONTROLS = {
    "drop-index": dict.fromkeys(range(8), "index"),
    "zero-page": {7: "both"},
    "swap-pages": {0: "both", 7: "both"},
    "flip-bit": {4: "main"},
}
"""Fault to the prompt pages that must be named, they and no others, and the cache of each."""


@dataclass(slots=True)
class Served:
    """What a client got."""

    tokens: list[int]
    logits_digests: list[int]
    done: GenerateDone


class Demo:
    """One run. `say` hears what is being done, `row` each finished request."""

    def __init__(self, requests: int, say: Callable[[str], None], row: Callable[[RequestRow], None]) -> None:
        self._fmt: PageFormat = page_format(model_shape(load_config(MODEL)))
        self._asks = make_asks(requests, self._fmt.page_tokens)
        self._say = say
        self._row = row
        self._threads = max(1, (os.cpu_count() or 2) // 2)
        self.report = Report()
        self._fleet = Nursery()
        self._nodes = GrpcDirectory(PlainText())
        config = PrefillConfig(model=MODEL, chunk_tokens=CHUNK_TOKENS, threads=self._threads)
        self._reference = Reference(config)

    async def run(self) -> Report:
        began = time.monotonic()
        try:
            async with self._fleet:
                await self._run()
        finally:
            await self._nodes.close()
            self._reference.close()
        self.report.elapsed_s = time.monotonic() - began
        return self.report

    async def _run(self) -> None:
        answers = [asyncio.create_task(self._reference.ask(ask.tokens, ask.sampling)) for ask in self._asks]
        try:
            self._say("starting a prefill and a decode process, and the same model in this one")
            prefill, decode = await asyncio.gather(
                # their rates are shown: no page is to be found for the first time by a read
                self._fleet.start("prefill", "prefill-0", self._flags(touch_pool=True, chunk_tokens=CHUNK_TOKENS)),
                self._fleet.start("decode", "decode-0", self._flags(touch_pool=True, allow_fault_injection=True)),
            )
            await self._serve(prefill, decode, answers)
            await self._controls(prefill, decode)
            await self._others(prefill)
            await self._killed(prefill, decode, answers[-1])
            await self._speculative()
            await self._pressed()
        finally:
            for answer in answers:
                answer.cancel()
        self._check_requests()

    def _flags(self, **more: str | int | bool) -> dict[str, str | int | bool]:
        """Memory is committed at the start only where that is asked for: of most pools little is used."""
        touch = more.pop("touch_pool", False)
        return {"model": MODEL, "threads": self._threads, "insecure": True, "no_touch_pool": not touch, **more}

    async def _serve(
        self, prefill: NodeProcess, decode: NodeProcess, answers: list[asyncio.Task[MonolithAnswer]]
    ) -> None:
        """One at a time, then four at a time."""
        pairs = list(zip(self._asks, answers, strict=True))
        for ask, answer in pairs:
            if ask.kind in (Kind.COLD, Kind.SHARED):
                self._say(f"{ask.kind}: {len(ask.tokens):,} tokens")
                self._compare(ask, await self._ask(decode, self._request(ask, prefill)), await answer)
        together = [pair for pair in pairs if pair[0].kind is Kind.TOGETHER]
        for first in range(0, len(together), 4):
            four = together[first : first + 4]
            self._say(f"{len(four)} requests at a time")
            served = await asyncio.gather(*(self._ask(decode, self._request(ask, prefill)) for ask, _ in four))
            for (ask, answer), got in zip(four, served, strict=True):
                self._compare(ask, got, await answer)
        status = await self._nodes.decode(decode.address).status()
        self.report.backend = status.backend
        self.report.lane = ", ".join(sorted({peer.lane for peer in status.peers.values()}))

    async def _killed(self, prefill: NodeProcess, decode: NodeProcess, answer: asyncio.Task[MonolithAnswer]) -> None:
        """The first token proves that PrefillDone came and the request was admitted: from here on decode is alone."""
        ask = self._asks[-1]
        self._say("killing the prefill process after PrefillDone; decode finishes")

        async def kill() -> None:
            prefill.kill()
            await prefill.wait()

        served = await self._ask(decode, self._request(ask, prefill), after_first=kill)
        self._compare(ask, served, await answer)
        whole = len(served.tokens) == ask.sampling.max_tokens
        self.report.checks["killed"] = whole and not prefill.running and self.report.requests[-1].tokens_equal

    async def _speculative(self) -> None:
        """Two pairs more."""
        part = Speculative(self._fleet, self._nodes, self._reference, self._flags(), self._say)
        await part.run()
        self.report.speculative = [row.as_dict() for row in part.rows]
        self.report.controls += part.controls
        self.report.checks |= checks_of(part.rows, part.controls)

    async def _pressed(self) -> None:
        """A prefill node more, and two decode nodes that are too small."""
        part = Pressure(self._fleet, self._nodes, self._reference, self._flags(), self._say)
        await part.run()
        self.report.pressed = [row.as_dict() for row in part.rows]
        self.report.checks |= pressure_checks(part.rows)

    async def _controls(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        """Faults put into the destination's memory after the read: each must end the request before its first token."""
        for number, (fault, expected) in enumerate(CONTROLS.items()):
            self._say(f"injecting {fault} after the read")
            request = GenerateRequest(
                request_id=RequestId(f"control-{fault}"),
                tokens=fault_tokens(number),
                sampling=Sampling(max_tokens=OUTPUT_TOKENS),
                prefill_address=prefill.address,
                fault=fault,
            )
            words = _pages(expected)
            try:
                served = await self._ask(decode, request)
                row = ControlRow(fault, words, f"nothing: {len(served.tokens)} tokens came out", ok=False)
            except DigestMismatch as error:
                row = judged(fault, error)
            except PdkvError as error:
                row = ControlRow(fault, words, f"{error.kind}: {error}", ok=False)
            self.report.controls.append(row)
        self.report.checks["controls"] = all(row.ok for row in self.report.controls)

    async def _others(self, prefill: NodeProcess) -> None:
        """Three more decode nodes: one that checks no digests, and two that must not be paired at all."""
        self._say("starting decode nodes that check nothing, list other layers, roll back otherwise")
        unchecked, listed, rolled = await asyncio.gather(
            self._fleet.start("decode", "unchecked", self._flags(digest="none", allow_fault_injection=True)),
            self._fleet.start("decode", "other-list", self._flags(indexer_types=OTHER_LIST)),
            self._fleet.start("decode", "other-rollback", self._flags(rollback_tokens=OTHER_ROLLBACK)),
        )
        await self._index_is_read(prefill, unchecked)
        await self._refused(prefill, listed, "indexer_types")
        await self._refused(prefill, rolled, "rollback_tokens")
        self.report.checks["refusals"] = all(row.ok for row in self.report.refusals)

    async def _index_is_read(self, prefill: NodeProcess, unchecked: NodeProcess) -> None:
        """If losing index-K changed nothing, catching its loss would prove nothing."""
        tokens = fault_tokens(len(CONTROLS), UNREAD_INDEX_TOKENS)
        sampling = Sampling(max_tokens=OUTPUT_TOKENS)
        request = GenerateRequest(
            request_id=RequestId("control-unchecked"),
            tokens=tokens,
            sampling=sampling,
            prefill_address=prefill.address,
            fault="drop-index",
        )
        right = await self._reference.ask(tokens, sampling)
        served = await self._ask(unchecked, request)
        changed = sum(a != b for a, b in zip(served.tokens, right.tokens, strict=True))
        ok = changed > 0 and served.done.shipment.digests_verified == 0
        found = f"{changed} of {len(right.tokens)} tokens changed, {served.done.shipment.digests_verified} digests"
        self.report.controls.append(ControlRow("drop-index, digests off", "other tokens", found, ok))
        self.report.checks["index_read"] = ok

    async def _refused(self, prefill: NodeProcess, node: NodeProcess, field: str) -> None:
        request = GenerateRequest(
            request_id=RequestId(f"refused-{node.name}"),
            tokens=fault_tokens(99, 100),
            prefill_address=prefill.address,
        )
        row = RefusalRow(field, field, "", "", ok=False)
        try:
            await self._ask(node, request)
        except ContractMismatch as error:
            for difference in error.differences:
                if difference.field == field:
                    ok = difference.mine != difference.theirs
                    row = RefusalRow(field, field, difference.mine, difference.theirs, ok)
        self.report.refusals.append(row)

    def _request(self, ask: Ask, prefill: NodeProcess) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(ask.name),
            tokens=ask.tokens,
            sampling=ask.sampling,
            prefill_address=prefill.address,
            want_logits=True,
        )

    async def _ask(
        self,
        node: NodeProcess,
        request: GenerateRequest,
        after_first: Callable[[], Awaitable[None]] | None = None,
    ) -> Served:
        tokens: list[int] = []
        digests: list[int] = []
        async with aclosing(self._nodes.decode(node.address).generate(request)) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    return Served(tokens, digests, event)
                tokens.append(event.token)
                digests.append(event.logits_digest)
                if len(tokens) == 1 and after_first is not None:
                    await after_first()
        raise PeerLost(f"{node.name} ended the stream without a last word", node=node.name)

    def _compare(self, ask: Ask, served: Served, answer: MonolithAnswer) -> None:
        row = RequestRow(
            name=ask.name,
            kind=ask.kind,
            output_tokens=len(served.tokens),
            shipment=served.done.shipment,
            expected_hit_pages=ask.hit_pages,
            tokens_equal=tuple(served.tokens) == answer.tokens,
            logits_equal=(
                served.done.chunk_starts == answer.chunk_starts
                and tuple(served.logits_digests) == answer.logits_digests
            ),
        )
        self.report.requests.append(row)
        self._row(row)

    def _check_requests(self) -> None:
        rows, fmt, checks = self.report.requests, self._fmt, self.report.checks
        whole = len(rows) == len(self._asks)
        ships = [row.shipment for row in rows]
        checks["tokens"] = whole and all(row.tokens_equal for row in rows)
        checks["logits"] = whole and all(row.logits_equal for row in rows)
        checks["chunks"] = whole and all(r.shipment.chunks >= 2 for r in rows if r.kind == Kind.COLD)
        checks["pages"] = whole and all(
            s.pages_hit + s.pages_shipped == s.pages_total == -(-s.prompt_tokens // fmt.page_tokens) for s in ships
        )
        checks["hits"] = whole and all(row.shipment.pages_hit == row.expected_hit_pages for row in rows)
        checks["bytes"] = whole and all(
            s.bytes_main == s.pages_shipped * fmt.main_bytes
            and s.bytes_index == s.pages_shipped * fmt.index_bytes
            and s.digests_verified == s.pages_shipped > 0
            for s in ships
        )
        checks["telemetry"] = whole and all(s.bytes_backend == s.bytes_main + s.bytes_index > 0 for s in ships)


def judged(fault: str, error: DigestMismatch) -> ControlRow:
    """Held only if the pages that are named are those that the fault struck, and no others."""
    expected = CONTROLS[fault]
    named = {int(p): c for p, c in re.findall(r"prompt page (\d+) in local page \d+: (\w+)", str(error))}
    return ControlRow(fault, _pages(expected), f"{error.status}: {_pages(named)}", ok=named == expected)


def _pages(named: dict[int, str]) -> str:
    """Pages of one cache together: "pages 0 1 2 index"."""
    of: dict[str, list[str]] = {}
    for page, cache in named.items():
        of.setdefault(cache, []).append(str(page))
    return ", ".join(f"page{'s' if len(pages) > 1 else ''} {' '.join(pages)} {cache}" for cache, pages in of.items())
