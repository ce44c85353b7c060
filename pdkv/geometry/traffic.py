"""What moves, is read or is computed for a context, and what a prefix hit saves of it.

Guarantees: bytes and pairs are exact integers, for all index layers together unless a name says "layer"; a hit saves
the scores among the tokens it covers and nothing of those between them and the rest. Checked against
`tests/golden/ledger.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.geometry.byte_ledger import GroupBytes, require_not_negative, require_positive


@dataclass(frozen=True, slots=True)
class HitSaving:
    """A hit of P in a prompt of L tokens. Pairs are one full layer's query-key pairs, halves left out on both sides."""

    tokens: int
    """P, in whole pages."""
    pages: int
    bytes: GroupBytes
    """Not computed, and not shipped to a node that has them."""
    scores_share: float
    """P^2 / L^2: the share of index scores that is saved."""
    tokens_share: float
    """P / L: the share that is saved of what grows with tokens alone, such as the experts."""
    saved_pairs: int
    """P^2 / 2."""
    cross_pairs: int
    """(L - P) * P: not saved, every new token scores the whole prefix."""
    rest_pairs: int
    """(L - P)^2 / 2: not saved."""
    index_read_bytes: int
    """Index-K that the prefill of the rest reads."""
    index_read_without_bytes: int
    """Index-K that the prefill without a hit reads."""


def link_seconds(count_bytes: int, gbit_per_s: float) -> float:
    """Seconds on a link of `gbit_per_s` * 10^9 bits a second. Raises `ConfigError` for a rate that no link can have."""
    if not 1e-6 <= gbit_per_s < math.inf:
        raise ConfigError("gbps", gbit_per_s, "a rate in Gbit/s, at least 0.000001")
    return count_bytes * 8 / (gbit_per_s * 1e9)


def index_reads(context_tokens: int, chunk_tokens: int, index_token_bytes: int, *, prefix_tokens: int = 0) -> int:
    """Index-K bytes read by a prefill in chunks: each chunk scores all tokens up to and with its own.

    A prefix hit starts the first chunk at `prefix_tokens`; its tokens are read all the same, by every chunk.
    """
    require_positive(chunk_tokens=chunk_tokens)
    require_not_negative(prefix_tokens=prefix_tokens, context_tokens=context_tokens - prefix_tokens)
    whole, rest = divmod(context_tokens - prefix_tokens, chunk_tokens)
    scored = whole * prefix_tokens + chunk_tokens * whole * (whole + 1) // 2 + (context_tokens if rest else 0)
    return scored * index_token_bytes


def scores_saved(prefix_tokens: int, context_tokens: int) -> float:
    """Share of all index scores that a prefix hit saves: P^2 / L^2. The cross term (L - P) * P stays."""
    require_positive(context_tokens=context_tokens)
    return prefix_tokens * prefix_tokens / (context_tokens * context_tokens)


def score_flops(index_heads: int, index_head_dim: int) -> int:
    """Operations for one query-key pair of one full layer: a multiply and an add a head element.

    A model's are this times its full layers (21 in GLM-5.3).
    """
    return 2 * index_heads * index_head_dim


def hit_saving(
    hit_tokens: int, context_tokens: int, *, page: GroupBytes, page_tokens: int, read_bytes: int, chunk_tokens: int
) -> HitSaving:
    """What a hit saves; only whole pages of it count. `page` bytes travel, the indexer reads `read_bytes` a page.

    Raises `ConfigError` for a hit longer than the context.
    """
    require_positive(context_tokens=context_tokens, page_tokens=page_tokens)
    if not 0 <= hit_tokens <= context_tokens:
        raise ConfigError("hit", hit_tokens, f"0 to {context_tokens}, the tokens of the context")
    pages = hit_tokens // page_tokens
    hit, rest = pages * page_tokens, context_tokens - pages * page_tokens
    # in tokens first: a pooled index has no whole bytes a token
    read = index_reads(context_tokens, chunk_tokens, 1, prefix_tokens=hit)
    read_without = index_reads(context_tokens, chunk_tokens, 1)
    return HitSaving(
        tokens=hit,
        pages=pages,
        bytes=page.times(pages),
        scores_share=scores_saved(hit, context_tokens),
        tokens_share=hit / context_tokens,
        saved_pairs=hit * hit // 2,
        cross_pairs=rest * hit,
        rest_pairs=rest * rest // 2,
        index_read_bytes=read * read_bytes // page_tokens,
        index_read_without_bytes=read_without * read_bytes // page_tokens,
    )
