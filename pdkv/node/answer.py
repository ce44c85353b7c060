"""The tokens of one request, said one after another, and the plain way to get the next one.

Guarantees: a token is drawn from the logits of the position before its own, and by that position, however many logits
come at a time; nothing is said after a stop token or past `max_tokens`.
"""

from __future__ import annotations

import numpy as np

from pdkv.ids import LocalPages
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


def plain_step(engine: Engine, answer: Answer) -> list[Token]:
    """One token, from one step of the engine."""
    return [answer.draw(engine.forward(np.array([answer.last], np.uint32), answer.place, answer.pages))]
