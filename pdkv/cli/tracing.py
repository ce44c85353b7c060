"""Traces of a process, if it was asked for any.

Guarantees: without an endpoint nothing is imported and nothing runs; asked for by OpenTelemetry's variables alone,
which a cluster may set for everybody, what is missing is a warning, and asked for by name it is an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from pdkv.errors import MissingDependency
from pdkv.tracing.span import tracing_by

log = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def traced(endpoint: str, ratio: float, *, service: str, instance: str) -> Iterator[None]:
    """What is started in the body is traced; at its end what is left is delivered, for some seconds at most.

    Raises `MissingDependency` if `endpoint` is given and OpenTelemetry isn't installed.
    """
    if not endpoint and not asked_by(os.environ):
        yield
        return
    try:
        from pdkv.tracing.otel import OtelTracer, TraceSettings
    except ModuleNotFoundError as error:
        missing = MissingDependency(error.name or "", "tracing", extra="tracing")
        if endpoint:
            raise missing from error
        log.warning("no traces: %s", missing)
        yield
        return
    settings = TraceSettings(endpoint, ratio, "" if _named(os.environ) else service, instance)
    with closing(OtelTracer(settings)) as tracer, tracing_by(tracer):
        yield


def asked_by(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's own variables ask for traces over OTLP/gRPC."""
    if not any(environ.get(name) for name in ENDPOINTS):
        return False
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    if protocol != "grpc":
        log.warning("no traces: the environment wants OTLP over %s, this is OTLP over grpc", protocol)
    return protocol == "grpc"


def _named(environ: Mapping[str, str]) -> bool:
    """Whether they name the service."""
    return bool(environ.get("OTEL_SERVICE_NAME")) or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
