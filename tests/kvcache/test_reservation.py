"""A reservation names its pages in the order of the sequence."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import BoundsError
from pdkv.ids import LocalPages, ReservationId
from pdkv.kvcache.radix_node import Use
from pdkv.kvcache.radix_tree import RadixTree
from pdkv.kvcache.reservation import Reservation
from tests.kvcache.chains import chain_of


def test_page_of_counts_from_the_beginning_of_the_prompt() -> None:
    hit, new = (LocalPages.checked(np.array(ids, np.int32), 10) for ids in ([5, 2], [7, 3]))
    both = LocalPages.join([hit, new])
    reservation = Reservation(
        ReservationId(1),
        chain_of("abc"),
        hit,
        new,
        both,
        RadixTree(10).root,
        committed=2,
        prompt_pages=3,
        use=Use(),
        total_pages=4,
    )
    assert [reservation.page_of(i) for i in range(4)] == [5, 2, 7, 3]
    for index in (-1, 4):
        with pytest.raises(BoundsError):
            reservation.page_of(index)
