"""How much a prefill node still has to compute.

Guarantees: a prompt counts from when its request comes, while it waits for pages too, until the request has ended: with
what is expected to be computed of it, from when that is known with what really is, less what has been.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Backlog:
    """Of one node; used in its loop."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of all prompts together."""

    @contextmanager
    def taken_on(self, tokens: int) -> Iterator[Share]:
        """For as long as the request runs that is expected to need so many `tokens` computed."""
        share = Share(self)
        share.left(tokens)
        try:
            yield share
        finally:
            share.left(0)


class Share:
    """One request's."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._left = 0

    def left(self, tokens: int) -> None:
        """So many are to be computed yet."""
        self._backlog.tokens += tokens - self._left
        self._left = tokens

    def computed(self, tokens: int) -> None:
        """So many more were."""
        self.left(max(self._left - tokens, 0))
