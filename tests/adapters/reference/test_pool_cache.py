import importlib.util
import struct
import sys
from collections.abc import Callable

import pytest
import torch

from pdkv.adapters.reference import model as model_file
from pdkv.adapters.reference import pool_cache as pool_cache_file
from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.pool_cache import LayerRows, Window, step_cache
from pdkv.errors import MissingDependency
from pdkv.geometry.page_layout import Group, page_format
from pdkv.kvcache.pool import SlotPool

PAGES = torch.tensor([5, 2, 7])


@pytest.fixture(params=["page_major", "layer_major"])
def pool(request: pytest.FixtureRequest, tiny: LoadedModel) -> SlotPool:
    return SlotPool.create(page_format(tiny.shape), 9, placement=request.param)


def test_a_window_places_positions_across_pages() -> None:
    at = Window.of(62, 130, PAGES, 64)
    assert at.pages.tolist() == [5, 2, 7]
    assert at.page.tolist() == [5, 5] + [2] * 64 + [7, 7]
    assert at.slot.tolist() == [62, 63, *range(64), 0, 1]
    assert Window.of(0, 64, PAGES, 64).pages.tolist() == [5]


def test_main_rows_land_in_the_pages_of_their_positions(pool: SlotPool) -> None:
    at = Window.of(63, 66, PAGES, 64)
    rope = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 64)
    LayerRows(pool, 3, indexed=False).write_main(at, torch.zeros(3, 512), rope)
    written = pool.main_view(3)[..., 528:].contiguous().view(torch.bfloat16)[..., 0]
    assert [written[5, 63], written[2, 0], written[2, 1]] == [1.0, 2.0, 3.0]
    assert written.count_nonzero() == 3


def test_an_index_page_is_all_keys_and_then_all_scales(pool: SlotPool) -> None:
    token = 70  # slot 6 of the second page
    at = Window.of(token, token + 1, PAGES, 64)
    LayerRows(pool, 6, indexed=True).write_keys(at, torch.full((1, 128), 896.0))
    page = bytes(pool.index_view(6)[2].tolist())
    assert page[6 * 128 : 7 * 128] == bytes([0x7E]) * 128
    assert page[8192 + 6 * 4 : 8192 + 7 * 4] == struct.pack("<f", 2.0)
    assert sum(byte != 0 for byte in page) == 128 + 1  # 2.0 has one byte that is not zero


def test_reading_returns_every_position_in_order(pool: SlotPool) -> None:
    rows = LayerRows(pool, 0, indexed=True)
    value = torch.arange(130, dtype=torch.float32)
    for start, stop in ((0, 64), (64, 100), (100, 101), (101, 130)):
        at = Window.of(start, stop, PAGES, 64)
        rows.write_main(at, torch.zeros(stop - start, 512), value[start:stop, None].expand(-1, 64))
        rows.write_keys(at, value[start:stop, None].expand(-1, 128))
    at = Window.of(129, 130, PAGES, 64)
    latent, rope = rows.read_main(at, torch.float32)
    assert latent.shape == (130, 512)
    assert torch.equal(rope[:, 9], value)
    assert torch.allclose(rows.read_keys(at)[:, 100], value, rtol=1e-6)


def test_shared_layers_have_no_index(pool: SlotPool) -> None:
    layers = tuple(LayerRows(pool, i, indexed=i == 0) for i in (0, 3))
    cache = step_cache(layers, Window.of(10, 12, PAGES, 64))
    assert cache.get_seq_length() == 10
    assert cache.get_mask_sizes(2, 1) == (12, 0)
    assert cache.update_indexer(torch.ones(1, 2, 128), 0).shape == (1, 12, 128)
    with pytest.raises(ValueError, match="update_indexer"):
        cache.update_indexer(torch.ones(1, 2, 128), 1)
    latent, rope = cache.update(torch.ones(1, 1, 2, 512), torch.ones(1, 1, 2, 64), 1)
    assert latent.shape == (1, 1, 12, 512)
    assert rope.shape == (1, 1, 12, 64)
    assert all(not pool.group_bytes(5, Group.INDEX)[i].any() for i in (1, 2, 3))


@pytest.mark.parametrize("file", [pool_cache_file, model_file])
def test_without_transformers_it_says_what_to_install(file: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "transformers" or n.startswith("transformers.")]:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("without_transformers", str(file.__file__))
    load: Callable[[object], None] = spec.loader.exec_module
    with pytest.raises(MissingDependency, match=r"pip install '\.\[reference\]'"):
        load(importlib.util.module_from_spec(spec))
