"""Pages that have arrived, and are yet to be proved.

Guarantees: every column is of one length. Needs no tensors, so that a client can speak of pages without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdkv.errors import BoundsError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages, PageHashes, ReservationId, UInt64Array


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Pages that a read has filled, as their sender announced them: consecutive pages of the prompt.

    `digests` are uint64 [pages, 2], main and index. Raises `BoundsError` unless all columns are of one length.
    """

    reservation: ReservationId
    first_index: int
    pages: LocalPages
    hashes: PageHashes
    digests: UInt64Array

    def __post_init__(self) -> None:
        if self.first_index < 0:
            raise BoundsError("first page index", self.first_index, "at least 0")
        if len(self.hashes) != len(self.pages):
            raise BoundsError("hashes of an arrival", len(self.hashes), f"one for each of {len(self.pages)} pages")
        if self.digests.dtype != np.uint64 or self.digests.shape != (len(self.pages), len(Group)):
            have = f"{self.digests.dtype} array of shape {self.digests.shape}"
            raise BoundsError("digests of an arrival", have, f"uint64 [{len(self.pages)}, {len(Group)}]")
