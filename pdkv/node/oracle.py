"""A drafter for tests and the demo, with an acceptance that can be chosen. It saves no work: it does it twice.

Guarantees: each draft is, with probability `acceptance` drawn from (seed, place), the token that the model will say,
and else another one; the same in every run. It knows nothing that the node doesn't: it asks the engine beforehand.
"""

from __future__ import annotations

import numpy as np

from pdkv.errors import BoundsError
from pdkv.ids import LocalPages, UInt32Array
from pdkv.node.messages import Float32Array
from pdkv.node.ports import DraftAsk, Drafts, Engine
from pdkv.node.sampling import sample


class Oracle:
    """`node.ports.Drafter` by looking ahead with the engine itself."""

    hidden_width = 0

    def __init__(self, engine: Engine, vocab_size: int, *, acceptance: float, seed: int = 0) -> None:
        """Raises `BoundsError` unless `acceptance` is a probability and the vocabulary has a wrong token."""
        if not 0 <= acceptance <= 1:
            raise BoundsError("oracle acceptance", acceptance, "0 to 1")
        if vocab_size < 2:
            raise BoundsError("vocabulary of an oracle", vocab_size, "at least 2")
        self._engine = engine
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._seed = seed

    def extend(self, hidden: Float32Array, after: UInt32Array, start: int, pages: LocalPages) -> None:
        """Keeps nothing."""

    def propose(self, ask: DraftAsk, pages: LocalPages) -> Drafts:
        """The true tokens up to the first that is made wrong on purpose; what follows that one is never looked at."""
        drafts: list[int] = []
        token = ask.token
        for place in range(ask.place, ask.place + ask.count):
            logits = self._engine.forward(np.array([token], np.uint32), place, pages)
            token = sample(logits, ask.sampling, place + 1).token
            if not self._right(place + 1):
                token = (token + 1) % self._vocab_size
                drafts += [token] * (ask.count - len(drafts))
                break
            drafts.append(token)
        return Drafts(np.array(drafts, np.uint32))

    def _right(self, place: int) -> bool:
        key = np.array([self._seed % 2**64, place], np.uint64)
        return bool(np.random.Generator(np.random.Philox(key=key)).random() < self._acceptance)
