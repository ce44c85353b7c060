"""How far a prompt is recorded and where a lookup may resume when a draft head (EAGLE, MTP) needs the token before.

Guarantees: lengths are whole pages except where said, never negative, and equal on every node that uses the same
rule: admission compares them, because a draft verified in the wrong context says nothing about it.
"""

from __future__ import annotations

from enum import StrEnum

from pdkv.errors import BoundsError


class EagleRule(StrEnum):
    """`bigram` is SGLang's (N tokens are N - 1 units), `drop_page` vLLM's (a lookup gives back one page)."""

    NONE = "none"
    BIGRAM = "bigram"
    DROP_PAGE = "drop_page"


def recorded_tokens(tokens: int, rule: EagleRule, *, page_tokens: int = 64) -> int:
    """Tokens of an N-token prompt whose pages go into the tree. Raises `BoundsError` on negative lengths."""
    _check(tokens, page_tokens)
    return _aligned(tokens - 1 if rule is EagleRule.BIGRAM else tokens, page_tokens)


def resume_tokens(tokens: int, rule: EagleRule, *, page_tokens: int = 64) -> int:
    """The most a lookup may use of an N-token prompt when all its full pages are cached.

    Without a draft head nothing is given back: N itself, the only result that need not be whole pages. Raises
    `BoundsError` on negative lengths.
    """
    _check(tokens, page_tokens)
    match rule:
        case EagleRule.NONE:
            return tokens
        case EagleRule.BIGRAM:
            return _aligned(tokens - 1, page_tokens)
        case EagleRule.DROP_PAGE:
            return max(0, _aligned(tokens - 1, page_tokens) - page_tokens)


def prefill_resume_tokens(tokens: int, rule: EagleRule, *, page_tokens: int = 64) -> int:
    """As `resume_tokens` for a node that has to compute at least the last token, in whole pages."""
    return min(resume_tokens(tokens, rule, page_tokens=page_tokens), _aligned(tokens - 1, page_tokens))


def _aligned(tokens: int, page_tokens: int) -> int:
    return max(0, tokens) // page_tokens * page_tokens


def _check(tokens: int, page_tokens: int) -> None:
    if tokens < 0:
        raise BoundsError("tokens", tokens, "at least 0")
    if page_tokens < 1:
        raise BoundsError("page tokens", page_tokens, "at least 1")
