"""How pages that could move in one piece are cut, so that what is done to them overlaps.

Guarantees: portions are in order and leave nothing out; none is empty, or has more than `PORTION_BYTES` unless a page
has; few bytes are not cut at all, since each portion costs messages and turns of a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

WHOLE_BYTES = 128 << 20
"""Not cut where more follows: one such is proved while the next is read anyway."""
PORTION_BYTES = 256 << 20
"""Most of what is read before it is proved."""
LAST_PORTION_BYTES = 16 << 20
"""So much may be left to prove when everything has arrived: half a millisecond's work."""


def falling(pages: int, page_bytes: int, *, more: bool = False) -> Iterator[slice]:
    """For who reads and then proves: one portion is proved while the next is read, so each is half of what is left,
    until that is soon proved. `more`: other pages follow."""
    return _slices(_halves(pages, page_bytes, WHOLE_BYTES if more else LAST_PORTION_BYTES))


def rising(pages: int, page_bytes: int) -> Iterator[slice]:
    """For who digests and then announces: the first portion is soon on its way, and each gives time for the next."""
    return _slices([*_halves(pages, page_bytes, LAST_PORTION_BYTES)][::-1])


def _halves(pages: int, page_bytes: int, whole_bytes: int) -> Iterator[int]:
    left, whole = pages, pages * page_bytes <= whole_bytes
    while left:
        count = left
        if not whole and left * page_bytes > LAST_PORTION_BYTES:
            count = max(min(left // 2, PORTION_BYTES // page_bytes), 1)
        yield count
        left -= count


def _slices(counts: Iterator[int] | list[int]) -> Iterator[slice]:
    return (slice(first, stop) for first, stop in pairwise(accumulate(counts, initial=0)))
