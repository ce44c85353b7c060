"""Free pages as extents.

Guarantees: page 0 is never handed out; no page is handed out twice without having been freed in between; freeing a
free page is refused and changes nothing; neighbouring free extents are always merged. A request gets one run of
consecutive pages whenever any extent is long enough (a run is one descriptor on the wire), else as few runs as the
free extents allow. A call costs the pages it moves and the extents it touches (times the logarithm of their number),
whatever the size of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, CapacityError, IntegrityError
from pdkv.ids import SINK_PAGE, Int32Array, LocalPages

_FEW_RUNS = 8
_FEW_PAGES = 24


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
        self._starts: dict[int, set[int]] = {}
        """By length, where the free extents of that length start."""
        self._lengths: list[int] = []
        """Ascending, each once. However fragmented, n pages have fewer than sqrt(2 n) different lengths."""
        self._free_count = num_pages - 1
        self._free[1:] = True
        self._add(1, num_pages - 1)

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def extents(self) -> int:
        return sum(map(len, self._starts.values()))

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
        if not count:
            return LocalPages.none()
        starts: list[int] = []
        lengths: list[int] = []
        missing = count
        if count == self._free_count:  # nothing to choose
            for length, of_that_length in self._starts.items():
                starts += of_that_length
                lengths += [length] * len(of_that_length)
            self.work.extents += len(starts)
            self._starts.clear()
            self._lengths.clear()
            missing = 0
        while missing:
            start, length = self._pop_best(missing)
            taken = min(length, missing)
            if taken < length:
                self._add(start + taken, length - taken)
            starts.append(start)
            lengths.append(taken)
            missing -= taken
        pages = LocalPages.kept(_expand(starts, lengths))
        self._free[pages.index] = False
        self._free_count -= count
        return pages

    def free(self, pages: LocalPages) -> None:
        """Give pages back. Raises `BoundsError` if one of them is free already; nothing is given back then."""
        if not len(pages):
            return
        count = len(pages)
        for start, stop in self._runs_of(sorted(pages)) if count <= _FEW_PAGES else self._runs(pages):
            self._give_back(start, stop)
        self._free_count += count

    def _runs(self, pages: LocalPages) -> list[tuple[int, int]]:
        """[first, stop) of each run of consecutive pages. Raises `BoundsError` if one of them is free already."""
        ids = pages.array.copy()
        ids.sort()
        already = self._free[ids.astype(np.intp)]
        if np.count_nonzero(already):
            raise _not_handed_out(int(ids[already][0]))
        first, last = int(ids[0]), int(ids[-1])
        if last - first + 1 == ids.size:
            return [(first, last + 1)]
        edges = (ids[1:] - ids[:-1] != 1).nonzero()[0]
        starts, stops = [first, *ids[edges + 1].tolist()], [*(ids[edges] + 1).tolist(), last + 1]
        return list(zip(starts, stops, strict=True))

    def _runs_of(self, ids: list[int]) -> list[tuple[int, int]]:
        """As `_runs`, of a few sorted pages: then Python alone is faster."""
        free = self._free
        runs: list[tuple[int, int]] = []
        start = stop = ids[0]
        for page in ids:
            if free[page]:
                raise _not_handed_out(page)
            if page != stop:
                runs.append((start, stop))
                start = page
            stop = page + 1
        runs.append((start, stop))
        return runs

    def _give_back(self, start: int, stop: int) -> None:
        """Free the run [start, stop) and join it with its free neighbours."""
        free, tag = self._free, self._tag
        free[start:stop] = True
        if free[start - 1]:  # page 0 never is
            length = int(tag[start - 1])
            start -= length
            self._remove(start, length)
        if stop < self.num_pages and free[stop]:
            length = int(tag[stop])
            self._remove(stop, length)
            stop += length
        self._add(start, stop - start)

    def _pop_best(self, count: int) -> tuple[int, int]:
        """Take out (start, length) of an extent of the shortest length that holds `count` pages, else of the longest.

        Of equal ones any: dense pools have many, and to order them would cost more than it is good for.
        """
        self.work.extents += 1
        at = bisect_left(self._lengths, count)
        length = self._lengths[min(at, len(self._lengths) - 1)]
        starts = self._starts[length]
        start = starts.pop()
        if not starts:
            self._forget(length)
        return start, length

    def _add(self, start: int, length: int) -> None:
        self.work.extents += 1
        self._tag[start] = self._tag[start + length - 1] = length
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = {start}
            insort(self._lengths, length)
        else:
            starts.add(start)

    def _remove(self, start: int, length: int) -> None:
        self.work.extents += 1
        starts = self._starts[length]
        starts.remove(start)
        if not starts:
            self._forget(length)

    def _forget(self, length: int) -> None:
        del self._starts[length]
        del self._lengths[bisect_left(self._lengths, length)]

    def check(self) -> None:
        """Recount everything; raises `IntegrityError`. Costs the whole pool: for tests and `pdkv doctor`."""
        listed = np.zeros(self.num_pages, np.uint8)
        if self._lengths != sorted(self._starts):
            raise IntegrityError("lengths of free extents", listed=self._lengths, kept=sorted(self._starts))
        for start, length in ((start, length) for length, starts in self._starts.items() for start in starts):
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


def _not_handed_out(page: int) -> BoundsError:
    return BoundsError("page to free", page, "a page that was handed out")


def _expand(starts: list[int], lengths: list[int]) -> Int32Array:
    """int32: the pages of these runs, one run after the other."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int32)
    if sum(lengths) <= _FEW_PAGES:  # then Python alone is faster
        pages = [page for start, length in zip(starts, lengths, strict=True) for page in range(start, start + length)]
        return np.array(pages, np.int32)
    if len(starts) <= _FEW_RUNS:
        runs = zip(starts, lengths, strict=True)
        return np.concatenate([np.arange(start, start + length, dtype=np.int32) for start, length in runs])
    run = np.array(lengths, np.int32)
    before = np.cumsum(run, dtype=np.int32) - run
    shift = np.array(starts, np.int32) - before
    return np.repeat(shift, run) + np.arange(run.sum(), dtype=np.int32)
