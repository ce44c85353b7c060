"""Spans as a collector gets them: whose they are, how they ended, and what becomes of them when nobody takes them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from pdkv.errors import BoundsError, ContractMismatch, Difference, PeerLost
from pdkv.tracing import otel
from pdkv.tracing.otel import OtelTracer, TraceSettings
from pdkv.tracing.span import SILENT
from tests.tracing.receiver import receiving

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-{flags}"
SAMPLED, UNSAMPLED = PARENT.format(flags="01"), PARENT.format(flags="00")


@contextmanager
def traced(endpoint: str, ratio: float = 1.0) -> Iterator[OtelTracer]:
    with closing(OtelTracer(TraceSettings(endpoint, ratio, "pdkv-test", "t0"))) as tracer:
        yield tracer


def test_a_trace_arrives_with_all_that_was_told() -> None:
    with receiving() as (receiver, endpoint):
        with traced(endpoint) as tracer:
            root = tracer.begin("root", {}, "server", root=True)
            child = root.child("child", {"pages": 7}, "client")
            began_s = time.monotonic()
            child.past("past", began_s, began_s + 1.5, {"bytes": 1 << 40})
            child.fail(PeerLost("gone", address="p0:1", secret="a prompt"))
            child.end()
            root.end()
            root.child("late").end()
        spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"root", "child", "past", "late"}
    assert {(span.service, span.instance) for span in spans.values()} == {("pdkv-test", "t0")}
    assert len({span.trace for span in spans.values()}) == 1
    assert spans["root"].parent == b""
    assert spans["child"].parent == spans["late"].parent == spans["root"].id
    assert spans["past"].parent == spans["child"].id
    assert spans["child"].within(spans["root"])
    assert [spans[name].kind for name in ("root", "child", "past")] == [2, 3, 1]
    assert spans["past"].ended_ns - spans["past"].began_ns == pytest.approx(1.5e9, abs=1e4)
    assert spans["past"].attributes == {"bytes": 1 << 40}
    assert spans["child"].attributes == {"pages": 7, "error.type": "PeerLost", "pdkv.error.address": "p0:1"}
    assert spans["child"].failed
    assert not spans["root"].failed


def test_an_error_tells_its_kind_and_no_value_of_a_request() -> None:
    with receiving() as (receiver, endpoint):
        with traced(endpoint) as tracer:
            for error in (
                BoundsError("token id", 4711, "below 256"),
                ContractMismatch([Difference("page_tokens", "64", "32", "equal")]),
                RuntimeError("4711"),
                GeneratorExit(),
            ):
                span = tracer.begin("failing", {}, "server", root=True)
                span.fail(error)
                span.end()
        told = [span.attributes for span in receiver.spans]
    assert told == [
        {"error.type": "BoundsError", "pdkv.error.what": "token id"},
        {
            "error.type": "ContractMismatch",
            "pdkv.error.fields": "1",
            "pdkv.error.differences": "page_tokens",
        },
        {"error.type": "RuntimeError"},
        {"pdkv.cancelled": True},
    ]


def test_whoever_began_a_trace_decides_whether_it_is_kept() -> None:
    with receiving() as (receiver, endpoint):
        with traced(endpoint, ratio=0.0) as tracer:
            kept = tracer.begin("kept", {"traceparent": [SAMPLED], "tracestate": ["a=b"]}, "server", root=False)
            assert dict(kept.headers)["traceparent"].startswith(SAMPLED[:36])
            assert dict(kept.headers)["traceparent"].endswith("-01")
            assert dict(kept.headers)["tracestate"] == "a=b"
            kept.end()
            for passed in (
                tracer.begin("passed", {"traceparent": [UNSAMPLED]}, "server", root=False),
                tracer.begin("its own, by ratio 0", {}, "server", root=True),
            ):
                assert not passed.listening
                assert not int(dict(passed.headers)["traceparent"][-2:], 16) & 1
                assert passed.child("more") is passed
                passed.past("more", 0.0, 1.0)
                passed.end()
        assert [span.name for span in receiver.spans] == ["kept"]
        assert receiver.spans[0].parent.hex() == "0123456789abcdef"


@pytest.mark.parametrize(
    "header",
    [
        [],
        [""],
        ["no such thing"],
        [SAMPLED, SAMPLED],
        [SAMPLED.upper()],
        ["ff" + SAMPLED[2:]],
        [SAMPLED + "-more"],
        ["00-" + "0" * 32 + SAMPLED[35:]],
        [SAMPLED[:36] + "0" * 16 + "-01"],
        [SAMPLED + "x" * 4096],
    ],
)
def test_a_header_that_can_not_be_read_is_none(header: list[str]) -> None:
    with traced("http://127.0.0.1:1", ratio=0.0) as tracer:
        assert tracer.begin("inner", {"traceparent": header}, "server", root=False) is SILENT
        begun = tracer.begin("outer", {"traceparent": header}, "server", root=True)
        assert SAMPLED[3:35] not in str(begun.headers)
        assert tracer.begin("control", {"traceparent": [SAMPLED]}, "server", root=False).listening


def test_what_can_not_be_delivered_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "QUEUE_SPANS", 8)
    monkeypatch.setattr(otel, "BATCH_SPANS", 4)
    lost: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as mute, caplog.at_level(logging.INFO):
        # it takes connections and never says anything
        began_s = time.monotonic()
        with traced(f"http://127.0.0.1:{mute.getsockname()[1]}") as tracer:
            tracer.lost = lost.append
            for _ in range(100):
                span = tracer.begin("lost", {}, "server", root=True)
                span.end()
            told_s = time.monotonic() - began_s
        assert tracer.lost_spans == sum(lost) == 100
    assert told_s < otel.EXPORT_S / 2, "whoever ends a span waits for nobody"
    assert time.monotonic() - began_s < otel.FLUSH_S + otel.EXPORT_S
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.count("traces can't be delivered: their spans are dropped until that works again") <= 1
    assert said[-1] == "100 spans of traces could not be delivered"


class Interrupted(int):
    """Somebody else adds to it in the middle of an addition, as soon as nobody keeps them from it."""

    meanwhile: Callable[[], None]

    def __add__(self, other: int) -> int:
        self.meanwhile()
        return int(self) + other


def test_what_two_threads_lose_at_once_is_counted_whole() -> None:
    with traced("http://127.0.0.1:1") as tracer:
        other = threading.Thread(target=tracer._lose, args=(5,))

        def meanwhile() -> None:
            other.start()
            other.join(0.05)  # it has added by then, unless it waits for this addition

        tracer.lost_spans = Interrupted(1)
        tracer.lost_spans.meanwhile = meanwhile
        tracer._lose(10)
        other.join()
        assert tracer.lost_spans == 16
        tracer.lost_spans = 0


def test_an_exporter_that_raises_has_lost_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, spans: object) -> None:
        raise ZeroDivisionError("it can't be encoded")

    monkeypatch.setattr(otel.OTLPSpanExporter, "export", refuse)
    with traced("http://127.0.0.1:1") as tracer:
        for _ in range(3):
            tracer.begin("lost", {}, "server", root=True).end()
    assert tracer.lost_spans == 3


def test_it_is_delivered_again_once_somebody_is_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "EVERY_S", 0.05)
    monkeypatch.setattr(otel, "EXPORT_S", 0.5)
    with receiving() as (_, endpoint):
        port = int(endpoint.rpartition(":")[2])
    with caplog.at_level(logging.INFO), traced(endpoint) as tracer:
        lost: list[int] = []
        tracer.lost = lost.append
        tracer.begin("early", {}, "server", root=True).end()
        ends_s = time.monotonic() + 30
        while not lost:
            assert time.monotonic() < ends_s
            time.sleep(0)
        with receiving(port) as (receiver, _):
            tracer.begin("late", {}, "server", root=True).end()
            receiver.until(lambda spans: [span.name for span in spans] == ["late"])
    words = [record.getMessage() for record in caplog.records]
    assert words.index("traces can't be delivered: their spans are dropped until that works again") < words.index(
        "traces are delivered again"
    )
