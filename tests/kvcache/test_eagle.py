"""Recorded and resume lengths of each rule, against the golden figures and at page edges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import BoundsError
from pdkv.kvcache.eagle import EagleRule, prefill_resume_tokens, recorded_tokens, resume_tokens
from pdkv.kvcache.page_hash import chain

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ledger.json").read_text())["eagle"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda r: str(r["prompt_tokens"]))
def test_golden_lengths(row: dict[str, int]) -> None:
    n = row["prompt_tokens"]
    assert recorded_tokens(n, EagleRule.BIGRAM) == row["bigram_recorded"]
    assert resume_tokens(n, EagleRule.BIGRAM) == row["bigram_recorded"]
    usable = row["drop_page_usable_when_all_full_pages_are_cached"]
    assert resume_tokens(n, EagleRule.DROP_PAGE) == usable
    assert recorded_tokens(n, EagleRule.DROP_PAGE) == n // 64 * 64


@pytest.mark.parametrize(
    ("tokens", "recorded", "prefill"), [(0, 0, 0), (1, 0, 0), (63, 0, 0), (64, 64, 0), (65, 64, 64), (128, 128, 64)]
)
def test_without_a_draft_head(tokens: int, recorded: int, prefill: int) -> None:
    assert recorded_tokens(tokens, EagleRule.NONE) == recorded
    assert resume_tokens(tokens, EagleRule.NONE) == tokens
    assert prefill_resume_tokens(tokens, EagleRule.NONE) == prefill


@given(st.integers(0, 5000), st.sampled_from(EagleRule), st.sampled_from([1, 64, 128]))
def test_lengths_are_whole_pages_and_leave_a_token_to_prefill(tokens: int, rule: EagleRule, page: int) -> None:
    recorded = recorded_tokens(tokens, rule, page_tokens=page)
    resume = resume_tokens(tokens, rule, page_tokens=page)
    prefill = prefill_resume_tokens(tokens, rule, page_tokens=page)
    assert recorded % page == 0
    assert prefill % page == 0
    assert 0 <= prefill <= min(resume, recorded) <= tokens
    assert prefill < max(tokens, 1)
    assert rule is EagleRule.NONE or resume <= recorded


@given(st.integers(0, 300))
def test_bigram_records_what_the_bigram_chain_hashes(tokens: int) -> None:
    assert len(chain(range(tokens), bigram=True)) * 64 == recorded_tokens(tokens, EagleRule.BIGRAM)
    assert len(chain(range(tokens))) * 64 == recorded_tokens(tokens, EagleRule.NONE)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(BoundsError):
        recorded_tokens(-1, EagleRule.NONE)
    with pytest.raises(BoundsError):
        resume_tokens(1, EagleRule.BIGRAM, page_tokens=0)
