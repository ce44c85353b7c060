"""A refusal says what is short: in tokens, pages and bytes of both caches, and whether it can ever fit."""

from __future__ import annotations

import pytest

from pdkv.errors import CapacityError, NeverFits
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import PageHashes
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.shortage import never_fits, no_room, not_safe
from pdkv.replay.pool import pool_without_bytes

MILLION = 1_048_576
OUTPUT = 256
PAGES = 16_388
GLM = page_format(model_shape(load_config("glm-5.3")))


def test_a_million_tokens_and_their_output_are_16388_pages() -> None:
    manager = CacheManager(pool_without_bytes(PAGES))
    pages = -(-(MILLION + OUTPUT) // 64)
    assert pages == PAGES
    reservation = manager.reserve(PageHashes(), pages, max_hit_pages=0)
    with pytest.raises(CapacityError) as caught:
        manager.reserve(PageHashes(), pages, max_hit_pages=0)
    facts = caught.value.fields
    assert not isinstance(caught.value, NeverFits)
    assert (facts["wanted_tokens"], facts["wanted_pages"]) == (str(MILLION + OUTPUT), str(PAGES))
    assert (facts["short_pages"], facts["free_pages"], facts["ever_fits"]) == (str(PAGES), "0", "True")
    manager.end(reservation)
    assert len(manager.reserve(PageHashes(), pages, max_hit_pages=0).pages) == PAGES


def test_one_page_less_never_holds_it() -> None:
    manager = CacheManager(pool_without_bytes(PAGES - 1))
    with pytest.raises(NeverFits) as caught:
        manager.reserve(PageHashes(), PAGES, max_hit_pages=0)
    assert (caught.value.fields["short_pages"], caught.value.fields["ever_fits"]) == ("1", "False")
    assert "the whole pool has 16387 pages: 1 pages" in str(caught.value)


def test_pages_that_are_there_but_not_given_say_what_would_have_to_be() -> None:
    error = not_safe(GLM, 10, 3, 4, {"free": 90, "cached": 6})
    assert "10 pages wanted" in str(error)
    assert "could wait for each other's pages for ever; 3 pages" in str(error)
    assert (error.fields["short_pages"], error.fields["wanted_pages"], error.fields["ever_fits"]) == ("3", "10", "True")


@pytest.mark.parametrize("never", [False, True])
def test_bytes_are_those_of_both_caches(*, never: bool) -> None:
    error = never_fits(GLM, PAGES, 99) if never else no_room(GLM, PAGES, 9, {"free": 90, "cached": 19})
    facts, short = error.fields, PAGES - 99
    assert int(facts["wanted_main_bytes"]) == PAGES * 64 * 656 * 78 == 53_666_635_776
    assert int(facts["wanted_index_bytes"]) == PAGES * 64 * 132 * 21
    assert int(facts["short_pages"]) == short
    assert int(facts["short_bytes"]) == short * GLM.page_bytes == short * (GLM.main_bytes + GLM.index_bytes)
    for number in (PAGES, PAGES * 64, PAGES * GLM.main_bytes, PAGES * GLM.index_bytes, short):
        assert str(number) in str(error)


def test_evictable_pages_are_not_short() -> None:
    error = no_room(GLM, 10, 4, {"free": 3, "cached": 6})
    assert (error.fields["short_pages"], error.fields["evictable_pages"], error.fields["locked"]) == ("3", "4", "2")


def test_bytes_of_a_real_pool() -> None:
    fmt = page_format(model_shape(load_config("tiny")))
    manager = CacheManager(SlotPool.create(fmt, 4))
    with pytest.raises(NeverFits) as caught:
        manager.reserve(PageHashes(), 5, max_hit_pages=0)
    assert int(caught.value.fields["short_bytes"]) == 2 * fmt.page_bytes
