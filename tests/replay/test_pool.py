"""A pool without bytes has all else of a pool."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.page_digest import digest_pages
from pdkv.replay.pool import pool_without_bytes


def test_it_has_pages_and_rows_and_no_bytes() -> None:
    pool = pool_without_bytes(20)
    assert (pool.num_pages, pool.table.num_pages, pool.fmt.page_tokens, pool.fmt.page_bytes) == (21, 21, 64, 0)
    assert [pool.group_bytes(20, group) for group in Group] == [[], []]
    pages = LocalPages.checked(np.arange(1, 21), 21)
    assert not digest_pages(pool, pages, "none").any()
    pool.zero(pages)


def test_there_is_a_page_beside_the_sink() -> None:
    with pytest.raises(ConfigError):
        pool_without_bytes(0)
