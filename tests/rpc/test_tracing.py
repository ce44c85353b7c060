"""A trace over gRPC: what a call tells of the span that it is made in, and what the callee makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pdkv.errors import PeerLost
from pdkv.rpc.tracing import calling, serving, telling
from pdkv.tracing.span import SILENT, Span, current, within
from pdkv.v1.prefill_pb2_grpc import PrefillStub
from pdkv.v1.source_pb2_grpc import SourceStub
from tests.tracing.test_span import Told

LOCATE = "pdkv.v1.Source/Locate"


class Heard:
    """A tracer that remembers what it was told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, dict[str, list[str]], str, bool]] = []
        self.made = Told("server")

    def lost(self, count: int) -> None:
        raise AssertionError(count)

    def begin(self, name: str, headers: Any, kind: Any, *, root: bool) -> Span:
        self.begun.append((name, {key: list(values) for key, values in headers.items()}, kind, root))
        return self.made if headers or root else SILENT


class Context:
    def __init__(self, metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


def test_a_call_within_a_span_is_a_child_of_it() -> None:
    root = Told("root")
    with within(root), calling(SourceStub, "Locate", "10.0.0.1:7000") as made:
        assert made.headers == (("traceparent", "00-1"),)
        assert current() is root, "a stream's consumer has its own"
    (call,) = root.children
    assert call.name == LOCATE
    assert call.facts == {
        "rpc.system.name": "grpc",
        "rpc.method": LOCATE,
        "server.address": "10.0.0.1",
        "server.port": 7000,
        "rpc.response.status_code": "OK",
    }
    assert call.ended == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLost("gone"), "UNAVAILABLE"),
        (PeerLost("gone", code="CANCELLED"), "CANCELLED"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (ZeroDivisionError(), "INTERNAL"),
    ],
)
def test_it_ends_with_the_status_of_the_call(error: BaseException, code: str) -> None:
    root = Told("root")
    with pytest.raises(type(error)), within(root), calling(SourceStub, "Locate", "p:1"):
        raise error
    (call,) = root.children
    assert call.facts["rpc.response.status_code"] == code
    assert (call.failures, call.ended) == ([error], 1)


def test_renewals_and_what_nobody_traces_have_none() -> None:
    root = Told("root")
    with within(root), calling(PrefillStub, "RenewLease", "p:1") as made:
        assert made is SILENT
    assert root.children == []
    with calling(SourceStub, "Locate", "p:1") as made:
        assert made is SILENT


def test_the_callee_gets_the_headers_and_is_the_current_span() -> None:
    heard = Heard()
    metadata: list[tuple[str, str | bytes]] = [
        ("traceparent", "one"),
        ("tracestate", "two"),
        ("traceparent", b"bytes"),
        ("authorization", "secret"),
    ]
    with serving(heard, f"/{LOCATE}", Context(metadata)):  # type: ignore[arg-type]
        assert current() is heard.made
    assert current() is SILENT
    assert heard.begun == [(LOCATE, {"traceparent": ["one"], "tracestate": ["two"]}, "server", False)]
    assert heard.made.facts["network.peer.address"] == "10.0.0.7"
    assert heard.made.facts["rpc.response.status_code"] == "OK"
    assert heard.made.ended == 1


def test_only_a_client_begins_a_trace() -> None:
    heard = Heard()
    for path, root in (("/pdkv.v1.Decode/Generate", True), (f"/{LOCATE}", False)):
        with serving(heard, path, Context()):  # type: ignore[arg-type]
            assert (current() is heard.made) is root
        assert heard.begun[-1][3] is root
    with serving(heard, "/pdkv.v1.Decode/Status", Context()):  # type: ignore[arg-type]
        assert current() is SILENT
    assert len(heard.begun) == 2


def test_calls_over_a_telling_channel_have_the_headers_as_metadata() -> None:
    class Channel:
        def unary_unary(self, path: str, **options: Any) -> Any:
            return lambda request, **more: (path, options, request, more)

        unary_stream = unary_unary

    plain = Channel()
    assert telling(plain, SILENT) is plain  # type: ignore[arg-type]
    channel = telling(plain, Told("call"))  # type: ignore[arg-type]
    for multi in (channel.unary_unary, channel.unary_stream):
        found = multi("/a", response_deserializer=int)("request", timeout=1)
        assert found == (
            "/a",
            {"response_deserializer": int},
            "request",
            {"metadata": (("traceparent", "00-1"),), "timeout": 1},
        )
