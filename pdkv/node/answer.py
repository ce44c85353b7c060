"""The tokens of one request, said one after another, and the plain way to get the next one.

Guarantees: a token is drawn from the logits of the position before its own, and by that position, however many logits
come at a time; nothing is said after a stop token or past `max_tokens`, or once whoever asked has enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from pdkv.errors import BoundsError, UnknownRequest
from pdkv.ids import LocalPages, RequestId
from pdkv.node.messages import Sampling, Token
from pdkv.node.ports import Engine, Logits
from pdkv.node.sampling import logits_digest, sample


class Answer:
    """How far a request's answer is: `last` is its latest token, at `place` of the sequence, its rows not computed."""

    def __init__(self, first: Token, place: int, sampling: Sampling, *, pages: LocalPages, want_logits: bool) -> None:
        self.last = first.token
        self.place = place
        self.made = 1
        self.sampling = sampling
        self.pages = pages
        self.want_logits = want_logits

    @property
    def stopped(self) -> bool:
        return self.last in self.sampling.stop_tokens

    @property
    def over(self) -> bool:
        return self.stopped or self.left == 0

    @property
    def left(self) -> int:
        """Tokens that may follow."""
        return max(self.sampling.max_tokens - self.made, 0)

    @property
    def reason(self) -> str:
        """Why it is over."""
        return "stop" if self.stopped else "length"

    def draw(self, logits: Logits) -> Token:
        """The next token, from float32 [vocab] logits at `place`. Raises as `sample`."""
        drawn = sample(logits, self.sampling, self.place + 1)
        said = Token(self.made, drawn.token, drawn.logprob, logits_digest(logits) if self.want_logits else 0)
        self.last = drawn.token
        self.place += 1
        self.made += 1
        return said


class Enough:
    """Of one request: whoever asked may have all that it wants of the answer before this comes to its end by itself.
    Runs on one event loop."""

    def __init__(self, request: RequestId) -> None:
        self.tokens: int | None = None
        """Of the answer that count, once it was said; no token is said after that."""
        self.told = 0
        """Tokens of the answer that were said."""
        self.over = False
        """The answer has its end: it is too late to say anything."""
        self._request = request
        self._waits: asyncio.Timeout | None = None

    def say(self, tokens: int) -> None:
        """That the first `tokens` of the answer are all that counts. Raises `UnknownRequest`, `BoundsError`."""
        if self.over:
            raise UnknownRequest(f"request {self._request} has its answer", request=self._request)
        if not 1 <= tokens <= self.told:
            raise BoundsError("output_tokens", tokens, f"1 to {self.told}, as many as were said of the answer so far")
        first, self.tokens = self.tokens is None, min(tokens, self.tokens or tokens)
        if first and self._waits is not None:  # said again, the wait is ending already
            self._waits.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ends_waiting(self) -> AsyncIterator[None]:
        """What is waited for in the body is for more of the answer: the wait ends, cancelled, if there is enough."""
        self._waits = asyncio.timeout(None)
        try:
            async with self._waits:
                yield
        except TimeoutError:
            if self.tokens is None:
                raise
        finally:
            self._waits = None


def plain_step(engine: Engine, answer: Answer) -> list[Token]:
    """One token, from one step of the engine."""
    return [answer.draw(engine.forward(np.array([answer.last], np.uint32), answer.place, answer.pages))]
