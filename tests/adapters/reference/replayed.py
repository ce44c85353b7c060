"""What a prefill and a decode node compute, again, in two pools of one process and one request after another.

Guarantees: every page that a node hit is the one that the request computed which the node had it from, and every chunk
begins where the node's began; so logits and draft logits must be the node's bit for bit. Nothing is transferred,
evicted, verified or freed: there is no tree, only the first page that was made for a hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.cli.assemble import drafter_of
from pdkv.config import NodeConfig
from pdkv.contract import Contract
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.answer import Answer
from pdkv.node.messages import DraftHandoff, Namespace, Sampling, Token
from pdkv.node.ports import Logits
from pdkv.node.prompt import Prompt, answer_hashes, plan_prompt
from pdkv.node.sampling import logits_digest, sample
from pdkv.node.speculation import Decoder, drafted_chunk

PAGES = 200


@dataclass
class Side:
    """One node: its pool, its engine, and the pages that its tree would have."""

    config: NodeConfig
    contract: Contract
    model: LoadedModel
    cached: dict[bytes, int] = field(default_factory=dict)
    used: int = 1

    def __post_init__(self) -> None:
        self.pool = SlotPool.create(page_format(self.model.shape), PAGES)
        self.engine = ReferenceEngine(self.model, self.pool)
        self.drafter = drafter_of(self.config, self.contract, self.model, self.engine)

    def sequence(self, prompt: Prompt, hit: int, pages: int) -> LocalPages:
        """The first `hit` pages as they stand for their hashes, and new ones."""
        found = [self.cached[prompt.hashes.at(i)] for i in range(hit)]
        new = range(self.used, self.used + pages - hit)
        self.used = new.stop
        return LocalPages.checked([*found, *new], PAGES)


class Replayed:
    """Both nodes."""

    def __init__(self, config: NodeConfig, contract: Contract, model: LoadedModel) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)  # as the nodes do: another number rounds otherwise
        self._contract = contract
        self._prefill = Side(config, contract, model)
        self._decode = Side(config, contract, model)

    def answer(
        self, tokens: UInt32Array, sampling: Sampling, chunk_starts: tuple[int, ...], pages_hit: int
    ) -> list[Token]:
        """The request's tokens, with their digests, given where prefill's chunks began and what decode hit."""
        prompt = plan_prompt(tokens, Namespace(), self._contract)
        first, draft, sent = self._computed(prompt, sampling, chunk_starts)
        decode, size, hit = self._decode, prompt.page_tokens, pages_hit
        slots = len(tokens) + sampling.max_tokens + self._contract.draft_tokens
        pages = decode.sequence(prompt, hit, -(-slots // size))
        _copy(self._prefill.pool, sent[hit:], decode.pool, pages[hit : len(sent)])
        answer = Answer(first, len(tokens), sampling, pages=pages, want_logits=True)
        decoder = Decoder(decode.engine, decode.drafter, decode.pool, self._contract.draft_tokens, draft)
        said = [first]
        while not answer.over:
            said += decoder.step(answer)
        further = answer_hashes(prompt, np.array([t.token for t in said], np.uint32), self._contract)
        every = [*map(prompt.hashes.at, range(len(prompt.hashes))), *map(further.at, range(len(further)))]
        for hash_, page in zip(every, pages[: len(every)], strict=True):
            decode.cached.setdefault(hash_, page)
        return said

    def _computed(
        self, prompt: Prompt, sampling: Sampling, chunk_starts: tuple[int, ...]
    ) -> tuple[Token, DraftHandoff | None, LocalPages]:
        """The first token, the hand-off, and the pages that prefill announces."""
        side, hit = self._prefill, chunk_starts[0] // prompt.page_tokens
        pages = side.sequence(prompt, hit, prompt.pages)
        draft: DraftHandoff | None = None
        for start, stop in pairwise((*chunk_starts, len(prompt.tokens))):
            logits, draft = self._chunk(prompt.tokens, slice(start, stop), pages, sampling)
        if prompt.tail_tokens % prompt.page_tokens:
            side.pool.zero_tail(int(pages.array[-1]), prompt.tail_tokens)
        standing = pages.array.copy()
        for i in range(prompt.recorded_pages):
            standing[i] = side.cached.setdefault(prompt.hashes.at(i), int(standing[i]))
        drawn = sample(logits, sampling, len(prompt.tokens))
        first = Token(0, drawn.token, drawn.logprob, logits_digest(logits))
        return first, draft, LocalPages.checked(standing, PAGES)

    def _chunk(
        self, tokens: UInt32Array, span: slice, pages: LocalPages, sampling: Sampling
    ) -> tuple[Logits, DraftHandoff | None]:
        side = self._prefill
        if side.drafter is None or not self._contract.draft_layers:
            return side.engine.forward(tokens[span], span.start, pages), None
        return drafted_chunk(
            side.engine, side.drafter, tokens, span, pages, lambda row: sample(row, sampling, len(tokens)).token
        )


def _copy(source: SlotPool, pages: LocalPages, target: SlotPool, to: LocalPages) -> None:
    for mine, theirs in zip(pages, to, strict=True):
        for group in Group:
            for a, b in zip(source.group_bytes(mine, group), target.group_bytes(theirs, group), strict=True):
                b[:] = a
