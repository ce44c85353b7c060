"""What the code that serves tells of a request, whether anybody listens or not.

Guarantees: in a process without a tracer, and of a request that nobody traces, nothing is imported, kept or computed;
a span ends once, with the error that it was left by; nothing here raises, waits or does I/O. The current span is that
of the task, and of the tasks that it makes: nobody hands spans on.

An attribute is a number, a name, an address or the id of a request: never a token or the text of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, Protocol

Value = str | bool | int | float
Attributes = Mapping[str, Value]
Headers = tuple[tuple[str, str], ...]
Kind = Literal["internal", "client", "server"]

NOTHING: Attributes = {}


class Span(Protocol):
    """A part of a request's life, from when it is made to its end."""

    @property
    def listening(self) -> bool:
        """False: what is told is not kept, so nothing needs to be computed for it."""

    @property
    def headers(self) -> Headers:
        """What tells another process of this span, as W3C Trace Context writes it; none: it isn't told."""

    def child(self, name: str, attributes: Attributes = NOTHING, kind: Kind = "internal") -> Span:
        """Begins now."""

    def past(self, name: str, began_s: float, ended_s: float, attributes: Attributes = NOTHING) -> None:
        """A child that is over, from and to points of the loop's (monotonic) clock."""

    def note(self, attributes: Attributes) -> None: ...

    def fail(self, error: BaseException) -> None:
        """By kind and by those of its fields that name nodes, addresses and limits. Cancelling is no error."""

    def end(self) -> None: ...


class Tracer(Protocol):
    """Of a process that traces."""

    lost: Callable[[int], None]
    """Told of so many spans that could not be delivered, from any thread."""

    def begin(self, name: str, headers: Mapping[str, Sequence[str]], kind: Kind, *, root: bool) -> Span:
        """A child of the span that the headers tell of; without one, or with one that can't be read, the first span of
        a new trace if that may begin here (`root`), else one that doesn't listen."""


class _Silent:
    """Nobody traces."""

    listening = False
    headers: Headers = ()

    def child(self, name: str, attributes: Attributes = NOTHING, kind: Kind = "internal") -> Span:
        return self

    def past(self, name: str, began_s: float, ended_s: float, attributes: Attributes = NOTHING) -> None:
        pass

    def note(self, attributes: Attributes) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def end(self) -> None:
        pass


SILENT: Span = _Silent()
_current: ContextVar[Span] = ContextVar("pdkv_span", default=SILENT)
_tracer: ContextVar[Tracer | None] = ContextVar("pdkv_tracer", default=None)


def tracer() -> Tracer | None:
    """This process's, if it traces."""
    return _tracer.get()


@contextmanager
def tracing_by(made: Tracer) -> Iterator[None]:
    """What is started in the body is traced by it."""
    token = _tracer.set(made)
    try:
        yield
    finally:
        _tracer.reset(token)


def current() -> Span:
    """The innermost one of this task."""
    return _current.get()


def span(name: str, attributes: Attributes = NOTHING) -> AbstractContextManager[Span]:
    """A child of the current span, which is the current one inside the body and ends with it.

    Not around a `yield` of an async generator: what consumes it has a current span of its own.
    """
    parent = _current.get()
    if not parent.listening:
        return nullcontext(parent)
    return within(parent.child(name, attributes))


@contextmanager
def begun(name: str) -> Iterator[Span]:
    """The first span of a new trace, if this process traces; the current one inside the body, and ends with it."""
    made = tracer()
    with within(SILENT if made is None else made.begin(name, {}, "internal", root=True)) as span:
        yield span


def trace_of(span: Span) -> str:
    """The id of its trace, 32 hex digits; "" of one that nobody keeps."""
    return dict(span.headers)["traceparent"].split("-")[1] if span.listening else ""


@contextmanager
def within(made: Span) -> Iterator[Span]:
    """It is the current one inside the body, and ends with it."""
    token = _current.set(made)
    try:
        with ending(made):
            yield made
    finally:
        _current.reset(token)


@contextmanager
def ending(made: Span) -> Iterator[Span]:
    """It ends with the body, by the error that the body ends with."""
    try:
        yield made
    except BaseException as error:
        made.fail(error)
        raise
    finally:
        made.end()
