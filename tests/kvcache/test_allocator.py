"""Free pages: none twice, none lost, in as few runs as there can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import BoundsError, CapacityError, IntegrityError
from pdkv.ids import LocalPages
from pdkv.kvcache import allocator as allocator_module
from pdkv.kvcache.allocator import PageAllocator

NUM_PAGES = 40


def pages(*ids: int, num_pages: int = NUM_PAGES) -> LocalPages:
    return LocalPages.checked(np.array(ids, np.int32), num_pages)


def runs(taken: LocalPages) -> int:
    return 0 if not len(taken) else 1 + int(np.count_nonzero(np.diff(taken.array) != 1))


def free_runs(free: set[int]) -> list[int]:
    """Lengths of the runs of consecutive pages."""
    starts = [p for p in free if p - 1 not in free]
    return [next(n for n in range(1, NUM_PAGES) if p + n not in free) for p in starts]


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.randoms(use_true_random=False)), max_size=40)


@pytest.mark.parametrize("few", [0, 24])
@settings(max_examples=60)
@given(STEPS)
def test_against_a_set(few: int, steps: list) -> None:
    """Pages by the column, and a few of them one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator_module, "_FEW_PAGES", few)
        against_a_set(steps)


def against_a_set(steps: list) -> None:
    allocator, free = PageAllocator(NUM_PAGES), set(range(1, NUM_PAGES))
    for allocate, count, random in steps:
        taken = sorted(set(range(1, NUM_PAGES)) - free)
        if not allocate:
            some = random.sample(taken, min(count, len(taken)))
            allocator.free(pages(*some))
            free |= set(some)
        elif count > len(free):
            with pytest.raises(CapacityError) as caught:
                allocator.allocate(count)
            assert (caught.value.fields["wanted"], caught.value.fields["free"]) == (str(count), str(len(free)))
        else:
            lengths = sorted(free_runs(free), reverse=True)
            got = allocator.allocate(count)
            assert len(got) == count
            assert set(got) <= free
            fewest = next(n for n in range(len(lengths) + 1) if sum(lengths[:n]) >= count)
            assert runs(got) <= fewest
            free -= set(got)
        allocator.check()
        assert allocator.free_count == len(free)
        assert allocator.extents == len(free_runs(free))


def test_a_fresh_pool_gives_one_run() -> None:
    assert PageAllocator(NUM_PAGES).allocate(NUM_PAGES - 1).array.tolist() == list(range(1, NUM_PAGES))


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    allocator = PageAllocator(NUM_PAGES)
    allocator.allocate(NUM_PAGES - 1)
    allocator.free(pages(*range(2, 10), *range(12, 16), *range(20, 22)))  # runs of 8, 4 and 2
    assert allocator.allocate(3).array.tolist() == [12, 13, 14]
    assert allocator.allocate(9).array.tolist() == [
        *range(2, 10),
        15,
    ]  # what is left of the run of 4 holds the last one


@pytest.mark.parametrize("few", [0, 24])
def test_a_page_can_not_be_freed_twice(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_module, "_FEW_PAGES", few)
    allocator = PageAllocator(NUM_PAGES)
    taken = allocator.allocate(5)
    allocator.free(taken[2:3])
    with pytest.raises(BoundsError, match="3"):
        allocator.free(taken)
    assert allocator.free_count == NUM_PAGES - 1 - 4
    allocator.check()


@pytest.mark.parametrize("num_pages", [0, 1, 1 << 31])
def test_a_pool_has_a_page_beside_the_sink(num_pages: int) -> None:
    with pytest.raises(BoundsError):
        PageAllocator(num_pages)


def test_nothing_and_less_than_nothing() -> None:
    allocator = PageAllocator(NUM_PAGES)
    assert len(allocator.allocate(0)) == 0
    allocator.free(LocalPages.none())
    with pytest.raises(BoundsError):
        allocator.allocate(-1)


def extents_touched(num_pages: int) -> int:
    """By one allocation and its return, in a pool of which every second page is taken."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages - 1)
    allocator.free(pages(*range(1, num_pages, 2), num_pages=num_pages))
    before = allocator.work.extents
    allocator.free(allocator.allocate(100))
    return allocator.work.extents - before


def test_the_work_does_not_grow_with_the_pool() -> None:
    assert extents_touched(1_000) == extents_touched(10_000) <= 400


@pytest.mark.parametrize("broken", ["_free", "_tag", "_free_count", "_starts", "_lengths"])
def test_check_sees_what_is_wrong(broken: str) -> None:
    allocator = PageAllocator(NUM_PAGES)
    allocator.allocate(4)
    allocator.check()
    match broken:
        case "_free":
            allocator._free[2] = True
        case "_tag":
            allocator._tag[NUM_PAGES - 1] = 1
        case "_free_count":
            allocator._free_count -= 1
        case "_starts":
            allocator._starts[NUM_PAGES - 5].add(1)
        case "_lengths":
            allocator._lengths.append(NUM_PAGES)
    with pytest.raises(IntegrityError):
        allocator.check()


def test_check_sees_neighbours_that_were_not_merged() -> None:
    allocator = PageAllocator(NUM_PAGES)
    allocator._pop_best(1)
    allocator._add(1, 10)
    allocator._add(11, NUM_PAGES - 11)
    with pytest.raises(IntegrityError, match="merged"):
        allocator.check()
