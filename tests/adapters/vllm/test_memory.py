"""Engines' tensors as pools: whatever the order of the axes, a page is its block's bytes, all of them and no others."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pdkv.adapters.vllm.memory import LayerCache, engine_pool, layer_caches, row_order, runs_of
from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.page_digest import digest_pages
from pdkv.kvcache.pool import SlotPool

BLOCKS, HEADS, TOKENS, WIDTH = 5, 2, 4, 3
SHAPE = (BLOCKS, HEADS, TOKENS, WIDTH)


def permuted(order: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of SHAPE, every element its own number, its axes in memory in this order."""
    shape = [SHAPE[axis] for axis in order]
    return torch.arange(BLOCKS * HEADS * TOKENS * WIDTH).reshape(shape).to(dtype).permute(*np.argsort(order).tolist())


def page_of(pool: SlotPool, page: int) -> bytes:
    return b"".join(part.tobytes() for group in Group for part in pool.group_bytes(page, group))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_axes_gives_whole_blocks(order: tuple[int, ...]) -> None:
    tensor = permuted(order)
    pool = engine_pool([LayerCache("layers.0.attn", tensor)], BLOCKS, TOKENS)
    for page in range(1, BLOCKS):
        have = np.sort(np.frombuffer(page_of(pool, page), np.float32))
        assert have.tolist() == sorted(tensor[page].flatten().tolist())


def test_a_write_through_the_pool_is_the_engines() -> None:
    tensor = permuted((1, 0, 2, 3))
    pool = engine_pool([LayerCache("layers.0.attn", tensor)], BLOCKS, TOKENS)
    pool.zero(LocalPages.checked([3], BLOCKS))
    assert tensor[3].abs().sum() == 0
    assert tensor[2].abs().sum() > 0
    assert tensor[4].abs().sum() > 0


def test_a_block_of_several_kernel_blocks_is_one_page() -> None:
    tensor = torch.arange(2 * BLOCKS * 6).reshape(2 * BLOCKS, 2, 3)
    pool = engine_pool([LayerCache("layers.0.attn", tensor)], BLOCKS, TOKENS)
    assert page_of(pool, 2) == tensor[4:6].numpy().tobytes()


def test_a_packed_cache_is_page_major_and_one_piece() -> None:
    packed = torch.arange(BLOCKS * 3 * 8, dtype=torch.int16).reshape(BLOCKS, 3, 8)
    caches = [LayerCache(f"layers.{i}.attn", packed[:, i]) for i in range(3)]
    pool = engine_pool(caches, BLOCKS, TOKENS)
    assert pool.placement.kind == "page_major"
    assert len(pool.pieces(Group.MAIN)) == 1
    assert len(pool.map().regions) == 1
    assert page_of(pool, 3) == packed[3].numpy().tobytes()


def test_layers_in_tensors_of_their_own_are_layer_major() -> None:
    pool = engine_pool([LayerCache(f"layers.{i}.attn", permuted((0, 1, 2, 3))) for i in (10, 9, 2)], BLOCKS, TOKENS)
    assert pool.placement.kind == "layer_major"
    assert [s.name for s in pool.fmt.segments] == ["layers.2.attn", "layers.9.attn", "layers.10.attn"], "by number"


def test_an_indexer_is_the_second_group_with_a_digest_of_its_own() -> None:
    main, index = permuted((0, 1, 2, 3)), torch.zeros(BLOCKS, TOKENS, 6, dtype=torch.uint8)
    caches = [LayerCache("layers.0.indexer", index, Group.INDEX), LayerCache("layers.0.attn", main)]
    pool, pages = engine_pool(caches, BLOCKS, TOKENS), LocalPages.checked([2], BLOCKS)
    assert [s.group for s in pool.fmt.segments] == [Group.MAIN, Group.INDEX]
    before = digest_pages(pool, pages)[0].tolist()
    index[2, 1, 1] = 7
    after = digest_pages(pool, pages)[0].tolist()
    assert (before[0], before[1] == after[1]) == (after[0], False)


def test_without_an_indexer_its_digest_is_that_of_nothing() -> None:
    pool = engine_pool([LayerCache("layers.0.attn", permuted((0, 1, 2, 3)))], BLOCKS, TOKENS)
    digests = digest_pages(pool, LocalPages.checked([1, 2], BLOCKS))
    assert digests[0, 1] == digests[1, 1] == 0x2D06800538D394C2, "xxh3_64 of no bytes"
    assert digests[0, 0] != digests[1, 0]


def test_layers_that_share_a_tensor_are_one() -> None:
    shared = permuted((0, 1, 2, 3))
    pool = engine_pool([LayerCache("layers.0.attn", shared), LayerCache("layers.1.attn", shared)], BLOCKS, TOKENS)
    assert [s.name for s in pool.fmt.segments] == ["layers.0.attn"]


def test_the_order_of_rows_tells_layouts_of_one_size_apart() -> None:
    caches = [LayerCache("layers.0.attn", permuted(order)) for order in ((0, 1, 2, 3), (0, 2, 1, 3))]
    assert runs_of(caches[0].tensor, BLOCKS).length == runs_of(caches[1].tensor, BLOCKS).length
    assert row_order(caches[:1], BLOCKS) != row_order(caches[1:], BLOCKS)


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (torch.zeros(7, 2, 3), "shape"),
        (torch.zeros(5), "shape"),
        (torch.zeros(40).as_strided((5, 2, 3), (6, 1, 1)), "strides"),
        (torch.zeros(20).as_strided((5, 8), (2, 1)), "strides"),
    ],
)
def test_what_is_no_cache_of_blocks_is_refused(tensor: torch.Tensor, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        engine_pool([LayerCache("layers.0.attn", tensor)], BLOCKS, TOKENS)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        engine_pool([], BLOCKS, TOKENS)


@dataclass
class Spec:
    cache_role: str = "sparse"


@dataclass
class Several:
    kv_cache_specs: dict[str, Spec]


@dataclass
class GroupSpec:
    layer_names: list[str]
    kv_cache_spec: Spec | Several


def test_layers_of_a_group_are_told_apart_by_vllms_role() -> None:
    tensors = {name: permuted((0, 1, 2, 3)) for name in ("layers.0.attn", "layers.0.indexer", "layers.9.other")}
    names = ["layers.0.attn", "layers.0.indexer", "layers.1.shares_another_layers"]
    group = GroupSpec(names, Several({names[0]: Spec(), names[1]: Spec("indexer"), names[2]: Spec()}))
    assert [(c.name, c.group) for c in layer_caches(tensors, group)] == [
        (names[0], Group.MAIN),
        (names[1], Group.INDEX),
    ]
    assert [c.group for c in layer_caches(tensors, GroupSpec(names[:1], Spec()))] == [Group.MAIN]
