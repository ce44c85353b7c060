"""Who may touch a page: one state and one holder a page.

Guarantees: free + reserved + cached + private + quarantined = all pages but the write sink, after every call; a page
changes state only from the state its caller names, all pages of a call or none. Free and cached pages have no holder
(cached ones belong to the tree); reserved, private and quarantined ones have exactly one. Counts are kept, not counted.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, IntegrityError
from pdkv.ids import SINK_PAGE, Int32Array, LocalPages

NOBODY = 0


class PageState(IntEnum):
    FREE = 0
    RESERVED = 1
    """Kept for bytes that are still to come."""
    CACHED = 2
    """Sealed and in the tree."""
    PRIVATE = 3
    """A tail, output or duplicate page of one request or lease."""
    QUARANTINED = 4
    """Somebody may still write to it."""
    SINK = 5


_HELD = (PageState.RESERVED, PageState.PRIVATE, PageState.QUARANTINED)


class Ownership:
    """State and holder of each page of a pool; all pages but the sink start free."""

    def __init__(self, num_pages: int) -> None:
        self._state = np.full(num_pages, PageState.FREE, np.uint8)
        self._state[SINK_PAGE] = PageState.SINK
        self._holder = np.zeros(num_pages, np.int64)
        self._counts = np.bincount(self._state, minlength=len(PageState))

    def census(self) -> dict[str, int]:
        """Pages by state, and their total."""
        states = [state for state in PageState if state is not PageState.SINK]
        return {s.name.lower(): int(self._counts[s]) for s in states} | {"total": self._state.size - 1}

    def count(self, state: PageState) -> int:
        return int(self._counts[state])

    def in_state(self, state: PageState) -> npt.NDArray[np.bool_]:
        """bool [num_pages]. Costs the whole pool."""
        found: npt.NDArray[np.bool_] = self._state == state
        return found

    def held(self, pages: LocalPages, holder: int, *states: PageState) -> npt.NDArray[np.bool_]:
        """bool [pages]: which of them `holder` has in one of the states."""
        mine: npt.NDArray[np.bool_] = self._holder[pages.array] == holder
        return mine & np.isin(self._state[pages.array], states)

    def require(self, pages: LocalPages, holder: int, *states: PageState) -> None:
        """Raises `BoundsError` naming the first page that `holder` does not have in one of the states."""
        wrong = pages.array[~self.held(pages, holder, *states)]
        if wrong.size:
            have = f"{int(wrong[0])} ({PageState(self._state[wrong[0]]).name.lower()})"
            wanted = " or ".join(s.name.lower() for s in states)
            raise BoundsError("page", have, f"one that holder {holder} has as {wanted}")

    def move(self, pages: Int32Array, source: PageState, target: PageState, *, holder: int = NOBODY) -> None:
        """All pages from one state to another and to `holder`.

        Raises `IntegrityError`, with nothing changed, if one is not in `source` or the holder doesn't suit `target`.
        """
        if (holder != NOBODY) != (target in _HELD):
            raise IntegrityError(f"holder {holder} can't have a page that is {target.name.lower()}")
        wrong = pages[self._state[pages] != source]
        if wrong.size:
            state = PageState(self._state[wrong[0]])
            raise IntegrityError(f"page {int(wrong[0])} is {state.name.lower()}, not {source.name.lower()}")
        self._state[pages] = target
        self._holder[pages] = holder
        self._counts[source] -= pages.size
        self._counts[target] += pages.size

    def holders(self, *states: PageState) -> dict[int, int]:
        """Pages in these states by who holds them. Costs the whole pool."""
        ids, pages = np.unique(self._holder[np.isin(self._state, states)], return_counts=True)
        return dict(zip(ids.tolist(), pages.tolist(), strict=True))

    def check(self) -> None:
        """Recount everything; raises `IntegrityError`. Costs the whole pool."""
        counted = np.bincount(self._state, minlength=len(PageState))
        if not np.array_equal(counted, self._counts):
            raise IntegrityError("pages by state", counted=counted.tolist(), kept=self._counts.tolist())
        if counted[PageState.SINK] != 1 or self._state[SINK_PAGE] != PageState.SINK:
            raise IntegrityError("the states of all pages don't add up to the pool", **self.census())
        wrong = np.flatnonzero(np.isin(self._state, _HELD) != (self._holder != NOBODY))
        if wrong.size:
            raise IntegrityError(f"page {int(wrong[0])} has a holder it must not have, or none")
