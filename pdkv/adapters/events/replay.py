"""The last batches, for a subscriber that missed some.

Guarantees: what is kept are always the newest batches in an unbroken row, within both bounds (one batch alone may be
larger than the bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice


class ReplayBuffer:
    """Batches are numbered from 0 as they are appended."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self.next_sequence = 0
        """The next batch's number."""

    def append(self, payload: bytes) -> None:
        self._kept.append(payload)
        self._bytes += len(payload)
        self.next_sequence += 1
        while len(self._kept) > self._max_batches or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft())

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Those kept from that number on, with their numbers. They begin later if that one is not kept any more."""
        first = self.next_sequence - len(self._kept)
        start = min(max(sequence, first), self.next_sequence)  # a subscriber may ask for any number
        return enumerate(islice(self._kept, start - first, None), start)
