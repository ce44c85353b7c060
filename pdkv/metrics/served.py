"""Nodes and routers whose requests are observed.

Guarantees: each request counts once, by how it ended; observing changes nothing of what is served, and what a stream
raises is raised.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from pdkv.errors import DigestMismatch, PdkvError
from pdkv.metrics.names import ABORTED, DONE, FIRST_STEP, Metrics
from pdkv.metrics.timeline import Timeline
from pdkv.node.decode import DecodeNode
from pdkv.node.messages import (
    GenerateDone,
    GenerateEvent,
    GenerateRequest,
    NodeIntro,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    Shipment,
    Token,
)
from pdkv.node.prefill import PrefillNode
from pdkv.router.service import Router

Event = TypeVar("Event")
LAST_WORDS = (GenerateDone, PrefillDone)


class MeteredPrefillNode(PrefillNode):
    """Made like a `PrefillNode`; `metrics` is set before it serves."""

    metrics: Metrics

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        try:
            return await super().connect(intro)
        except PdkvError as error:
            _refused(self.metrics, error)
            raise

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        async with aclosing(_counted(self.metrics, super().prefill(request))) as events:
            async for event in events:
                if isinstance(event, PrefillDone):
                    self.metrics.prefill.observe(event.prefill_s)
                    hit = event.chunk_starts[0] if event.chunk_starts else len(request.tokens)
                    page_tokens = self.parts.contract.page_tokens
                    self.metrics.hits.observe(hit // page_tokens)
                    self.metrics.tokens.labels("prompt").inc(len(request.tokens))
                yield event


class MeteredDecodeNode(DecodeNode):
    """Made like a `DecodeNode`; both are set before it serves, and the timeline's hook is among the parts' hooks."""

    metrics: Metrics
    timeline: Timeline

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        mine = self.timeline.begin(request.request_id)
        try:
            async with aclosing(_generated(self.metrics, super().generate(request))) as events:
                async for event in events:
                    if isinstance(event, GenerateDone):
                        self._observe(event, self.timeline.end(request.request_id))
                    yield event
        finally:
            if mine:
                self.timeline.end(request.request_id)

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


class MeteredRouter(Router):
    """Made like a `Router`; `metrics` is set before it serves."""

    metrics: Metrics

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        async with aclosing(_generated(self.metrics, super().generate(request))) as events:
            async for event in events:
                yield event


async def _generated(
    metrics: Metrics, events: AsyncGenerator[GenerateEvent, None]
) -> AsyncGenerator[GenerateEvent, None]:
    """Counted, with the times of the first two tokens."""
    began_s = first_s = time.monotonic()
    async with aclosing(_counted(metrics, events)) as counted:
        async for event in counted:
            if isinstance(event, Token) and event.index == 0:
                first_s = time.monotonic()
                metrics.ttft.observe(first_s - began_s)
            elif isinstance(event, Token) and event.index == 1:
                metrics.stages.labels(FIRST_STEP).observe(time.monotonic() - first_s)
            yield event


async def _counted(metrics: Metrics, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    outcome = ABORTED
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, LAST_WORDS):
                    outcome = DONE
                yield event
    except PdkvError as error:
        outcome = error.kind
        _refused(metrics, error)
        if isinstance(error, DigestMismatch):
            metrics.digest_failures.inc()
        raise
    finally:
        metrics.requests.labels(outcome).inc()


def _refused(metrics: Metrics, error: PdkvError) -> None:
    """By field; a contract's fields are a closed list."""
    for difference in error.differences:
        metrics.refusals.labels(difference.field).inc()


def _observe_shipment(metrics: Metrics, shipment: Shipment) -> None:
    metrics.transfer.observe(shipment.transfer_s)
    metrics.exposed.observe(shipment.exposed_transfer_s)
    metrics.request_bytes.observe(shipment.bytes_main + shipment.bytes_index)
    metrics.bytes.labels("main").inc(shipment.bytes_main)
    metrics.bytes.labels("index").inc(shipment.bytes_index)
    metrics.hits.observe(shipment.pages_hit)
    for source in ("hit", "shipped", "pulled_back"):
        metrics.pages.labels(source).inc(_pages(shipment, source))
    metrics.verified.inc(shipment.digests_verified)
    metrics.tokens.labels("prompt").inc(shipment.prompt_tokens)


def _pages(shipment: Shipment, source: str) -> Any:
    return getattr(shipment, f"pages_{source}")
