"""Nodes whose requests are observed.

Guarantees: each request counts once, and has one line in the log, by how it ended; observing changes nothing of what is
served, and what a stream raises is raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from pdkv.discovery.finder import Finder
from pdkv.errors import PdkvError
from pdkv.metrics.counts import count, count_answer, refused
from pdkv.metrics.ending import Ending, answer_facts, cached_tokens, prefill_facts
from pdkv.metrics.names import Metrics
from pdkv.metrics.timeline import Timeline
from pdkv.metrics.totals import totals
from pdkv.metrics.traced import tell
from pdkv.node.decode import DecodeNode
from pdkv.node.messages import (
    GenerateDone,
    GenerateEvent,
    GenerateRequest,
    NodeIntro,
    NodeStatus,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    Shipment,
)
from pdkv.node.prefill import PrefillNode
from pdkv.tracing.span import current


class MeteredPrefillNode(PrefillNode):
    """Made like a `PrefillNode`; `metrics` is set before it serves."""

    metrics: Metrics

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        try:
            return await super().connect(intro)
        except PdkvError as error:
            refused(self.metrics, error)
            raise

    def status(self) -> NodeStatus:
        status = super().status()
        return replace(status, totals=status.totals | totals(self.metrics))

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        ending = Ending(request.request_id, len(request.tokens))
        try:
            async with aclosing(ending.watch(super().prefill(request))) as events:
                async for event in events:
                    yield event
        finally:
            count(self.metrics, ending)
            tell(current(), ending, {})
            if isinstance(done := ending.done, PrefillDone):
                self.metrics.prefill.observe(done.prefill_s)
                hit = cached_tokens(done.chunk_starts, len(request.tokens))
                self.metrics.hits.observe(hit // self.parts.contract.page_tokens)
                self.metrics.tokens.labels("prompt").inc(len(request.tokens))
            ending.say({"peer": str(request.envelope.sender), **prefill_facts(ending)})


class MeteredDecodeNode(DecodeNode):
    """Made like a `DecodeNode`; all are set before it serves, and the timeline's hook is among the parts' hooks."""

    metrics: Metrics
    timeline: Timeline
    finder: Finder | None = None
    """Of its prefill nodes."""

    def status(self) -> NodeStatus:
        status = super().status()
        discovery = self.finder.status() if self.finder else {}
        return replace(status, totals=status.totals | totals(self.metrics), discovery=discovery)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        ending = Ending(request.request_id, len(request.tokens))
        mine = self.timeline.begin(request.request_id)
        try:
            async with aclosing(ending.watch(super().generate(request))) as events:
                async for event in events:
                    yield event
        finally:
            span = current()
            so_far = self.timeline.so_far(request.request_id) if mine and span.listening else {}
            stages = self.timeline.end(request.request_id) if mine else {}
            tell(span, ending, so_far)
            count(self.metrics, ending)
            count_answer(self.metrics, ending)
            if isinstance(ending.done, GenerateDone):
                self._observe(ending.done, stages)
            ending.say({f"{stage}_s": seconds for stage, seconds in stages.items()} | answer_facts(ending))

    def _observe(self, done: GenerateDone, stages: dict[str, float]) -> None:
        metrics = self.metrics
        for stage, seconds in stages.items():
            metrics.stages.labels(stage).observe(seconds)
        _observe_shipment(metrics, done.shipment)
        metrics.retries.inc(done.retries)
        metrics.tokens.labels("output").inc(done.output_tokens)
        metrics.tokens.labels("recomputed").inc(done.recomputed_tokens)
        if done.speculation is not None:
            said = done.speculation
            for kind in ("drafted", "accepted"):
                metrics.tokens.labels(kind).inc(getattr(said, kind))
            metrics.tokens.labels("rolled_back").inc(said.rolled_back_tokens)
            if said.steps:
                metrics.accepted.observe(said.mean_accepted_length)


def _observe_shipment(metrics: Metrics, shipment: Shipment) -> None:
    metrics.transfer.observe(shipment.transfer_s)
    metrics.exposed.observe(shipment.exposed_transfer_s)
    metrics.request_bytes.observe(shipment.bytes_main + shipment.bytes_index)
    metrics.bytes.labels("main").inc(shipment.bytes_main)
    metrics.bytes.labels("index").inc(shipment.bytes_index)
    metrics.hits.observe(shipment.pages_hit)
    for source in ("hit", "shipped", "pulled_back"):
        metrics.pages.labels(source).inc(getattr(shipment, f"pages_{source}"))
    metrics.verified.inc(shipment.digests_verified)
    metrics.tokens.labels("prompt").inc(shipment.prompt_tokens)
