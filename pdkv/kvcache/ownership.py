"""Who may touch a page: one claim a page, which is a state and, where the state has one, a holder.

Guarantees: free + reserved + cached + private + quarantined = all pages but the write sink, after every call; a page
changes its claim only from the one its caller names, all pages of a call or none. Free and cached pages have no holder
(cached ones belong to the tree); reserved, private and quarantined ones have exactly one. Counts are kept, not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, IntegrityError
from pdkv.ids import SINK_PAGE, LocalPages

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


Claim: TypeAlias = int
"""holder << 3 | state: one number, so that a page's claim is compared and changed at once."""

_CENSUS = tuple(state.name.lower() for state in PageState if state is not PageState.SINK)
_HELD = (PageState.RESERVED, PageState.PRIVATE, PageState.QUARANTINED)
_NEEDS_HOLDER = tuple(state in _HELD for state in PageState)
_HOLDER_SHIFT = 3
_STATE_MASK = (1 << _HOLDER_SHIFT) - 1


def claim(state: PageState, holder: int = NOBODY) -> Claim:
    """Raises `IntegrityError` if pages in that state must have a holder and there is none, or the other way round."""
    if (holder != NOBODY) is not _NEEDS_HOLDER[state]:
        raise IntegrityError(f"holder {holder} can't have a page that is {state.name.lower()}")
    return holder << _HOLDER_SHIFT | state


FREE = claim(PageState.FREE)
CACHED = claim(PageState.CACHED)


class Ownership:
    """The claim on each page of a pool; all pages but the sink start free."""

    def __init__(self, num_pages: int) -> None:
        self._claims = np.full(num_pages, FREE, np.int64)
        self._claims[SINK_PAGE] = PageState.SINK
        self._counts = self._counted()

    def census(self) -> dict[str, int]:
        """Pages by state, and their total."""
        return dict(zip(_CENSUS, self._counts[: PageState.SINK], strict=True)) | {"total": self._claims.size - 1}

    def in_state(self, state: PageState) -> npt.NDArray[np.bool_]:
        """bool [num_pages]. Costs the whole pool."""
        found: npt.NDArray[np.bool_] = (self._claims & _STATE_MASK) == state
        return found

    def held(self, pages: LocalPages, holder: int, *states: PageState) -> npt.NDArray[np.bool_]:
        """bool [pages]: which of them `holder` has in one of the states."""
        have = self._claims[pages.index]
        found: npt.NDArray[np.bool_] = have == claim(states[0], holder)
        for state in states[1:]:
            found |= have == claim(state, holder)
        return found

    def require(self, pages: LocalPages, holder: int, *states: PageState) -> None:
        """Raises `BoundsError` naming the first page that `holder` does not have in one of the states."""
        held = self.held(pages, holder, *states)
        if np.count_nonzero(held) < held.size:
            wrong = int(pages.array[~held][0])
            wanted = " or ".join(s.name.lower() for s in states)
            have = f"{wrong} ({self._state(wrong).name.lower()})"
            raise BoundsError("page", have, f"one that holder {holder} has as {wanted}")

    def turn(self, pages: LocalPages, holder: int, source: PageState, target: PageState) -> None:
        """Pages of a holder from one state to another. Raises `BoundsError` as `require`, with nothing changed."""
        before = claim(source, holder)
        if np.count_nonzero(self._claims[pages.index] != before):
            self.require(pages, holder, source)
        self.put(pages, before, claim(target, holder))

    def move(self, pages: LocalPages, source: Claim, target: Claim) -> None:
        """All pages from one claim to another. Raises `IntegrityError`, with nothing changed, if one has another."""
        wrong = self._claims[pages.index] != source
        if np.count_nonzero(wrong):
            page, due = int(pages.array[wrong][0]), PageState(source & _STATE_MASK)
            words = f"{self._state(page).name.lower()}, not {due.name.lower()}"
            raise IntegrityError(f"page {page} is {words} of holder {source >> _HOLDER_SHIFT}")
        self.put(pages, source, target)

    def put(self, pages: LocalPages, source: Claim, target: Claim) -> None:
        """As `move`, of pages whose claims were looked at in the same step (`require`): not looked at again."""
        count = len(pages)
        self._claims[pages.index] = target
        self._counts[source & _STATE_MASK] -= count
        self._counts[target & _STATE_MASK] += count

    def let_go(self, pages: LocalPages, holder: int) -> LocalPages:
        """Those that `holder` has reserved or private become free; returns them."""
        have = self._claims[pages.index]
        reserved, private = claim(PageState.RESERVED, holder), claim(PageState.PRIVATE, holder)
        is_reserved, is_private = have == reserved, have == private
        own = pages.where(is_reserved | is_private)
        self._claims[own.index] = FREE
        kept, count = int(np.count_nonzero(is_reserved)), len(own)
        self._counts[PageState.RESERVED] -= kept
        self._counts[PageState.PRIVATE] -= count - kept
        self._counts[PageState.FREE] += count
        return own

    def renumber(self, source: LocalPages, target: LocalPages) -> None:
        """The claims of `source` go to `target`, whose pages were all free; those of `source` are free then."""
        self._claims[target.array] = self._claims[source.array]
        self._claims[source.array] = FREE

    def holders(self, *states: PageState) -> dict[int, int]:
        """Pages in these states by who holds them. Costs the whole pool."""
        some = self._claims[self._in(states)]
        ids, pages = np.unique(some >> _HOLDER_SHIFT, return_counts=True)
        return dict(zip(ids.tolist(), pages.tolist(), strict=True))

    def check(self) -> None:
        """Recount everything; raises `IntegrityError`. Costs the whole pool."""
        counted = self._counted()
        if counted != self._counts:
            raise IntegrityError("pages by state", counted=counted, kept=self._counts)
        if counted[PageState.SINK] != 1 or self._state(SINK_PAGE) is not PageState.SINK:
            raise IntegrityError("the states of all pages don't add up to the pool", **self.census())
        wrong = np.flatnonzero(self._in(_HELD) != (self._claims >> _HOLDER_SHIFT != NOBODY))
        if wrong.size:
            raise IntegrityError(f"page {int(wrong[0])} has a holder it must not have, or none")

    def _in(self, states: Iterable[PageState]) -> npt.NDArray[np.bool_]:
        """bool [num_pages]. By a table: before `np.isin` begins, that is done with a small pool."""
        wanted = np.zeros(_STATE_MASK + 1, np.bool_)
        wanted[list(states)] = True
        found: npt.NDArray[np.bool_] = wanted[self._claims & _STATE_MASK]
        return found

    def _state(self, page: int) -> PageState:
        return PageState(int(self._claims[page]) & _STATE_MASK)

    def _counted(self) -> list[int]:
        counted: list[int] = np.bincount(self._claims & _STATE_MASK, minlength=len(PageState)).tolist()
        return counted
