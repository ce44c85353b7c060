"""One process that prefills and decodes in its own pool: what a prefill and a decode node together must equal.

Guarantees: the same chunks, in the same order, over the same kind of pool and tree as the two nodes use, so that not
only tokens but logits can be compared bit by bit; nothing is transferred.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdkv.contract import Contract
from pdkv.ids import UInt32Array
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.messages import Namespace, Sampling
from pdkv.node.ports import Engine
from pdkv.node.prompt import plan_prompt
from pdkv.node.sampling import logits_digest, sample


@dataclass(frozen=True, slots=True)
class MonolithAnswer:
    """`logits_digests[i]` is of the logits that `tokens[i]` was drawn from."""

    tokens: tuple[int, ...]
    logits_digests: tuple[int, ...]
    chunk_starts: tuple[int, ...]
    pages_hit: int


class Monolith:
    """A model, its pool and its tree. One request at a time."""

    def __init__(self, engine: Engine, pool: SlotPool, contract: Contract, chunk_tokens: int) -> None:
        self._engine = engine
        self._contract = contract
        self._chunk_tokens = chunk_tokens
        self._manager = CacheManager(pool)
        self._verifier = Verifier(pool)

    def generate(self, tokens: UInt32Array, sampling: Sampling) -> MonolithAnswer:
        """Raises as the engine and the manager do."""
        prompt = plan_prompt(tokens, Namespace(), self._contract)
        slots = len(tokens) + sampling.max_tokens
        reservation = self._manager.reserve(
            prompt.hashes,
            -(-slots // prompt.page_tokens),
            max_hit_pages=prompt.prefill_hit_pages,
            drop_pages=prompt.drop_pages,
        )
        try:
            hit = len(reservation.hit)
            starts = tuple(range(hit * prompt.page_tokens, len(tokens), self._chunk_tokens))
            pages = reservation.sequence
            for start in starts:
                logits = self._engine.forward(tokens[start : start + self._chunk_tokens], start, pages)
            full = pages[hit : prompt.recorded_pages]
            hashes = prompt.hashes.part(hit, prompt.recorded_pages)
            self._manager.commit(self._verifier.seal(reservation.id, hit, full, hashes))
            drawn, digests = [sample(logits, sampling, len(tokens)).token], [logits_digest(logits)]
            for position in range(len(tokens), len(tokens) + sampling.max_tokens - 1):
                if drawn[-1] in sampling.stop_tokens:
                    break
                logits = self._engine.forward(np.array(drawn[-1:], np.uint32), position, pages)
                drawn.append(sample(logits, sampling, position + 1).token)
                digests.append(logits_digest(logits))
            return MonolithAnswer(tuple(drawn), tuple(digests), starts, hit)
        finally:
            self._manager.end(reservation)
