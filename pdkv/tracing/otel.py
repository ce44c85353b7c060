"""Spans by OpenTelemetry, delivered over OTLP/gRPC: the one file that imports it.

Guarantees: whoever ends a span waits for nobody: delivery is a thread of its own, before which at most `QUEUE_SPANS`
wait; what comes beyond that, or can't be delivered, is dropped and counted, and said once in the log until it works
again. What a peer says of its span counts only if it is one well-formed header. The end of a process waits `FLUSH_S` at
most for what is left.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import (
    Span as OtherSpan,
)
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace import (
    Tracer as OtherTracer,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdkv import __version__
from pdkv.errors import PdkvError
from pdkv.tracing.span import NOTHING, SILENT, Attributes, Headers, Kind, Span

log = logging.getLogger(__name__)

QUEUE_SPANS = 2048
BATCH_SPANS = 512
EVERY_S = 2.0
"""How long spans are collected for one message."""
EXPORT_S = 2.5
"""Longest that one message may take, tries again among it."""
FLUSH_S = 3.0
GIVEN_UP_S = 0.5
"""Of which so much is for counting what was not delivered."""

TOLD_FIELDS = frozenset(
    ("accepted_by", "address", "code", "field", "fields", "lease", "node", "peer", "prefill_address", "request", "what")
)
"""Of errors: names, addresses and kinds. Others may hold a value that came with a request."""
FIELD_CHARACTERS = 256

_KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    """`Span` by OpenTelemetry's."""

    __slots__ = ("_context", "_span", "_tracer", "listening")

    def __init__(self, tracer: OtherTracer, span: OtherSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self.listening = span.get_span_context().trace_flags.sampled
        """Also once it has ended: what is left to do then, such as releasing a lease, has it as its parent."""

    @property
    def headers(self) -> Headers:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return tuple(carrier.items())

    def child(self, name: str, attributes: Attributes = NOTHING, kind: Kind = "internal") -> Span:
        if not self.listening:
            return self
        started = self._tracer.start_span(name, self._context, _KINDS[kind], dict(attributes))
        return OtelSpan(self._tracer, started)

    def past(self, name: str, began_s: float, ended_s: float, attributes: Attributes = NOTHING) -> None:
        if not self.listening:
            return
        now_ns, now_s = time.time_ns(), time.monotonic()
        began_ns, ended_ns = (now_ns - int((now_s - at_s) * 1e9) for at_s in (began_s, ended_s))
        made = self._tracer.start_span(name, self._context, attributes=dict(attributes), start_time=began_ns)
        made.end(ended_ns)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("pdkv.cancelled", True)
            return
        kind = error.kind if isinstance(error, PdkvError) else type(error).__name__
        self._span.set_attributes({"error.type": kind, **_told(error)})
        self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self) -> None:
        self._span.end()


def _told(error: BaseException) -> dict[str, str]:
    if not isinstance(error, PdkvError):
        return {}
    told = {f"pdkv.error.{name}": value for name, value in error.fields.items() if name in TOLD_FIELDS}
    if error.differences:
        told["pdkv.error.differences"] = ",".join(difference.field for difference in error.differences)
    return {name: value[:FIELD_CHARACTERS] for name, value in told.items()}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where to, and how much."""

    endpoint: str
    """http://host:port, or https://; empty: as OpenTelemetry's own variables have it."""
    ratio: float
    """Of the traces that begin here, those that are kept; others are as whoever began them decided."""
    service: str
    """Name of what serves; empty: as OpenTelemetry's own variables have it."""
    instance: str
    """This process among its like."""


class OtelTracer:
    """`Tracer` by OpenTelemetry. Has a thread from when it is made until `close`."""

    def __init__(self, settings: TraceSettings) -> None:
        # what it has to say of delivery is counted, and told once, here
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        facts = {"service.instance.id": settings.instance, "service.version": __version__}
        if settings.service:
            facts["service.name"] = settings.service
        self._delivery = _Delivery(OTLPSpanExporter(endpoint=settings.endpoint or None, timeout=EXPORT_S), self._lose)
        self._queue = _Queue(self._delivery, self._lose)
        provider = TracerProvider(
            ParentBasedTraceIdRatio(settings.ratio), Resource.create(dict(facts)), shutdown_on_exit=False
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("pdkv", __version__)
        self.lost: Callable[[int], None] = lambda count: None
        self.lost_spans = 0
        self._counting = threading.Lock()

    def begin(self, name: str, headers: Mapping[str, Sequence[str]], kind: Kind, *, root: bool) -> Span:
        told = {key: list(values) for key, values in headers.items()}
        context = Context() if len(told.get("traceparent", ())) != 1 else _PROPAGATOR.extract(told, Context())
        if not context and not root:
            return SILENT
        return OtelSpan(self._tracer, self._tracer.start_span(name, context, _KINDS[kind]))

    def close(self) -> None:
        """Deliver what is left, for `FLUSH_S` at most."""
        end = threading.Thread(target=self._queue.shutdown, name="last spans", daemon=True)
        end.start()
        end.join(FLUSH_S - GIVEN_UP_S)
        self._delivery.shutdown()  # what is on its way is given up, and so is the rest
        end.join(GIVEN_UP_S)
        if left := self._queue.waiting:
            self._lose(left)
        if self.lost_spans:
            log.warning("%d spans of traces could not be delivered", self.lost_spans)

    def _lose(self, count: int) -> None:
        with self._counting:  # whoever ends a span, and whoever delivers, lose some
            self.lost_spans += count
        self.lost(count)


class _Delivery(SpanExporter):
    """Counts what goes to `inner`, and says once when that fails and when it works again. In the queue's thread."""

    def __init__(self, inner: SpanExporter, lose: Callable[[int], None]) -> None:
        self._inner = inner
        self._lose = lose
        self._works = True
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:  # what it raises is kept from everybody by whoever called
            self._note(len(spans), works=result is SpanExportResult.SUCCESS)
        return result

    def _note(self, spans: int, *, works: bool) -> None:
        if not works:
            self._lose(spans)
        if works is not self._works:
            self._works = works
            if works:
                log.info("traces are delivered again")
            else:
                log.warning("traces can't be delivered: their spans are dropped until that works again")

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Queue(BatchSpanProcessor):
    """Drops what there is no room for, and counts it: the inherited one would log each."""

    def __init__(self, delivery: _Delivery, lose: Callable[[int], None]) -> None:
        super().__init__(delivery, QUEUE_SPANS, 1000 * EVERY_S, BATCH_SPANS)
        self._delivery = delivery
        self._lose = lose
        self._entered = 0

    @property
    def waiting(self) -> int:
        """Spans that ended and were not taken for delivery."""
        return self._entered - self._delivery.taken

    def on_end(self, span: ReadableSpan) -> None:
        if self.waiting >= QUEUE_SPANS:
            self._lose(1)
            return
        self._entered += 1
        super().on_end(span)
