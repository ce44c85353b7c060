"""What turns a prompt's text into tokens, and tokens into text as they come.

Guarantees: characters are said only once they are whole; what is said together equals what all tokens are decoded to at
once, if that is text; any tokens can be said, and few are held back; a service without a tokenizer refuses text by name
and says none.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pdkv.errors import ConfigError, FieldRefused, MissingDependency
from pdkv.ids import UInt32Array

BYTES = "bytes"
"""Name of the tokenizer of the presets, whose vocabulary is the bytes."""
_BYTE_VALUES = 256
_NO_CHARACTER = "\ufffd"
_MOST_HELD = 8
"""Tokens without a whole character at their end: one has four bytes at most, so these never get whole."""


class Decoder(Protocol):
    """Of one answer."""

    def push(self, token: int) -> str:
        """What can be said now, empty if nothing."""
        ...

    def flush(self) -> str:
        """What is left when the answer has ended."""
        ...


class Tokenizer(Protocol):
    speaks: bool
    """False: it has no text for any token."""
    stop_tokens: tuple[int, ...]
    """Tokens that end an answer, as the model's files say it."""

    def encode(self, text: str) -> UInt32Array:
        """Blocks. Raises `FieldRefused`."""
        ...

    def decoder(self) -> Decoder: ...


def tokenizer_named(name: str) -> Tokenizer:
    """`bytes`, a directory with a tokenizer.json, or none. Raises `ConfigError`, `MissingDependency`."""
    if not name:
        return NoTokenizer()
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))


class NoTokenizer:
    speaks = False
    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> UInt32Array:
        raise FieldRefused(
            "prompt", repr(text[:80]), "a list of token ids: this service has no tokenizer (http_tokenizer)"
        )

    def decoder(self) -> Decoder:
        return _Silence()


class ByteTokenizer:
    speaks = True
    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> UInt32Array:
        # half a surrogate pair, which JSON can write, is no character
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)

    def decoder(self) -> Decoder:
        return _Bytes()


class FileTokenizer:
    """Of a checkpoint's tokenizer.json."""

    speaks = True

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise MissingDependency("tokenizers", "http_tokenizer", extra="http") from error
        path = folder / "tokenizer.json"
        try:
            self._tokenizer: Any = Loaded.from_str(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "http_tokenizer", str(folder), f"bytes, or a directory with tokenizer.json ({error})"
            ) from error
        except Exception as error:
            # tokenizers has no class of its own for a file that it can't read
            raise ConfigError("http_tokenizer", str(path), f"a tokenizer's file ({error})") from error
        self.stop_tokens = _stop_tokens(folder)

    def encode(self, text: str) -> UInt32Array:
        return np.array(self._tokenizer.encode(text.encode("utf-8", "replace").decode()).ids, np.uint32)

    def decoder(self) -> Decoder:
        return _Pieces(self._tokenizer)


class _Silence:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Bytes:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < _BYTE_VALUES:
            return self._decoder.decode(bytes((token,)))
        return self._decoder.decode(b"", True) + _NO_CHARACTER

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Pieces:
    """Tokens have no text by themselves: what they add is what they and the last ones have, less what those have alone.

    Not tokenizers' own stream, which raises where bytes that are no character come before one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []
        self._said = ""
        """The text of those."""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._text([*self._last, *self._held])
        added = text[len(self._said) :]
        if (not added or added.endswith(_NO_CHARACTER)) and len(self._held) < _MOST_HELD:
            return ""
        self._last, self._held = self._held, []
        self._said = self._text(self._last)
        return added

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def flush(self) -> str:
        """What would be the beginning of a character stays unsaid."""
        return ""


def _stop_tokens(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, or else config.json. Raises `ConfigError` for a file that is none."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            said: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
            found = said.get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError("http_tokenizer", str(path), f"a JSON object ({error})") from error
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and all(isinstance(token, int) for token in found):
            return tuple(found)
    return ()
