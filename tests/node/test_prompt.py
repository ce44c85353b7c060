"""One prompt in the eyes of two nodes: pages, hashes, tail and account, for every rule and length."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import AccountMismatch, BoundsError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import UInt32Array
from pdkv.node.messages import Account, Namespace
from pdkv.node.prompt import Prompt, account_of, plan_prompt, require_equal_accounts

RULES = ("none", "bigram", "drop_page")
DEFAULT = Namespace()


@lru_cache
def contract(rule: str = "none") -> Contract:
    shape = model_shape(load_config("tiny"))
    speculation = "none" if rule == "none" else "eagle"
    facts = ContractFacts(weights_id="toy", speculation=speculation, eagle_rule=rule)
    return build_contract(shape, page_format(shape), identity=facts)


def tokens(count: int, seed: int = 0) -> UInt32Array:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.uint32)


def planned(count: int, rule: str = "none", *, seed: int = 0) -> Prompt:
    return plan_prompt(tokens(count, seed), DEFAULT, contract(rule))


lengths = st.integers(1, 400)
rules = st.sampled_from(RULES)


@given(lengths, rules)
def test_every_token_lies_in_one_recorded_page_or_in_the_tail(count: int, rule: str) -> None:
    prompt = planned(count, rule)
    assert prompt.recorded_tokens == 64 * prompt.recorded_pages
    assert prompt.recorded_tokens + prompt.tail_tokens == count
    assert 0 <= prompt.tail_tokens <= 64
    assert prompt.pages == prompt.recorded_pages + (prompt.tail_tokens > 0)
    assert len(prompt.tail_hash) == (32 if prompt.tail_tokens else 0)


@given(lengths, rules)
def test_prefill_always_has_a_token_left_to_compute(count: int, rule: str) -> None:
    prompt = planned(count, rule)
    found = min(prompt.prefill_hit_pages, prompt.recorded_pages)
    assert 64 * found < count
    assert max(found - prompt.drop_pages, 0) * 64 == prompt.resume_tokens
    assert prompt.decode_hit_pages <= prompt.recorded_pages or rule == "drop_page"
    assert min(prompt.decode_hit_pages, prompt.recorded_pages) >= found


@given(lengths, st.integers(0, 399), rules)
def test_a_changed_token_changes_its_page_and_all_after_it_and_none_before(count: int, at: int, rule: str) -> None:
    at %= count
    one = tokens(count)
    other = one.copy()
    other[at] ^= 1
    a, b = (plan_prompt(t, DEFAULT, contract(rule)) for t in (one, other))
    # a page's hash covers the token after it under the bigram rule
    first = max(at - (rule == "bigram"), 0) // 64
    equal = [x == y for x, y in zip(a.hashes, b.hashes, strict=True)]
    assert equal == [page < first for page in range(len(equal))]
    if a.tail_hash:
        assert a.tail_hash != b.tail_hash


@given(lengths, rules)
def test_a_longer_prompt_begins_with_the_same_pages(count: int, rule: str) -> None:
    long = planned(400, rule)
    short = plan_prompt(tokens(400)[:count], DEFAULT, contract(rule))
    assert short.hashes == long.hashes.part(0, len(short.hashes))


def test_namespaces_and_contents_never_share_a_hash() -> None:
    seen = set()
    for namespace in (DEFAULT, Namespace("a", ""), Namespace("", "a"), Namespace("a", "b"), Namespace("ab", "")):
        for other in (contract(), replace(contract(), weights_id="other"), replace(contract(), index_topk=7)):
            prompt = plan_prompt(tokens(100), namespace, other)
            seen |= {bytes(prompt.hashes.at(0)), prompt.tail_hash}
    assert len(seen) == 5 * 3 * 2


@pytest.mark.parametrize("rule", RULES)
def test_two_nodes_reach_equal_accounts(rule: str) -> None:
    here, there = contract(rule), replace(contract(rule), host="elsewhere", placement="layer_major")
    for count in (1, 63, 64, 65, 128, 300):
        mine, theirs = (account_of(plan_prompt(tokens(count), DEFAULT, c), c) for c in (here, there))
        require_equal_accounts(mine, theirs)


OTHER = {
    "prompt_tokens": 1,
    "recorded_tokens": 0,
    "rollback_tokens": 9,
    "resume_tokens": 0,
    "eagle_rule": "bigram",
    "pages": 1,
    "last_page_hash": b"",
    "tail_hash": bytes(32),
    "indexer_types": ("full",),
    "draft_digest": 1,
}


@pytest.mark.parametrize("name", [f.name for f in fields(Account)])
def test_each_field_of_an_account_counts_and_is_named_with_both_values(name: str) -> None:
    mine = account_of(planned(300), contract())
    with pytest.raises(AccountMismatch) as refused:
        require_equal_accounts(mine, replace(mine, **{name: OTHER[name]}))
    (difference,) = refused.value.differences
    assert difference.field == name
    assert difference.mine != difference.theirs


def test_all_differing_fields_are_named_at_once() -> None:
    mine = account_of(planned(300), contract())
    with pytest.raises(AccountMismatch) as refused:
        require_equal_accounts(mine, replace(mine, **OTHER))  # type: ignore[arg-type]
    assert {d.field for d in refused.value.differences} == set(OTHER)
    shown = {d.field: d.theirs for d in refused.value.differences}
    assert (shown["last_page_hash"], shown["tail_hash"], shown["indexer_types"]) == ("none", "00" * 32, "full")


def test_a_prompt_has_tokens_of_the_vocabulary() -> None:
    with pytest.raises(BoundsError, match="at least 1"):
        plan_prompt(tokens(0), DEFAULT, contract())
    with pytest.raises(BoundsError, match="vocabulary"):
        plan_prompt(np.array([contract().vocab_size], np.uint32), DEFAULT, contract())
