"""Speculative decoding: drafts are written, verified in one step, and taken back from the first wrong one on.

Guarantees: the tokens are those of plain decoding, greedy or sampled, since a draft is accepted only if it is the token
that the model's own logits give at that place, and those logits are plain decoding's bit for bit (`Engine.verify`);
after a step no slot past the last accepted token holds anything, in either cache or any layer; no step drafts more
than it was allowed, or computes a position that plain decoding would not have reached.

Pages past the accepted length stay reserved for the request: it asked for them with its headroom, and the next step
writes to them again. They are private and unsealed, so no peer and no other request can read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.answer import Answer, plain_step
from pdkv.node.messages import DraftHandoff, Speculation, Token
from pdkv.node.ports import DraftAsk, Drafter, Drafts, Engine, Logits

CANARY_TOKENS = 128
"""A short answer says nothing about a mean length."""
CANARY_LENGTH = 1.4
CANARY_RATE = 0.96
CANARY_DRAFTS = 25
"""With fewer drafts a rate above `CANARY_RATE` only says that none was wrong yet."""
NO_DRAFTS = Drafts(np.empty(0, np.uint32))


class Decoder:
    """One request's way from token to token: a step says one, or with a `drafter` one or more."""

    def __init__(
        self, engine: Engine, drafter: Drafter | None, pool: SlotPool, draft_tokens: int, draft: DraftHandoff | None
    ) -> None:
        """Drafts at most `draft_tokens` a step, beginning from what prefill handed over."""
        self._engine = engine
        self._drafter = drafter
        self._pool = pool
        self._draft_tokens = draft_tokens
        self._draft = draft
        self._count = Speculation()

    def step(self, answer: Answer) -> list[Token]:
        """The next tokens. Runs in the engine's thread; raises as the engine and `sample` do."""
        if self._drafter is None:
            return plain_step(self._engine, answer)
        return self._speculate(self._drafter, answer)

    def report(self, made: int) -> Speculation | None:
        """What became of the drafts, after `made` tokens. None without a drafter."""
        return replace(self._count, canary=canary(self._count, made)) if self._drafter else None

    def _speculate(self, drafter: Drafter, answer: Answer) -> list[Token]:
        """Draft, verify, say what holds, take back the rest."""
        place = answer.place
        drafts = self._drafts(drafter, answer)
        tokens = np.concatenate((np.array([answer.last], np.uint32), drafts.tokens))
        computed = self._engine.verify(tokens, place, answer.pages)
        said: list[Token] = []
        accepted = 0
        for at, row in enumerate(computed.logits):
            said.append(answer.draw(row))
            agreed = at < len(drafts.tokens) and said[-1].token == int(drafts.tokens[at])
            accepted += agreed
            if answer.over or not agreed:
                break
        written = place + len(tokens)
        roll_back(self._pool, answer.pages, answer.place, written)
        # After the last token too: with their draft rows the answer's pages are whole, and can be cached.
        after = np.array([token.token for token in said], np.uint32)
        self._draft = drafter.extend(computed.hidden[: len(said)], after, place, answer.pages)
        self._add(len(drafts.tokens), accepted, rolled_back=written - answer.place)
        if answer.want_logits:
            said[0] = replace(said[0], draft_digests=drafts.logits_digests)
        return said

    def _drafts(self, drafter: Drafter, answer: Answer) -> Drafts:
        # a step says one token more than it accepts
        count = min(self._draft_tokens, answer.left - 1)
        if count < 1:
            return NO_DRAFTS
        ask = DraftAsk(answer.last, answer.place, count, answer.sampling, self._draft)
        return drafter.propose(ask, answer.pages)

    def _add(self, drafted: int, accepted: int, *, rolled_back: int) -> None:
        so_far = self._count
        self._count = Speculation(
            steps=so_far.steps + (drafted > 0),
            drafted=so_far.drafted + drafted,
            accepted=so_far.accepted + accepted,
            rolled_back_tokens=so_far.rolled_back_tokens + rolled_back,
        )


def roll_back(pool: SlotPool, pages: LocalPages, length: int, written: int) -> None:
    """Cut a sequence that was written up to `written` down to `length` tokens: in every page that was touched, the
    slots from there on are zeroed, in both caches and all layers, draft layers too. The pages stay where they are.
    """
    if written <= length:
        return
    size = pool.fmt.page_tokens
    for index in range(length // size, -(-written // size)):
        pool.zero_tail(int(pages.array[index]), max(length - index * size, 0))


def drafted_chunk(
    engine: Engine,
    drafter: Drafter,
    tokens: UInt32Array,
    span: slice,
    pages: LocalPages,
    first: Callable[[Logits], int],
) -> tuple[Logits, DraftHandoff | None]:
    """One chunk of a prompt, the rows of the draft layer with it: float32 [vocab] logits of its last position, and
    the draft head's state after it.

    A draft row needs the token after it. Within the prompt that is known; after the prompt's last token comes the one
    that `first` draws from the logits.
    """
    computed = engine.chunk(tokens[span], span.start, pages)
    after = tokens[span.start + 1 : span.stop + 1]
    if span.stop >= len(tokens):
        after = np.append(after, np.uint32(first(computed.logits[-1])))
    return computed.logits[-1], drafter.extend(computed.hidden, after, span.start, pages)


def canary(count: Speculation, made: int) -> str:
    """Names the range that a draft head's acceptance should not be in, once there is enough of it to tell.

    Hardly anything accepted is what lost draft state looks like; nearly everything is what a draft that was verified
    against itself looks like.
    """
    length, rate = count.mean_accepted_length, count.acceptance_rate
    if count.steps and made >= CANARY_TOKENS and length < CANARY_LENGTH:
        return f"mean accepted length {_below(length)} after {made} tokens, below {CANARY_LENGTH}"
    if count.drafted >= CANARY_DRAFTS and rate > CANARY_RATE:
        return f"{count.accepted} of {count.drafted} drafts accepted, a rate above {CANARY_RATE}"
    return ""


def _below(value: float) -> str:
    """Two decimals, rounded down: 1.399 is not "1.40"."""
    return f"{math.floor(value * 100) / 100:.2f}"
