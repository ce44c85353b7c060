"""What the demo asks for: prompts whose cache hits are known beforehand.

Guarantees: the same for every run with the same number of requests; no prompt shares a page with another unless its
`shares` says so. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdkv.ids import UInt32Array
from pdkv.node.messages import Sampling

CHUNK_TOKENS = 512
OUTPUT_TOKENS = 16
KILLED_OUTPUT_TOKENS = 48
FAULT_PROMPT_TOKENS = 700

# fmt: off
_WORDS = (
    "page", "slot", "token", "prefill", "decode", "chunk", "lease", "radix", "index", "latent", "scale", "rope",
    "row", "layer", "full", "shared", "hash", "digest", "seal", "read", "pool", "tree", "evict", "lock", "bump",
    "row", "commit", "verify", "admit", "draft", "accept", "reject", "wire", "lane", "rail", "agent", "peer", "node",
    "rank",
)
# fmt: on


class Kind(StrEnum):
    COLD = "cold"
    SHARED = "shared prefix"
    TOGETHER = "four at a time"
    KILLED = "prefill killed"


@dataclass(frozen=True, slots=True)
class Ask:
    name: str
    kind: Kind
    tokens: UInt32Array
    sampling: Sampling
    hit_pages: int = 0
    """What decode's tree must give: whole pages shared with an earlier prompt."""


def make_asks(requests: int, page_tokens: int) -> list[Ask]:
    """`requests` asks of three kinds, at least one cold, one shared and four together; then the killed one."""
    together = 4 * max(1, requests // 8)
    shared = max(1, (requests - together) // 2)
    cold = max(1, requests - together - shared)
    asks: list[Ask] = []
    for i in range(cold):
        # from 1,000 to 4,000 tokens; one of them ends on a page edge, so has no tail page
        length = 1000 + 3000 * i // max(cold - 1, 1) if cold > 1 else 2500
        length = length // page_tokens * page_tokens if i == 1 else length
        asks.append(Ask(f"cold-{i}", Kind.COLD, text_tokens(i, length), _sampling(i)))
    for i in range(shared):
        base = asks[i % cold].tokens
        pages = len(base) * 3 // 4 // page_tokens
        own = text_tokens(1000 + i, 300 + 37 * i)
        tokens = np.concatenate((base[: pages * page_tokens], own)).astype(np.uint32)
        asks.append(Ask(f"shared-{i}", Kind.SHARED, tokens, _sampling(i + 1), pages))
    for i in range(together):
        asks.append(Ask(f"four-{i}", Kind.TOGETHER, text_tokens(2000 + i, 1000 + 150 * (i % 4)), _sampling(i)))
    killed = Sampling(max_tokens=KILLED_OUTPUT_TOKENS)
    asks.append(Ask("killed-0", Kind.KILLED, text_tokens(3000, 1500), killed))
    return asks


def fault_tokens(number: int, length: int = FAULT_PROMPT_TOKENS) -> UInt32Array:
    """A prompt that no other ask shares a page with."""
    return text_tokens(4000 + number, length)


def text_tokens(seed: int, length: int) -> UInt32Array:
    """`length` bytes of words, as byte-level tokens; prompts of different seeds differ from their first word on."""
    words = np.random.default_rng(seed).choice(_WORDS, size=length // 3 + 1)
    text = f"{seed}: " + " ".join(words.tolist())
    return np.frombuffer(text.encode()[:length].ljust(length, b"."), np.uint8).astype(np.uint32)


def _sampling(i: int) -> Sampling:
    """Greedy and seeded in turn: both must be the same on two nodes."""
    if i % 2 == 0:
        return Sampling(max_tokens=OUTPUT_TOKENS)
    return Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.8, top_p=0.95, seed=i)
