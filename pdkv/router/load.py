"""How busy a node is, as its router knows it.

Guarantees: what counts is what the node said last or what this router has given it and knows to be unfinished,
whichever is worse. So nothing is counted twice, a request counts from the moment at which it was given and not when the
node comes to tell of it, and what other routers give is seen as soon as the node says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

TRUST_STEP = 0.25
"""How much one request changes what is expected of the next: four that find nothing leave a third of it."""


class Said(Protocol):
    """An estimate or a status."""

    @property
    def waiting_tokens(self) -> int: ...
    @property
    def available_pages(self) -> int: ...


@dataclass(slots=True, eq=False)
class Given:
    """One request's share of its nodes, while it runs there."""

    tokens: int
    """Of its prompt, that a prefill node still has to compute for it."""
    pages: int
    """Of a decode node's pool."""


@dataclass(slots=True, eq=False)
class Load:
    """Of one node."""

    said_tokens: int = 0
    said_pages: int = 0
    total_pages: int = 0
    """Of its pool; 0: it hasn't said yet."""
    requests: int = 0
    """Of this router, that run there."""
    given_tokens: int = 0
    given_pages: int = 0
    trust: float = 1.0
    """Of the tokens that it says it has cached, the part that requests found there of late."""

    @property
    def waiting_tokens(self) -> int:
        """To be computed before a new request's."""
        return max(self.said_tokens, self.given_tokens)

    @property
    def available_pages(self) -> int:
        """Cached pages that requests use are no obstacle, so those that were given are a bound of their own."""
        return max(min(self.said_pages, self.total_pages - self.given_pages), 0)

    def said(self, by: Said) -> None:
        self.said_tokens, self.said_pages = by.waiting_tokens, by.available_pages

    def found(self, promised: int, found: int) -> None:
        """A request that was promised so many cached tokens found so many."""
        if promised > 0:
            self.trust += TRUST_STEP * (min(found / promised, 1.0) - self.trust)

    def born(self) -> None:
        """It is in a new life: nobody has lied in it yet."""
        self.trust = 1.0


@contextmanager
def given(request: Given, prefill: Load, decode: Load) -> Iterator[Given]:
    """Counts on both for as long as the request runs there; `computed` ends its share of the prefill node."""
    prefill.requests += 1
    decode.requests += 1
    prefill.given_tokens += request.tokens
    decode.given_pages += request.pages
    try:
        yield request
    finally:
        computed(request, prefill)
        decode.given_pages -= request.pages
        decode.requests -= 1
        prefill.requests -= 1


def computed(request: Given, prefill: Load) -> None:
    """Idempotent."""
    prefill.given_tokens -= request.tokens
    request.tokens = 0
