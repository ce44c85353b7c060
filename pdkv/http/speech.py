"""An answer's text, token by token, up to the first stop string.

Guarantees: nothing of a stop string is ever said, however it is cut into tokens, and nothing after it; what can't be
the beginning of one is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.http.tokenizer import Decoder


class Speech:
    def __init__(self, decoder: Decoder, stop: Sequence[str], silent: Sequence[int] = ()) -> None:
        """`silent` are tokens without text: those that stop an answer."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._silent = frozenset(silent)
        self._held = ""
        self.stopped = False
        """A stop string was met."""

    def push(self, token: int) -> str:
        """What can be said after this token."""
        return "" if token in self._silent else self._said(self._decoder.push(token))

    def flush(self) -> str:
        """What is left when no token comes any more."""
        said = self._said(self._decoder.flush())
        if self.stopped:
            return said
        said, self._held = said + self._held, ""
        return said

    def _said(self, more: str) -> str:
        if self.stopped:
            return ""
        text = self._held + more
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
