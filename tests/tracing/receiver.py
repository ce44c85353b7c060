"""A receiver of traces, as a collector is one: OTLP over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.waiting import DEADLINE_S


@dataclass(frozen=True)
class Received:
    """A span."""

    service: str
    instance: str
    name: str
    kind: int
    trace: bytes
    id: bytes
    parent: bytes
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any] = field(hash=False)

    def within(self, other: Received) -> bool:
        return other.began_ns <= self.began_ns <= self.ended_ns <= other.ended_ns


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._more = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        found = list(_spans(request))
        with self._more:
            self.spans += found
            self._more.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def until(self, holds: Callable[[list[Received]], bool]) -> list[Received]:
        """All that came, once that is enough."""
        with self._more:
            assert self._more.wait_for(lambda: holds(self.spans), DEADLINE_S), [s.name for s in self.spans]
            return list(self.spans)


def _spans(request: Any) -> Iterator[Received]:
    for of in request.resource_spans:
        resource = _plain(of.resource.attributes)
        for scope in of.scope_spans:
            for span in scope.spans:
                yield Received(
                    resource["service.name"],
                    resource["service.instance.id"],
                    span.name,
                    span.kind,
                    span.trace_id,
                    span.span_id,
                    span.parent_span_id,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    _plain(span.attributes),
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def receiving(port: int = 0) -> Iterator[tuple[Receiver, str]]:
    """The receiver and its endpoint."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{bound}"
    finally:
        server.stop(0).wait()
