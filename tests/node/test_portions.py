"""How pages are cut for what overlaps: nothing left out, few portions, small ones where one waits for them."""

from itertools import pairwise

import pytest

from pdkv.node.portions import LAST_PORTION_BYTES, PORTION_BYTES, WHOLE_BYTES, falling, rising


def check(found: list[slice], pages: int, page_bytes: int) -> list[int]:
    """Bytes of each."""
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
    assert found[-1].stop == pages
    sizes = [(part.stop - part.start) * page_bytes for part in found]
    assert max(sizes) <= max(PORTION_BYTES, page_bytes)
    assert min(sizes) > 0
    # few: the largest ones, and then halves
    assert len(found) <= pages / max(PORTION_BYTES // page_bytes, 1) + 7
    return sizes


@pytest.mark.parametrize("page_bytes", [3_452_160, 369_664, 300 << 20])
@pytest.mark.parametrize("pages", [1, 2, 9, 10, 128, 16_384])
def test_portions_fall_to_the_end_and_rise_from_the_beginning(pages: int, page_bytes: int) -> None:
    sizes = check(list(falling(pages, page_bytes)), pages, page_bytes)
    assert sizes[-1] <= max(LAST_PORTION_BYTES, page_bytes)
    assert all(later <= earlier + page_bytes for earlier, later in pairwise(sizes))
    assert check(list(rising(pages, page_bytes)), pages, page_bytes) == sizes[::-1]


@pytest.mark.parametrize("page_bytes", [3_452_160, 369_664])
@pytest.mark.parametrize("pages", [1, 30, 100, 400, 16_384])
def test_what_others_follow_is_cut_only_if_it_is_much(pages: int, page_bytes: int) -> None:
    found = list(falling(pages, page_bytes, more=True))
    check(found, pages, page_bytes)
    assert (len(found) == 1) is (pages * page_bytes <= WHOLE_BYTES)


def test_small_pages_and_those_that_are_not_proved_are_one_portion() -> None:
    for cut in (falling, rising):
        assert list(cut(16_384, 64)) == [slice(0, 16_384)]
        assert list(cut(16_384, 0)) == [slice(0, 16_384)]
        assert list(cut(0, 64)) == []
