"""A pool whose pages hold no bytes, to run the cache manager without a model and without memory for pages.

Guarantees: page ids, page table and generations are a pool's own; a page has no segments, so there is nothing to write,
and a digest of it proves nothing: ask its verifier for none.
"""

from __future__ import annotations

from pdkv.geometry.page_layout import PageFormat
from pdkv.geometry.row_format import INDEX_FP8, MAIN_ROWS
from pdkv.kvcache.pool import SlotPool

_ROW = next(iter(MAIN_ROWS.values()))


def pool_without_bytes(pages: int, *, page_tokens: int = 64) -> SlotPool:
    """`pages` that can be handed out, and the write sink. Raises `ConfigError` below one page."""
    return SlotPool.create(PageFormat(page_tokens, (), _ROW, INDEX_FP8, page_tokens), pages + 1)
