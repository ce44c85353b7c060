"""Request traces in Mooncake's format, and a name for each page of their prompts.

Guarantees: a trace that was read is whole and well-formed, or a `ConfigError` names the line and the field; two pages
have one name exactly if they and everything before them are equal, as far as the trace tells. So names do in a tree
what page hashes do, and no token is needed.

A line is a JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (a name for each started
block of 512 tokens of the prompt), and, beyond Mooncake's format, an optional `priority`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdkv.errors import ConfigError
from pdkv.ids import HASH_BYTES, PageHashes

BLOCK_TOKENS = 512
_WORDS = HASH_BYTES // 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """One a started block of the prompt."""
    priority: int = 0


def read_trace(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests, all without it. Raises `ConfigError` naming line and field; blank lines are none."""
    requests: list[TraceRequest] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_request(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("trace", str(path), f"a readable text file ({error})") from error
    if not requests:
        raise ConfigError("trace", str(path), "a file with at least one request")
    return requests


def _request(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, line.strip()[:80], f"a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(where, line.strip()[:80], "a JSON object")
    blocks = fields.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ConfigError(f"{where}: hash_ids", _short(blocks), "a list of integers")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise ConfigError(f"{where}: timestamp", _short(timestamp), "a number of milliseconds")
    priority = fields.get("priority", 0)
    if type(priority) is not int:
        raise ConfigError(f"{where}: priority", _short(priority), "an integer")
    tokens = _tokens(fields, "input_length", 1, where)
    due = -(-tokens // BLOCK_TOKENS)
    if len(blocks) != due:
        raise ConfigError(f"{where}: hash_ids", f"{len(blocks)} blocks", f"{due}: one for each {BLOCK_TOKENS} tokens")
    return TraceRequest(timestamp, tokens, _tokens(fields, "output_length", 0, where), tuple(blocks), priority)


def _tokens(fields: dict[str, Any], name: str, least: int, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise ConfigError(f"{where}: {name}", _short(value), f"an integer of at least {least}")
    return value


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else f"{text[:80]}…"


class PageNames:
    """Names for the pages of one trace, by the blocks that they and all before them lie in."""

    def __init__(self, page_tokens: int) -> None:
        """Raises `ConfigError` unless a block is whole pages."""
        if page_tokens < 1 or BLOCK_TOKENS % page_tokens:
            raise ConfigError("page_tokens", page_tokens, f"a divisor of {BLOCK_TOKENS}, the trace's block")
        self._per_block = BLOCK_TOKENS // page_tokens
        self._prefixes: dict[tuple[int, int], int] = {}
        """(number of the prefix before a block, block) to the number of the prefix with it; 0 is the empty one."""

    def of(self, blocks: tuple[int, ...], pages: int) -> PageHashes:
        """Of the first `pages` pages of a prompt."""
        known = self._prefixes
        last, numbers = 0, []
        for block in blocks[: -(-pages // self._per_block)]:
            last = known.setdefault((last, block), len(known) + 1)
            numbers.append(last)
        rows = np.zeros((pages, _WORDS), np.int64)
        rows[:, 0] = np.repeat(np.array(numbers, np.int64), self._per_block)[:pages]
        rows[:, 1] = np.arange(pages) % self._per_block
        return PageHashes(rows.tobytes())
