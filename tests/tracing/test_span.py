"""What is told to nobody costs nothing, and what is told is told of the right span."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from pdkv.errors import PeerLost
from pdkv.tracing.span import SILENT, Attributes, Kind, Span, current, ending, span, tracer, within


class Told:
    """A span that remembers."""

    listening = True
    headers = (("traceparent", "00-1"),)

    def __init__(self, name: str, parent: Told | None = None) -> None:
        self.name = name
        self.parent = parent
        self.children: list[Told] = []
        self.facts: dict[str, object] = {}
        self.failures: list[BaseException] = []
        self.ended = 0

    def child(self, name: str, attributes: Attributes = {}, kind: Kind = "internal") -> Span:  # noqa: B006
        made = Told(name, self)
        made.note(attributes)
        self.children.append(made)
        return made

    def past(self, name: str, began_s: float, ended_s: float, attributes: Attributes = {}) -> None:  # noqa: B006
        self.child(name, {**attributes, "began_s": began_s, "ended_s": ended_s})

    def note(self, attributes: Attributes) -> None:
        self.facts |= attributes

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def end(self) -> None:
        self.ended += 1


def test_without_a_trace_nothing_is_made() -> None:
    assert tracer() is None
    assert current() is SILENT
    with span("anything") as made:
        assert made is SILENT
        assert current() is SILENT
        assert made.child("more") is SILENT
    assert not SILENT.listening
    assert SILENT.headers == ()


def test_a_span_is_the_current_one_of_its_task_and_of_those_that_it_makes() -> None:
    root = Told("root")

    async def deeper() -> None:
        with span("inner"):
            await asyncio.sleep(0)

    async def body() -> None:
        with within(root):
            with span("outer", {"pages": 3}):
                made = asyncio.create_task(deeper())
                await deeper()
                await made
            assert current() is root
        assert current() is SILENT

    asyncio.run(body())
    (outer,) = root.children
    assert [child.name for child in outer.children] == ["inner", "inner"]
    assert outer.facts == {"pages": 3}
    assert root.ended == outer.ended == outer.children[0].ended == 1


def test_it_ends_with_the_error_that_leaves_it() -> None:
    made = Told("made")
    error = PeerLost("gone")
    with pytest.raises(PeerLost), ending(made):
        raise error
    assert (made.failures, made.ended) == ([error], 1)


def test_a_process_that_does_not_trace_imports_no_tracing() -> None:
    serving = "pdkv.cli.nodes, pdkv.cli.serve, pdkv.rpc.server, pdkv.rpc.client, pdkv.node.decode, pdkv.metrics.served"
    for modules, found in ((serving, "False"), ("pdkv.tracing.otel", "True")):
        code = f"import sys, {modules}; print(any(name.startswith('opentelemetry') for name in sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == (found, "")
