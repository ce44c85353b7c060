"""What a soak asks for: prompts that share prefixes, under every failure policy.

Guarantees: drawn from the seed alone; a limited number of different prompts, so that each is compared with an answer
that one process computes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from pdkv.cli.demo.asks import text_tokens
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import FailurePolicy, GenerateRequest, Sampling

CHUNK_TOKENS = 64
"""A page a chunk: then a page's bytes are the same, bit for bit, whatever was found in the cache before it."""
ROOTS = 6
BRANCHES = 4
ABORTED_SHARE = 0.08
REMAINING_S = 30.0


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: UInt32Array
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SoakAsk:
    prompt: int
    """Which of `prompts`."""
    request: GenerateRequest
    abort_after: int | None
    """Tokens after which the client goes away."""


def prompts(seed: int) -> tuple[Prompt, ...]:
    """Roots of 1 to 6 pages; each has branches that leave it at different tokens."""
    rng = Random(f"{seed} prompts")
    found = []
    for root in range(ROOTS):
        stem = text_tokens(10_000 + 100 * seed + root, rng.randint(64, 400))
        for branch in range(BRANCHES):
            own = text_tokens(500_000 + 100 * seed + BRANCHES * root + branch, rng.randint(20, 500))
            cut = rng.randint(len(stem) // 2, len(stem))
            greedy = rng.random() < 0.5
            sampling = Sampling(rng.randint(2, 40), 0.0 if greedy else 0.8, 1.0 if greedy else 0.95, seed=branch)
            found.append(Prompt(np.concatenate((stem[:cut], own)).astype(np.uint32), sampling))
    return tuple(found)


class Traffic:
    """Asks, one after another, for ever."""

    def __init__(self, seed: int) -> None:
        self.prompts = prompts(seed)
        self._rng = Random(f"{seed} traffic")
        self._made = 0

    def next(self) -> SoakAsk:
        rng = self._rng
        request = self._request(number := rng.randrange(len(self.prompts)), rng.choice(list(FailurePolicy)))
        return SoakAsk(number, request, rng.randint(0, 3) if rng.random() < ABORTED_SHARE else None)

    def probe(self) -> SoakAsk:
        """The one that takes least, by whichever prefill node there is."""
        number = min(range(len(self.prompts)), key=self._work)
        return SoakAsk(number, self._request(number, FailurePolicy.RETRY), None)

    def _request(self, number: int, on_failure: FailurePolicy) -> GenerateRequest:
        prompt = self.prompts[number]
        self._made += 1
        return GenerateRequest(
            request_id=RequestId(f"soak-{self._made}"),
            tokens=prompt.tokens,
            sampling=prompt.sampling,
            remaining_s=REMAINING_S,
            want_logits=True,
            priority=self._rng.randint(0, 2),
            on_failure=on_failure,
        )

    def _work(self, number: int) -> int:
        """Steps of an answer: chunks of its prompt, and tokens."""
        prompt = self.prompts[number]
        return len(prompt.tokens) // CHUNK_TOKENS + prompt.sampling.max_tokens
