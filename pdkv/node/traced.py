"""What a node tells a trace of the pages that it reads from another one.

Guarantees: one span for all reads of an attempt, from when the first was posted to the end of the last one, with sums:
nothing is told a page or a read; nothing is counted for it that isn't counted anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pdkv.ids import PeerName
from pdkv.node.base import NodeParts
from pdkv.node.intake import IntakeCount
from pdkv.tracing.span import Attributes, current

TRANSFER = "pdkv.transfer"


@contextmanager
def transfer_told(parts: NodeParts, peer: PeerName, count: IntakeCount) -> Iterator[None]:
    """What is read from the peer in the body, if anything is."""
    span = current()
    if not span.listening:
        yield
        return
    busy, before = count.busy, replace(count)
    before_s, busy.began_s = busy.total_s, None
    try:
        yield
    finally:
        if busy.began_s is not None:
            facts = transfer_facts(parts, peer, before, count)
            facts = {**facts, "pdkv.transfer.busy_s": busy.total_s - before_s}
            span.past(TRANSFER, busy.began_s, busy.ended_s, facts)


def transfer_facts(parts: NodeParts, peer: PeerName, before: IntakeCount, after: IntakeCount) -> Attributes:
    """Of what came between the two counts: pages are those that were proved and have their place."""
    fmt, pages = parts.pool.fmt, after.pages - before.pages
    return {
        "pdkv.peer": str(peer),
        "pdkv.transfer.pages": pages,
        "pdkv.transfer.main_bytes": pages * fmt.main_bytes,
        "pdkv.transfer.index_bytes": pages * fmt.index_bytes,
        "pdkv.transfer.backend_bytes": after.bytes_backend - before.bytes_backend,
        "pdkv.transfer.descriptors": after.descriptors - before.descriptors,
        "pdkv.transfer.digests_verified": after.digests_verified - before.digests_verified,
        "pdkv.transfer.lane": parts.transfer.lane(peer),
        "pdkv.transfer.rails": ",".join(rail.device or "any" for rail in parts.transfer.status().rails),
    }
