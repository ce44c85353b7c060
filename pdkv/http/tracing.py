"""The span of an HTTP request, which the trace of a completion begins with, or goes on from its client's.

Guarantees: as over gRPC: a header that can't be read, or stands there twice, is as none. Names follow OpenTelemetry's
conventions for HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from pdkv.tracing.span import Tracer, within

HEADERS = ("traceparent", "tracestate")


@contextmanager
def traced(tracer: Tracer | None, request: web.Request, route: str) -> Iterator[None]:
    """The body, as one request's; without a tracer nothing is done."""
    if tracer is None:
        yield
        return
    told = {name: request.headers.getall(name) for name in HEADERS if name in request.headers}
    made = tracer.begin(f"{request.method} {route}", told, "server", root=True)
    made.note({"http.request.method": request.method, "http.route": route, "client.address": request.remote or ""})
    with within(made):
        yield
