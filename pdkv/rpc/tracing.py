"""Spans of gRPC calls: one at the caller, one at the callee, told from the one to the other in the call's metadata.

Guarantees: without a trace a call is made and served as if this were not here; a header that can't be read, or stands
there twice, is as none; a trace begins only where a client asks for something, never with what nodes ask each other.
Names follow OpenTelemetry's conventions for RPC.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pdkv.errors import PdkvError
from pdkv.tracing.span import SILENT, Attributes, Headers, Span, Tracer, current, ending, within

ROOTS = frozenset(("Generate", "Prefill"))
"""What a trace begins with, if the caller tells of none."""
TRACED = ROOTS | {"Connect", "Estimate", "Lend", "Locate", "ReleaseLease"}
"""Calls that there are a few of in a request's life; not renewals of leases, and not a rank's steps."""
OK, CANCELLED = "OK", "CANCELLED"


@contextmanager
def calling(stub: type[Any], call: str, address: str) -> Iterator[Span]:
    """A call of a service at `address`, as the caller sees it."""
    parent = current()
    if not parent.headers or call not in TRACED:
        yield SILENT
        return
    method = f"pdkv.v1.{stub.__name__.removesuffix('Stub')}/{call}"
    host, _, port = address.rpartition(":")
    facts: Attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "server.address": host,
        "server.port": int(port),
    }
    with ending(parent.child(method, facts, "client")) as made, _status(made):
        yield made


@contextmanager
def serving(tracer: Tracer | None, path: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
    """The call of `path` (/pdkv.v1.Prefill/Prefill), as the callee sees it; its span is the current one meanwhile."""
    name = path.rpartition("/")[2]
    if tracer is None or name not in TRACED:
        yield
        return
    headers: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in context.invocation_metadata() or ():
        if key in ("traceparent", "tracestate") and isinstance(value, str):
            headers[key].append(value)
    made = tracer.begin(path.removeprefix("/"), headers, "server", root=name in ROOTS)
    if not made.headers:
        yield
        return
    peer = context.peer().partition(":")[2].rpartition(":")[0]  # without ipv4: and the port
    made.note({"rpc.system.name": "grpc", "rpc.method": path.removeprefix("/"), "network.peer.address": peer})
    with within(made), _status(made):
        yield


@contextmanager
def _status(made: Span) -> Iterator[None]:
    """What the call ended with, by gRPC's name."""
    code = PdkvError.status  # of what is no error of ours, as the caller is told
    try:
        yield
        code = OK
    except (asyncio.CancelledError, GeneratorExit):
        code = CANCELLED
        raise
    except PdkvError as error:
        code = error.fields.get("code", error.status)
        raise
    finally:
        made.note({"rpc.response.status_code": code})


def telling(channel: grpc.aio.Channel, span: Span) -> Any:
    """The channel for one stub, whose calls tell of the span, if there is one."""
    return _TellingChannel(channel, span.headers) if span.headers else channel


class _TellingChannel:
    def __init__(self, channel: grpc.aio.Channel, headers: Headers) -> None:
        self._channel = channel
        self._headers = headers

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._telling(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._telling(self._channel.unary_stream(*args, **kwargs))

    def _telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, **options: call(request, metadata=self._headers, **options)
