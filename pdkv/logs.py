"""How log lines look, and lines that carry facts by name.

Guarantees: as JSON every line is one object, with `time`, `level`, `node`, `logger` and `message`, a traceback as
`trace`, and the line's facts beside them, numbers as numbers; as text the same facts follow the words as name=value; a
value from elsewhere can't begin a new line in either. Nothing is formatted of a line that isn't written.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

OWN = ("time", "level", "node", "logger", "message", "trace")
"""Names that no fact has."""
_PLAIN = re.compile(r"[\x21-\x7e]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

Fact = str | int | float | bool
Format = Literal["text", "json"]


def say(log: logging.Logger, level: int, words: str, facts: Mapping[str, Fact]) -> None:
    """One line: `words` are the same for all lines of a kind, `facts` are what differs."""
    log.log(level, words, extra={"facts": facts})


@contextmanager
def to_stderr(node: str, level: str, form: Format) -> Iterator[None]:
    """While the body runs, all of the process's lines of at least that `level` go to stderr, once and in this form.

    For a process that is ours: what a library has put on the console is taken away meanwhile; handlers that write
    elsewhere stay. An application that embeds pdkv doesn't call this, and keeps what it has.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(node) if form == "json" else TextLines(node))
    root, console = logging.getLogger(), (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    taken = [other for other in root.handlers if isinstance(other, logging.StreamHandler) and other.stream in console]
    threshold = root.level
    for other in taken:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.setLevel(threshold)
        root.removeHandler(handler)
        for other in taken:
            root.addHandler(other)


class TextLines(logging.Formatter):
    """For people."""

    def __init__(self, node: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(node)s %(name)s: %(message)s", defaults={"node": node})

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _CONTROL.sub(" ", super().formatMessage(record))
        return " ".join((line, *(f"{name}={_shown(value)}" for name, value in _facts(record).items())))


class JsonLines(logging.Formatter):
    """For machines."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Fact] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        line |= {name: _sendable(value) for name, value in _facts(record).items() if name not in OWN}
        return json.dumps(line)


def _facts(record: logging.LogRecord) -> Mapping[str, Fact]:
    found: Mapping[str, Fact] = getattr(record, "facts", {})
    return found


def _shown(value: Fact) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) and '"' not in text else json.dumps(text)


def _sendable(value: Fact) -> Fact:
    """JSON has no infinity, and nobody needs a nanosecond."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value
