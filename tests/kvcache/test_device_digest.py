"""The device's digest against the library's, on the CPU; tests/gpu runs it where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pdkv.geometry.page_layout import Group, PlacementKind
from pdkv.ids import LocalPages
from pdkv.kvcache import device_digest, page_digest
from pdkv.kvcache.device_digest import KERNELS_A_BLOCK, SHORTEST_BYTES, device_digests
from pdkv.kvcache.page_digest import digest_pages
from tests.kvcache.pools import PLACEMENTS, all_pages, pages_of, random_pool, tiny_format

Bytes = npt.NDArray[np.uint8]
PAGES = 5


def pages(*ids: int) -> LocalPages:
    return LocalPages.checked(np.array(ids, np.int32), PAGES)


def by_the_library(rows: Sequence[Bytes], ids: Sequence[int]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(np.concatenate([part[i] for part in rows]).tobytes()) for i in ids]


def random_rows(length: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (PAGES, length), dtype=np.uint8)


# every edge of stripes and blocks, and real pages: 41,984 B of main rows, 8,448 B of index-K
LENGTHS = (248, 256, 320, 1016, 1024, 1032, 1080, 1088, 1096, 2048, 2056, 3000, 8448, 41_984, 65_536)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_it_is_what_the_library_says(length: int, fill: str) -> None:
    rows = random_rows(length) if fill == "random" else np.full((PAGES, length), 255 * (fill == "ones"), np.uint8)
    found = device_digests([torch.from_numpy(rows)], pages(3, 1, 4))
    assert found is not None
    assert found.dtype == np.uint64
    assert found.tolist() == by_the_library([rows], (3, 1, 4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 5000, 1 << 26]),
)
def test_it_is_what_the_library_says_of_any_pieces_in_any_chunks(words: list[int], seed: int, chunk: int) -> None:
    parts = [random_rows(8 * count, seed + i) for i, count in enumerate(words)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_digest, "CHUNK_BYTES", chunk)
        found = device_digests([torch.from_numpy(part) for part in parts], pages(2, 4))
    if sum(words) * 8 < SHORTEST_BYTES:
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == by_the_library(parts, (2, 4))


def test_strided_rows_within_larger_pages() -> None:
    buffer = torch.from_numpy(np.random.default_rng(3).integers(0, 256, PAGES * 4096, dtype=np.uint8))
    view = buffer[512:].as_strided((PAGES - 1, 1088), (4096, 1))
    found = device_digests([view], pages(1, 3))
    assert found is not None
    assert found.tolist() == by_the_library([view.numpy()], (1, 3))


def test_what_it_does_not_do_is_left_to_others() -> None:
    one = torch.from_numpy(random_rows(1024))
    assert device_digests([torch.from_numpy(random_rows(240))], pages(1)) is None
    assert device_digests([torch.from_numpy(random_rows(1020))], pages(1)) is None
    shifted = torch.from_numpy(random_rows(1024).reshape(-1))[4:].as_strided((PAGES - 1, 1000), (1024, 1))
    assert device_digests([shifted], pages(1)) is None
    assert device_digests([one, torch.from_numpy(random_rows(4))], pages(1)) is None
    empty = device_digests([one], pages())
    assert empty is not None
    assert empty.shape == (0,)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "fmt", [tiny_format(draft_layers=1), tiny_format(kpool=2, rollback=2)], ids=["draft", "pooled"]
)
def test_a_pool_on_a_device_has_the_digests_of_one_in_host_memory(
    placement: PlacementKind, fmt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = random_pool(fmt, 4, placement=placement)
    expected = digest_pages(pool, all_pages(pool))
    pool.memory.memory = "VRAM"
    monkeypatch.setattr(page_digest, "_page_bytes", lambda *_: pytest.fail("no byte is to leave the device"))
    assert np.array_equal(digest_pages(pool, all_pages(pool)), expected)
    assert np.array_equal(digest_pages(pool, pages_of(pool, 3, 1)), expected[[2, 0]])
    assert digest_pages(pool, pages_of(pool)).shape == (0, 2)


def test_a_flipped_bit_is_seen() -> None:
    pool = random_pool(tiny_format(), 4)
    pool.memory.memory = "VRAM"
    before = digest_pages(pool, all_pages(pool))
    pool.group_bytes(2, Group.INDEX)[-1][-1] ^= 128
    assert np.argwhere(digest_pages(pool, all_pages(pool)) != before).tolist() == [[1, 1]]


class Kernels(TorchDispatchMode):
    """Counts what would be a kernel on a device: every operation but a change of view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def kernels(length: int, count: int) -> int:
    rows = torch.zeros((count + 1, length), dtype=torch.uint8)
    with Kernels() as seen:
        device_digests([rows], LocalPages.checked(np.arange(1, count + 1, dtype=np.int32), count + 1))
    return seen.count


def test_kernels_grow_with_a_page_and_not_with_their_number() -> None:
    few, many = kernels(8448, 2), kernels(8448, 64)
    assert few == many
    blocks = 32
    longer = kernels(8448 + 1024 * blocks, 2)
    assert longer - few == KERNELS_A_BLOCK * blocks
    assert few - KERNELS_A_BLOCK * 8 < 80


def test_a_kernel_that_is_wrong_is_not_used_and_one_that_is_right_is(caplog: pytest.LogCaptureFixture) -> None:
    host = torch.device("cpu")

    def right(lanes: torch.Tensor, added: torch.Tensor, key: torch.Tensor, prime: int) -> None:
        device_digest.scramble(lanes, added, key, prime)

    def wrong(lanes: torch.Tensor, added: torch.Tensor, key: torch.Tensor, prime: int) -> None:
        device_digest.scramble(lanes, added[:, :-1], key, prime)

    assert device_digest.checked(right, host) is right
    assert not caplog.records
    assert device_digest.checked(wrong, host) is device_digest.scramble
    assert "is wrong on cpu and isn't used" in caplog.text
    assert device_digest.scrambler(host) is device_digest.scramble
