"""Checks of single values that a peer sent.

Guarantees: each raises `BoundsError` or `ProtocolError` with the field's name; none trusts a length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, ProtocolError
from pdkv.ids import HASH_BYTES, UInt32Array

MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of 1,048,576 tokens is 4 MiB, its 16,384 pages are 1 MiB of columns."""
MAX_TEXT = 1024
MAX_NAME = 256
MAX_ENTRIES = 4096
"""Entries of a list that grows with layers or peers."""
MAX_TOKENS = 1 << 22
MAX_PAGES = 1 << 20
MAX_DURATION_S = 7 * 86400.0
UNARY_DEADLINE_S = 30.0
"""Of a call that answers once, whatever its client set."""
ADMIN_DEADLINE_S = 3600.0
"""Of an operator's call: a drain waits for the longest answer."""
STREAM_SLACK_S = 1.0
"""A server's bound on a stream comes so long after the request's time is over, and a client's as long again: the node
that runs the request ends it first, and says what was over."""
RANK_DEADLINE_S = 600.0
"""Of a rank's call, which computes, digests or waits: the leader's own deadlines are shorter."""
BENCH_DEADLINE_S = 600.0
"""Of a benchmark's call to its source, which may fill all of its memory."""
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Nothing that gRPC would take apart when it looks for the name in a certificate."""
INCARNATION = re.compile(r"[0-9a-f]{32}")


class Message(Protocol):
    """What is used of a protobuf message here."""

    def ByteSize(self) -> int: ...
    def HasField(self, field_name: Any) -> bool: ...


def require_sendable(message: Message, what: str) -> None:
    """Raises `BoundsError` before gRPC would break the call off with words of its own."""
    if (size := message.ByteSize()) > MAX_MESSAGE_BYTES:
        raise BoundsError(f"{what}, bytes of the message", size, f"at most {MAX_MESSAGE_BYTES}")


def present(message: Message, *fields: str) -> None:
    """The sub-messages are set."""
    for field in fields:
        if not message.HasField(field):
            raise ProtocolError(f"{field} is missing", field=field)


def within(field: str, value: float, least: float, most: float) -> None:
    """Also refuses what is not a number."""
    if not least <= value <= most:
        raise BoundsError(field, value, f"{least} to {most}")


def text(field: str, value: str, *, most: int = MAX_TEXT) -> str:
    """At most `most` printable characters; may be empty."""
    within(f"{field}, characters", len(value), 0, most)
    if not value.isprintable():
        raise ProtocolError(f"{field}: {value[:80]!r} is not printable", field=field)
    return value


def cut(value: str, most: int = MAX_TEXT) -> str:
    """What `text` will take of it: one line, and the beginning if it is too long."""
    line = "".join(c if c.isprintable() else " " for c in value)
    return line if len(line) <= most else line[: most - 3] + "..."


def name(field: str, value: str) -> str:
    """1 to 256 printable characters."""
    within(f"{field}, characters", len(value), 1, MAX_NAME)
    return text(field, value)


def matching(field: str, value: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name(field, value)):
        raise ProtocolError(f"{field}: {value[:80]!r} is not of the form {pattern.pattern}", field=field)
    return value


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ProtocolError(f"{field}: {value[:80]!r} is not one of {', '.join(allowed)}", field=field)
    return value


def duration_s(field: str, value: float) -> float:
    """Finite, above 0, at most a week."""
    if value == 0.0:
        raise BoundsError(field, value, "above 0")
    return elapsed_s(field, value)


def elapsed_s(field: str, value: float) -> float:
    """Finite, at least 0, at most a week."""
    within(field, value, 0.0, MAX_DURATION_S)
    return value


def sized(field: str, value: bytes, *sizes: int) -> bytes:
    if len(value) not in sizes:
        raise BoundsError(f"{field}, bytes", len(value), " or ".join(map(str, sizes)))
    return value


def bounded(field: str, values: Sized, most: int = MAX_ENTRIES) -> None:
    within(f"{field}, entries", len(values), 0, most)


def optional_hash(field: str, value: bytes) -> bytes:
    return sized(field, value, 0, HASH_BYTES)


def column(field: str, values: Sized, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """`count` entries as an array."""
    if len(values) != count:
        raise ProtocolError(f"{field} has {len(values)} entries, not {count}", field=field, have=len(values), due=count)
    return np.array(values, dtype)


def raw_column(field: str, raw: bytes, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """`count` entries from little-endian bytes: read-only, a view of them where the machine is little-endian, too."""
    sent = np.dtype(dtype).newbyteorder("<")
    if len(raw) != count * sent.itemsize:
        have, due = len(raw), count * sent.itemsize
        raise ProtocolError(f"{field} has {have} bytes, not {due} for {count} entries", field=field, have=have, due=due)
    return np.frombuffer(raw, sent).astype(dtype, copy=False)


def raw(values: npt.NDArray[Any]) -> bytes:
    """What `raw_column` takes."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def words(field: str, raw: bytes, dtype: str, most: int) -> npt.NDArray[Any]:
    """At most `most` values of 4 bytes."""
    if len(raw) % 4:
        raise BoundsError(f"{field}, bytes", len(raw), "a multiple of 4")
    within(f"{field}, values", len(raw) // 4, 0, most)
    return np.frombuffer(raw, dtype)


def rising(field: str, values: Iterable[int], below: int) -> tuple[int, ...]:
    """Each above the one before, the last below `below`; as many as a prompt may have pages, since chunks are whole
    ones."""
    numbers = tuple(values)
    bounded(field, numbers, MAX_PAGES)
    if any(b <= a for a, b in pairwise(numbers)) or (numbers and numbers[-1] >= below):
        raise ProtocolError(f"{field} doesn't rise, or leaves [0, {below})", field=field)
    return numbers


def tokens_from(raw: bytes) -> UInt32Array:
    """A read-only uint32 column over 4 bytes a token, little-endian: not a copy, on a machine that is little-endian."""
    if len(raw) % 4:
        raise BoundsError("tokens, bytes", len(raw), "a multiple of 4")
    within("tokens", len(raw) // 4, 1, MAX_TOKENS)
    return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)


def tokens_raw(tokens: UInt32Array) -> bytes:
    """What `tokens_from` takes; the very bytes, if the column is one that came from there."""
    sent = tokens.astype("<u4", copy=False)
    whole = sent.base
    return whole if isinstance(whole, bytes) and len(whole) == sent.nbytes else sent.tobytes()
