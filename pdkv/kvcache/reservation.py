"""What the cache manager remembers of a request, of a lease and of pages held back.

Guarantees: plain records; only the manager makes and changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdkv.errors import BoundsError
from pdkv.ids import Int32Array, LocalPages, PageHashes, ReservationId
from pdkv.kvcache.events import PublicChain
from pdkv.kvcache.radix_node import Node, Use


@dataclass(eq=False, slots=True)
class Reservation:
    """A request's pages, from `reserve` to `end`."""

    id: ReservationId
    hashes: PageHashes
    """Of the prompt's full pages, and of an answer's once the cache manager was told (`extend`)."""
    hit: LocalPages
    """Pages of the prompt's beginning that the tree had: locked, sealed, not to be written."""
    pages: LocalPages
    """The new ones: page i of the sequence is `pages[i - len(hit)]`."""
    sequence: LocalPages
    """All that it has so far: page i of the sequence is `sequence[i]`."""
    node: Node
    """Where the locked path ends: the last page that was hit or committed."""
    committed: int
    """Pages, from the beginning, that are in the tree: those that were hit, then those committed."""
    prompt_pages: int
    """Full pages of the prompt; those after them are an answer's."""
    use: Use
    """Of the prompt's pages."""
    total_pages: int
    """That its sequence may ever have."""
    lost: int = 0
    """Pages of its sequence that were its own and are no more: held back, or handed over to a lease."""
    broken: bool = False
    """Pages of its sequence were held back: it can only end. Once freed they are anybody's, its own for another index,
    too."""
    alive: bool = True
    public: PublicChain | None = None
    """How the manager's observer names the pages; without it they are not told of."""
    _room: Int32Array | None = None
    """An array that begins with `sequence` and has room for the rest; made by `append`."""

    @property
    def rest(self) -> int:
        """Pages that it may still take."""
        return self.total_pages - len(self.sequence)

    def append(self, more: LocalPages) -> None:
        """The sequence goes on with these. Costs those appended, however often it happens."""
        have, total = len(self.sequence), len(self.sequence) + len(more)
        room = self._room
        if room is None:
            room = self._room = np.empty(self.total_pages, np.int32)
            room[:have] = self.sequence.array
        room[have:total] = more.array
        self.sequence = LocalPages.kept(room[:total])
        self.pages = LocalPages.kept(room[len(self.hit) : total])

    def replace(self, first: int, pages: LocalPages) -> None:
        """These stand in the sequence for its own from `first` on, which is past those that were hit."""
        sequence = self.sequence.array.copy()
        sequence[first : first + len(pages)] = pages.array
        self.set(self.hit, LocalPages.kept(sequence))

    def set(self, hit: LocalPages, sequence: LocalPages) -> None:
        """Other numbers for the same places."""
        self.hit, self.sequence, self.pages, self._room = hit, sequence, sequence[len(hit) :], None

    def page_of(self, index: int) -> int:
        """Local id of page `index` of the sequence. Raises `BoundsError` past its end."""
        if not 0 <= index < len(self.sequence):
            raise BoundsError("page index", index, f"0 to {len(self.sequence) - 1}")
        return int(self.sequence.array[index])


@dataclass(frozen=True, slots=True)
class LeasedPages:
    """What a lease keeps readable: a locked path of the tree, and pages that only it holds."""

    holder: int
    node: Node
    private: LocalPages


@dataclass(slots=True)
class HeldBack:
    """Quarantined pages of one reservation, which may have ended."""

    pages: int
    reasons: list[str]
