"""How much a prefill node still has to compute.

Guarantees: a prompt counts from when it is taken on, less what of it is computed, until its request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Backlog:
    """Of one node; used in its loop."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of all prompts together."""

    @contextmanager
    def taken_on(self, tokens: int) -> Iterator[Callable[[int], None]]:
        """For as long as the request runs that needs so many `tokens` computed; call what it yields with those that
        were."""
        left = tokens
        self.tokens += left

        def computed(count: int) -> None:
            nonlocal left
            done = min(count, left)
            left -= done
            self.tokens -= done

        try:
            yield computed
        finally:
            self.tokens -= left
