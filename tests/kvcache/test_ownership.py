"""One state and one holder a page; the counts always add up."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError, IntegrityError
from pdkv.ids import LocalPages
from pdkv.kvcache.ownership import CACHED, FREE, NOBODY, Ownership, PageState, claim

NUM_PAGES = 9


def pages(*ids: int) -> LocalPages:
    return LocalPages.checked(np.array(ids, np.int32), NUM_PAGES)


@pytest.fixture
def owned() -> Ownership:
    """Pages 1 to 3 reserved for holder 7, 3 of them private."""
    ownership = Ownership(NUM_PAGES)
    ownership.move(pages(1, 2, 3), FREE, claim(PageState.RESERVED, 7))
    ownership.move(pages(3), claim(PageState.RESERVED, 7), claim(PageState.PRIVATE, 7))
    ownership.check()
    return ownership


def test_the_census_adds_up(owned: Ownership) -> None:
    census = owned.census()
    assert census == {"free": 5, "reserved": 2, "cached": 0, "private": 1, "quarantined": 0, "total": 8}
    assert owned.holders(PageState.RESERVED, PageState.PRIVATE) == {7: 3}
    assert np.flatnonzero(owned.in_state(PageState.RESERVED)).tolist() == [1, 2]


def test_a_page_moves_only_from_the_claim_it_is_under(owned: Ownership) -> None:
    with pytest.raises(IntegrityError, match="page 3 is private, not reserved of holder 7"):
        owned.move(pages(1, 3), claim(PageState.RESERVED, 7), CACHED)
    with pytest.raises(IntegrityError, match="page 1 is reserved, not reserved of holder 8"):
        owned.move(pages(1), claim(PageState.RESERVED, 8), CACHED)
    assert owned.census()["reserved"] == 2
    owned.check()


@pytest.mark.parametrize(("state", "holder"), [(PageState.FREE, 7), (PageState.CACHED, 7), (PageState.PRIVATE, NOBODY)])
def test_free_and_cached_pages_have_no_holder_and_the_others_have_one(state: PageState, holder: int) -> None:
    with pytest.raises(IntegrityError):
        claim(state, holder)


def test_a_holder_turns_only_its_own_pages(owned: Ownership) -> None:
    for holder, some, match in ((7, pages(1, 3), r"3 \(private\)"), (8, pages(1), "holder 8"), (7, pages(5), "free")):
        with pytest.raises(BoundsError, match=match):
            owned.turn(some, holder, PageState.RESERVED, PageState.QUARANTINED)
    owned.turn(pages(1, 2), 7, PageState.RESERVED, PageState.QUARANTINED)
    owned.turn(LocalPages.none(), 7, PageState.RESERVED, PageState.QUARANTINED)
    assert owned.holders(PageState.QUARANTINED) == {7: 2}
    owned.check()


def test_a_holder_lets_go_of_what_it_has_and_of_nothing_else(owned: Ownership) -> None:
    owned.turn(pages(2), 7, PageState.RESERVED, PageState.QUARANTINED)
    owned.move(pages(4), FREE, claim(PageState.RESERVED, 8))
    assert owned.let_go(pages(5, 4, 3, 2, 1), 7) == pages(3, 1)
    assert owned.census() == {"free": 6, "reserved": 1, "cached": 0, "private": 0, "quarantined": 1, "total": 8}
    owned.check()


def test_require_names_the_page_and_its_state(owned: Ownership) -> None:
    owned.require(pages(1, 2), 7, PageState.RESERVED)
    owned.require(pages(1, 3), 7, PageState.RESERVED, PageState.PRIVATE)
    with pytest.raises(BoundsError, match=r"3 \(private\).*holder 7 has as reserved"):
        owned.require(pages(1, 3), 7, PageState.RESERVED)
    with pytest.raises(BoundsError, match="holder 8"):
        owned.require(pages(1), 8, PageState.RESERVED)
    assert owned.held(pages(1, 3, 4), 7, PageState.PRIVATE).tolist() == [False, True, False]


@pytest.mark.parametrize("broken", ["count", "state", "holder", "lost holder", "sink"])
def test_check_sees_what_is_wrong(owned: Ownership, broken: str) -> None:
    match broken:
        case "count":
            owned._counts[PageState.FREE] += 1
        case "state":
            owned._claims[1] = FREE
        case "holder":
            owned._claims[5] |= claim(PageState.RESERVED, 7) - PageState.RESERVED
        case "lost holder":
            owned._claims[1] = PageState.RESERVED
        case "sink":
            owned._claims[0] = FREE
            owned._counts = owned._counted()
    with pytest.raises(IntegrityError):
        owned.check()
