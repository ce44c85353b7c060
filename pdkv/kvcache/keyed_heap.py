"""A heap whose keys may change.

Guarantees: `first` and `pop` give the item with the least *current* key, whatever keys it had before; ties go in the
order in which keys were set; outdated entries never outnumber the items by more than a constant factor, so memory and
the cost of a call (the logarithm, amortised) follow the items that are in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=float | tuple[int, ...])

_SPARE_ENTRIES = 64


class KeyedHeap(Generic[Item, Key]):
    """Items by ascending key; each item once."""

    def __init__(self) -> None:
        self._current: dict[Item, tuple[Key, int, Item]] = {}
        """The entry that counts; any other one of the item is outdated."""
        self._entries: list[tuple[Key, int, Item]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: Item) -> bool:
        return item in self._current

    def __iter__(self) -> Iterator[Item]:
        return iter(self._current)

    def key(self, item: Item) -> Key:
        """Raises `KeyError` for an item that is not in it."""
        return self._current[item][0]

    def set(self, item: Item, key: Key) -> None:
        """Put the item in, or change its key."""
        self._next += 1
        entry = self._current[item] = (key, self._next, item)
        heapq.heappush(self._entries, entry)
        self._tidy()

    def discard(self, item: Item) -> None:
        """Take the item out if it is in."""
        self._current.pop(item, None)
        self._tidy()

    def first(self) -> Item | None:
        """The item with the least key, left in; None when empty."""
        entries, current = self._entries, self._current
        while entries:
            entry = entries[0]
            if current.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(entries)
        return None

    def pop(self) -> Item | None:
        """Take out the item with the least key; None when empty."""
        entries, current = self._entries, self._current
        while entries:
            entry = heapq.heappop(entries)
            if current.get(entry[2]) is entry:
                del current[entry[2]]
                return entry[2]
        return None

    def _tidy(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _SPARE_ENTRIES:
            self._entries = list(self._current.values())
            heapq.heapify(self._entries)
