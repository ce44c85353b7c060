"""A node moves its cached pages together, on request, while it serves.

Guarantees: only cached pages that no request and no lease has are moved, so nothing that an engine's step, a digest or
a peer's read works on: none of them has to be waited for; between two parts of the work, each of which copies at most
`PART_BYTES`, everything else on the node goes on. A peer that reads a page without a lease finds its generation moved.

Nothing does this by itself. A node that has served for a while has nearly all of its pages in the tree, and an eviction
takes no more than is wanted: too few free pages are left to be worth a move (docs/decisions/0017).
"""

from __future__ import annotations

import asyncio

from pdkv.kvcache.compaction import compact
from pdkv.node.base import NodeParts

PART_BYTES = 256 << 20


async def compact_pages(parts: NodeParts) -> int:
    """Move pages to lower numbers, the free ones together at the end; returns how many.

    Raises `ConfigError` in a group of ranks, whose pages must have the same numbers on all.
    """
    part = max(PART_BYTES // parts.pool.fmt.page_bytes, 1)
    moved = 0
    for _ in range(0, parts.pool.num_pages, part):
        now = compact(parts.manager, limit=part)
        moved += now
        if now < part:
            break
        await asyncio.sleep(0)
    return moved
