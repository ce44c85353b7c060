"""Landing rows have one owner at a time, and are compared by generation and hash."""

import numpy as np
import pytest

from pdkv.errors import BoundsError
from pdkv.ids import PageHashes
from pdkv.transfer.landing import ROW_BYTES, LandingRows


def land(landing: LandingRows, row: int, generation: int, page_hash: bytes) -> None:
    import ctypes

    content = generation.to_bytes(8, "little") + page_hash + b"\x01"
    ctypes.memmove(landing.address + row * ROW_BYTES, content, len(content))


def test_rows_are_aligned_and_given_out_once() -> None:
    landing = LandingRows(8)
    assert landing.address % ROW_BYTES == 0
    assert landing.length == 8 * ROW_BYTES
    assert landing.table().tolist() == [[landing.address, 64, 0, 64, 8]]
    first, second = landing.take(3), landing.take(4)
    assert first.dtype == np.int32
    assert not set(first.tolist()) & set(second.tolist())
    assert landing.free == 1
    with pytest.raises(BoundsError, match="at most 1 free"):
        landing.take(2)
    assert landing.free == 1
    landing.give_back(first)
    assert set(landing.take(4).tolist()) == {7, *first.tolist()}


def test_rows_of_a_read_are_neighbours_and_the_first_ones_serve_again() -> None:
    landing = LandingRows(16)
    first = landing.take(6)
    second = landing.take(6)
    assert (first.tolist(), second.tolist()) == (list(range(6)), list(range(6, 12)))
    landing.give_back(first)
    assert landing.take(5).tolist() == [0, 1, 2, 3, 4]  # past the end there is no room for 5
    landing.give_back(np.arange(12, dtype=np.int32))
    assert landing.free == 16
    assert landing.take(2).tolist() == [0, 1]


def test_a_page_is_fresh_only_if_generation_and_hash_are_the_announced_ones() -> None:
    landing = LandingRows(8)
    landing.take(2)
    rows = landing.take(4)
    hashes = [bytes([i]) * 32 for i in range(4)]
    generations = np.array([2**64 - 1, 5, 6, 7], np.uint64)
    for row, generation, page_hash in zip(rows.tolist(), generations.tolist(), hashes, strict=True):
        land(landing, row, generation, page_hash)
    announced = PageHashes(b"".join(hashes))
    assert landing.stale(rows, generations, announced).tolist() == [False] * 4
    land(landing, int(rows[1]), 6, hashes[1])
    land(landing, int(rows[3]), 7, hashes[3][:31] + b"x")
    assert landing.stale(rows, generations, announced).tolist() == [False, True, False, True]
