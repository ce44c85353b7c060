"""The banker's algorithm against every order there is."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.kvcache import banker
from pdkv.kvcache.banker import shortage

ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5)


def serves_all(available: int, rows: list[tuple[int, int]], *, exempt_last: bool = False) -> bool:
    """Some order lets each take its rest."""

    def serves(order: tuple[tuple[int, int], ...]) -> bool:
        there = available
        for at, (rest, back) in enumerate(order):
            if rest > there and not (exempt_last and at == len(order) - 1):
                return False
            there += back
        return True

    return any(map(serves, permutations(rows)))


def lacks(available: int, rows: list[tuple[int, int]], *, exempt_last: bool = False) -> int:
    return shortage(available, [rest for rest, _ in rows], [back for _, back in rows], exempt_last=exempt_last)


@settings(deadline=None)
@given(st.integers(-3, 12), ROWS, st.booleans())
def test_as_many_as_are_missing_and_not_one_less(available: int, rows: list[tuple[int, int]], last: bool) -> None:
    short = lacks(available, rows, exempt_last=last)
    assert serves_all(available, rows, exempt_last=last) is (short == 0)
    assert serves_all(available + short, rows, exempt_last=last)
    assert not short or not serves_all(available + short - 1, rows, exempt_last=last)


def test_nobody_lacks_anything() -> None:
    assert lacks(0, []) == 0
    assert lacks(0, [(0, 4), (0, 0)]) == 0


def test_two_that_wait_for_each_other() -> None:
    assert lacks(1, [(2, 5), (3, 5)]) == 1
    assert lacks(2, [(2, 5), (3, 5)]) == 0


def test_the_last_one_is_alone_and_may_take_all() -> None:
    assert lacks(0, [(9, 1)], exempt_last=True) == 0
    assert lacks(0, [(9, 1), (9, 1)], exempt_last=True) == 9
    assert lacks(-4, [(0, 1), (9, 8)], exempt_last=True) == 4


def test_another_order_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: whoever lacks most goes first."""

    class Upside:
        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        def argsort(self, column: np.ndarray, **more: object) -> np.ndarray:
            return np.argsort(-column)

    monkeypatch.setattr(banker, "np", Upside())
    assert lacks(2, [(2, 5), (3, 5)]) > 0
