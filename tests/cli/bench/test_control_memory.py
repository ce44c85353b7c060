"""Memory of a process: what it took for a while is seen, columns as bytes, an object a page as objects."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.cli.bench.control_memory import Growth, MemoryWatch

PAGES = 20_000


def test_a_peak_is_seen_after_it_is_over_and_once() -> None:
    watch = MemoryWatch()
    before = watch.taken()
    column = np.ones((PAGES, 4096), np.uint8)
    watch.look()
    del column
    after = watch.taken()
    # the kernel adds up what threads have taken in batches
    assert Growth.between(before, after).resident_bytes > 0.99 * PAGES * 4096
    assert Growth.between(before, after).objects < PAGES / 100
    assert Growth.between(after, watch.taken()).resident_bytes < PAGES * 4096 / 2


@pytest.mark.parametrize(("looks", "found"), [(3, 1.0), (2, 1.0), (1, 0.0)])
def test_an_object_a_page_is_seen_if_it_lives_for_most_looks(looks: int, found: float) -> None:
    watch = MemoryWatch()
    before = watch.taken()
    pages = [bytes([n % 256]) * 16 for n in range(PAGES)]
    for _ in range(looks):
        watch.look()
    del pages
    for _ in range(3 - looks):
        watch.look()
    grown = Growth.between(before, watch.taken())
    assert grown.a_page(Growth(0, 0), PAGES)[1] == pytest.approx(found, abs=0.05)
