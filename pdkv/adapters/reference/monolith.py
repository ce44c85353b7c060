"""One process that prefills and decodes in its own pool: what a prefill and a decode node together must equal.

Guarantees: the same chunks, in the same order, over the same kind of pool and tree as the two nodes use, so that not
only tokens but logits can be compared bit by bit; nothing is transferred.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdkv.contract import Contract
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.manager import CacheManager, Reservation
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.answer import Answer
from pdkv.node.messages import DraftHandoff, Namespace, Sampling, Speculation, Token
from pdkv.node.ports import Drafter, Engine, Logits
from pdkv.node.prompt import Prompt, answer_hashes, plan_prompt
from pdkv.node.sampling import logits_digest, sample
from pdkv.node.speculation import Decoder, drafted_chunk


@dataclass(frozen=True, slots=True)
class MonolithAnswer:
    """`logits_digests[i]` is of the logits that `tokens[i]` was drawn from."""

    tokens: tuple[int, ...]
    logits_digests: tuple[int, ...]
    chunk_starts: tuple[int, ...]
    pages_hit: int
    draft_digests: tuple[tuple[int, ...], ...] = ()
    """As `Token.draft_digests` of each token."""
    speculation: Speculation | None = None


class Monolith:
    """A model, its pool and its tree. One request at a time."""

    def __init__(
        self, engine: Engine, pool: SlotPool, contract: Contract, chunk_tokens: int, drafter: Drafter | None = None
    ) -> None:
        """With a `drafter` it speculates as a decode node does."""
        self._engine = engine
        self._pool = pool
        self._drafter = drafter
        self._contract = contract
        self._chunk_tokens = chunk_tokens
        self._manager = CacheManager(pool)
        self._verifier = Verifier(pool)
        self.caches_answers = False
        """Put the full pages of an answer into the tree too, as a decode node does."""

    def generate(self, tokens: UInt32Array, sampling: Sampling) -> MonolithAnswer:
        """Raises as the engine and the manager do."""
        prompt = plan_prompt(tokens, Namespace(), self._contract)
        slots = len(tokens) + sampling.max_tokens + self._contract.draft_tokens
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
            draft: DraftHandoff | None = None
            for start in starts:
                span = slice(start, min(start + self._chunk_tokens, len(tokens)))
                logits, draft = self._chunk(tokens, span, pages, sampling)
            full = pages[hit : prompt.recorded_pages]
            hashes = prompt.hashes.part(hit, prompt.recorded_pages)
            self._manager.commit(self._verifier.seal(reservation.id, hit, full, hashes))
            drawn = sample(logits, sampling, len(tokens))
            said = [Token(0, drawn.token, drawn.logprob, logits_digest(logits))]
            answer = Answer(said[0], len(tokens), sampling, pages=pages, want_logits=True)
            decoder = Decoder(self._engine, self._drafter, self._pool, self._contract.draft_tokens, draft)
            while not answer.over:
                said += decoder.step(answer)
            if self.caches_answers:
                self._cache_answer(prompt, reservation, np.array([token.token for token in said], np.uint32))
            return MonolithAnswer(
                tokens=tuple(token.token for token in said),
                logits_digests=tuple(token.logits_digest for token in said),
                chunk_starts=starts,
                pages_hit=hit,
                draft_digests=tuple(token.draft_digests for token in said),
                speculation=decoder.report(answer.made),
            )
        finally:
            self._manager.end(reservation)

    def _cache_answer(self, prompt: Prompt, reservation: Reservation, said: UInt32Array) -> None:
        hashes, first = answer_hashes(prompt, said, self._contract), prompt.recorded_pages
        if len(hashes):
            self._manager.extend(reservation, hashes)
            pages = reservation.sequence[first : first + len(hashes)]
            self._manager.commit(self._verifier.seal(reservation.id, first, pages, hashes))

    def _chunk(
        self, tokens: UInt32Array, span: slice, pages: LocalPages, sampling: Sampling
    ) -> tuple[Logits, DraftHandoff | None]:
        if self._drafter is None or not self._contract.draft_layers:
            return self._engine.forward(tokens[span], span.start, pages), None
        return drafted_chunk(
            self._engine, self._drafter, tokens, span, pages, lambda row: sample(row, sampling, len(tokens)).token
        )
