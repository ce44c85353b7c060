"""Small pools for tests: the tiny preset, with or without a draft layer or pooled index rows."""

from __future__ import annotations

import numpy as np

from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, PageFormat, PlacementKind, page_format
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool

PLACEMENTS: tuple[PlacementKind, ...] = ("page_major", "layer_major")


def tiny_format(
    *, draft_layers: int = 0, kpool: int = 1, rollback: int = 0, main_row: str = "fp8_ds_mla"
) -> PageFormat:
    changes = {"num_nextn_predict_layers": draft_layers, "index_kpool": kpool}
    shape = model_shape({**load_config("tiny"), **changes})
    return page_format(shape, main_row=main_row, rollback_tokens=rollback)


def random_pool(fmt: PageFormat, num_pages: int, *, placement: PlacementKind = "page_major", seed: int = 1) -> SlotPool:
    """A pool whose pages hold the same random bytes in any placement."""
    pool = SlotPool.create(fmt, num_pages, placement=placement)
    random = np.random.default_rng(seed)
    for page in range(1, num_pages):
        for segment in page_segments(pool, page):
            segment[:] = random.integers(0, 256, segment.size, dtype=np.uint8)
    return pool


def page_segments(pool: SlotPool, page: int) -> list[np.ndarray]:
    """Writable views of all segments of a page, in order."""
    return [segment for group in Group for segment in pool.group_bytes(page, group)]


def pages_of(pool: SlotPool, *ids: int) -> LocalPages:
    return LocalPages.checked(np.array(ids, np.int32), pool.num_pages)


def all_pages(pool: SlotPool) -> LocalPages:
    return pages_of(pool, *range(1, pool.num_pages))


def snapshot(pool: SlotPool) -> list[np.ndarray]:
    """A copy of every buffer, the sink included."""
    return [buffer.numpy().copy() for buffer in pool.memory.buffers]
