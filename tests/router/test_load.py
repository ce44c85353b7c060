"""How busy a node is, by its own word and by what it was given."""

import pytest

from pdkv.node.routing import Estimate
from pdkv.router.load import Given, Load, computed, given
from tests.rpc import samples


def said(tokens: int, pages: int) -> Estimate:
    return Estimate(samples.P, 0, tokens, pages)


def load(tokens: int = 0, pages: int = 100, total: int = 100) -> Load:
    made = Load(total_pages=total)
    made.said(said(tokens, pages))
    return made


def test_the_worse_of_what_is_said_and_what_was_given_counts() -> None:
    prefill, decode = load(tokens=500), load(pages=60)
    with given(Given(300, 30), prefill, decode):
        assert (prefill.waiting_tokens, decode.available_pages) == (500, 60), "it may be among those that were told of"
        with given(Given(900, 50), prefill, decode):
            assert (prefill.waiting_tokens, decode.available_pages) == (1200, 20), "before the nodes come to tell of it"
            assert (prefill.requests, decode.requests) == (2, 2)
    assert (prefill.waiting_tokens, decode.available_pages, prefill.requests, decode.requests) == (500, 60, 0, 0)


def test_a_first_token_ends_its_share_of_prefill_and_not_of_decode() -> None:
    prefill, decode = load(), load()
    with given(Given(300, 30), prefill, decode) as share:
        computed(share, prefill)
        assert (prefill.waiting_tokens, decode.available_pages) == (0, 70)
        computed(share, prefill)
    assert (prefill.given_tokens, decode.given_pages) == (0, 0)


def test_a_request_that_fails_leaves_nothing() -> None:
    prefill, decode = load(), load()
    with pytest.raises(ValueError, match="failed"), given(Given(300, 30), prefill, decode):
        raise ValueError("failed")
    assert (prefill, decode) != (load(), load()), "they are compared by identity"
    assert [prefill.given_tokens, prefill.requests, decode.given_pages, decode.requests] == [0, 0, 0, 0]


def test_more_than_the_pool_is_not_less_than_nothing() -> None:
    decode = load(total=10)
    with given(Given(0, 30), load(), decode):
        assert decode.available_pages == 0


def test_who_promises_what_is_not_found_is_believed_less_and_then_more_again() -> None:
    liar = load()
    for _ in range(4):
        liar.found(promised=6400, found=0)
    assert liar.trust == pytest.approx(0.75**4)
    for _ in range(20):
        liar.found(promised=640, found=1280)
    assert 0.99 < liar.trust <= 1.0
    liar.found(promised=0, found=0)
    assert liar.trust > 0.99, "nothing was promised"
    liar.found(promised=640, found=0)
    liar.born()
    assert liar.trust == 1.0
