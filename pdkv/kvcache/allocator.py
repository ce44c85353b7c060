"""Free pages as extents.

Guarantees: page 0 is never handed out; no page is handed out twice without having been freed in between; freeing a
free page is refused and changes nothing; neighbouring free extents are always merged. A request gets one run of
consecutive pages whenever any extent is long enough (a run is one descriptor on the wire), else as few runs as the
free extents allow. A call costs the pages it moves and the extents it touches (times the logarithm of their number),
whatever the size of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from pdkv.errors import BoundsError, CapacityError, IntegrityError
from pdkv.ids import SINK_PAGE, Int32Array, LocalPages

_Int64 = npt.NDArray[np.int64]

_START_BITS = 32
_START_MASK = (1 << _START_BITS) - 1


@dataclass(slots=True)
class AllocatorWork:
    """What the calls so far have looked at: a test of growth counts this instead of time."""

    extents: int = 0


class PageAllocator:
    """Hands out pages [1, num_pages). Not thread-safe.

    Raises `BoundsError` for a pool with no page beside the write sink.
    """

    def __init__(self, num_pages: int) -> None:
        if not SINK_PAGE + 2 <= num_pages < 1 << 31:
            raise BoundsError("num_pages", num_pages, f"{SINK_PAGE + 2} to {(1 << 31) - 1}")
        self.num_pages = num_pages
        self.work = AllocatorWork()
        self._free = np.zeros(num_pages, np.bool_)
        # Boundary tags: at the first and at the last page of a free extent stands its length, elsewhere nothing is
        # promised. So a freed run finds its neighbours without a search.
        self._tag = np.zeros(num_pages, np.int32)
        self._by_size = SortedList()
        """length << 32 | start of every free extent."""
        self._free_count = num_pages - 1
        self._free[1:] = True
        self._add(1, num_pages - 1)

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def extents(self) -> int:
        return len(self._by_size)

    def is_free(self, pages: LocalPages) -> npt.NDArray[np.bool_]:
        """bool [pages]."""
        found: npt.NDArray[np.bool_] = self._free[pages.array]
        return found

    def allocate(self, count: int) -> LocalPages:
        """`count` pages: from the shortest extent that holds them all, else from the longest ones.

        Raises `CapacityError` if fewer are free, `BoundsError` for a negative count; nothing is taken then.
        """
        if count < 0:
            raise BoundsError("pages to allocate", count, "0 or more")
        if count > self._free_count:
            raise CapacityError(f"{count} pages wanted, {self._free_count} free", wanted=count, free=self._free_count)
        starts: list[int] = []
        lengths: list[int] = []
        missing = count
        while missing:
            start, length = self._pop_best(missing)
            taken = min(length, missing)
            if taken < length:
                self._add(start + taken, length - taken)
            starts.append(start)
            lengths.append(taken)
            missing -= taken
        ids = _expand(starts, lengths)
        self._free[ids] = False
        self._free_count -= count
        return LocalPages.checked(ids, self.num_pages)

    def free(self, pages: LocalPages) -> None:
        """Give pages back. Raises `BoundsError` if one of them is free already; nothing is given back then."""
        if not len(pages):
            return
        ids = np.sort(pages.array)
        already = ids[self._free[ids]]
        if already.size:
            raise BoundsError("page to free", int(already[0]), "a page that was handed out")
        edges = np.flatnonzero(np.diff(ids) != 1)
        starts = ids[np.concatenate(([0], edges + 1))].astype(np.int64)
        stops = ids[np.concatenate((edges, [ids.size - 1]))].astype(np.int64) + 1
        self._merge(starts, stops)
        self._free[ids] = True
        self._free_count += int(ids.size)

    def _merge(self, starts: _Int64, stops: _Int64) -> None:
        """Join the runs [start, stop), in order and not yet marked free, with their free neighbours."""
        left = np.where(self._free[starts - 1], self._tag[starts - 1], 0)
        inside = stops < self.num_pages
        after = np.where(inside, stops, 0)  # page 0 is never free
        right = np.where(self._free[after], self._tag[after], 0)
        for start, length in zip((starts - left)[left > 0].tolist(), left[left > 0].tolist(), strict=True):
            self._remove(start, length)
        # An extent between two freed runs is the right one's left neighbour too: it is gone already.
        own = right > 0
        own[:-1] &= stops[:-1] + right[:-1] != starts[1:]
        for start, length in zip(stops[own].tolist(), right[own].tolist(), strict=True):
            self._remove(start, length)
        grown_starts, grown_stops = starts - left, stops + right
        first = np.ones(starts.size, np.bool_)
        first[1:] = grown_starts[1:] > grown_stops[:-1]
        last = np.append(first[1:], True)
        self._add_all(grown_starts[first], grown_stops[last] - grown_starts[first])

    def _pop_best(self, count: int) -> tuple[int, int]:
        """Take out (start, length) of the shortest extent of at least `count` pages, else of the longest."""
        self.work.extents += 1
        at = self._by_size.bisect_left(count << _START_BITS)
        key = int(self._by_size.pop(at if at < len(self._by_size) else -1))
        return key & _START_MASK, key >> _START_BITS

    def _add(self, start: int, length: int) -> None:
        self.work.extents += 1
        self._tag[start] = self._tag[start + length - 1] = length
        self._by_size.add(length << _START_BITS | start)

    def _add_all(self, starts: _Int64, lengths: _Int64) -> None:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._add(start, length)

    def _remove(self, start: int, length: int) -> None:
        self.work.extents += 1
        self._by_size.remove(length << _START_BITS | start)

    def check(self) -> None:
        """Recount everything; raises `IntegrityError`. Costs the whole pool: for tests and `pdkv doctor`."""
        listed = np.zeros(self.num_pages, np.uint8)
        for key in self._by_size:
            start, length = key & _START_MASK, key >> _START_BITS
            if self._tag[start] != length or self._tag[start + length - 1] != length:
                raise IntegrityError(f"extent {start}+{length}: its boundary tags say otherwise")
            before, after = start - 1, start + length
            if self._free[before] or (after < self.num_pages and self._free[after]):
                raise IntegrityError(f"extent {start}+{length}: a free neighbour was not merged")
            listed[start : start + length] += 1
        if not np.array_equal(listed, self._free):
            raise IntegrityError("free pages and free extents disagree", pages=np.flatnonzero(listed != self._free))
        if int(listed.sum()) != self._free_count or self._free[SINK_PAGE]:
            raise IntegrityError("count of free pages", counted=int(listed.sum()), kept=self._free_count)


def _expand(starts: list[int], lengths: list[int]) -> Int32Array:
    """int32: the pages of these runs, one run after the other."""
    run = np.array(lengths, np.int32)
    before = np.cumsum(run, dtype=np.int32) - run
    shift = np.array(starts, np.int32) - before
    return np.repeat(shift, run) + np.arange(run.sum(), dtype=np.int32)
