"""Which pages a request may be given while it, or another one, has not got all of its own.

Guarantees: whoever has started can get every page that it ever needs, if all others end when they have theirs and what
else keeps pages (leases, reads without an end) ends too. For a grant leaves a state that is safe (`banker`), or it is
all that the request lacks, and then it can end without anybody. Changes nothing.

Counted as coming back when a request ends is only what must: its own pages that nobody holds back, and cached pages
that it alone has locked, at the end of its path. Not those that another request or a lease has locked as well: they
come later, whoever that waits for. So the count may be too low. Then grants wait that need not, and a request that can
take all it lacks gets it: the one that goes first in a safe order always can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdkv.kvcache.banker import shortage
from pdkv.kvcache.radix_node import Match, Node
from pdkv.kvcache.shortage import no_room, not_safe

if TYPE_CHECKING:
    from pdkv.kvcache.manager import CacheManager
    from pdkv.kvcache.reservation import Reservation


def require_start(manager: CacheManager, match: Match, lacking: int, count: int) -> None:
    """A new request that finds `match` and lacks so many pages besides may start, with `count` of them now.

    Raises `CapacityError` saying what is missing: room, or certainty for those who have started.
    """
    tree, locked = manager.tree, manager.tree.would_lock(match)
    _require_room(manager, count, tree.evictable - locked)
    if count == lacking:
        return
    taken = {node: node.pages.size for node in match.node.path()} | {match.node: match.inside}
    started = manager.reservations.values()
    rest = [*(each.rest for each in started), lacking - count]
    back = [*(certain(each, taken) for each in started), locked + count]
    _require_safe(manager, count, tree.evictable - locked, shortage(_left(manager, count, locked), rest, back))


def require_growth(manager: CacheManager, reservation: Reservation, count: int) -> None:
    """A request that has started may have `count` more pages, of those that it lacks. Raises as `require_start`."""
    evictable = manager.tree.evictable
    _require_room(manager, count, evictable)
    if count == reservation.rest:
        return
    started = manager.reservations.values()
    rest = [each.rest - count * (each is reservation) for each in started]
    back = [certain(each) + count * (each is reservation) for each in started]
    _require_safe(manager, count, evictable, shortage(_left(manager, count, 0), rest, back))


def certain(reservation: Reservation, taken: Mapping[Node, int] | None = None) -> int:
    """Pages that are free or evictable once the reservation has ended, whoever else goes on; at least so many.

    `taken`: pages at the beginning of nodes that somebody else would lock too, and all above them.
    """
    pages = len(reservation.sequence) - reservation.committed - reservation.lost
    for node in reservation.node.path():
        if node.locks != 1:
            break
        shared = None if taken is None else taken.get(node)
        pages += node.pages.size - (shared or 0)
        if shared is not None:
            break
    return pages


def _left(manager: CacheManager, count: int, locked: int) -> int:
    return manager.allocator.free_count + manager.tree.evictable - locked - count


def _require_room(manager: CacheManager, count: int, evictable: int) -> None:
    if count > manager.allocator.free_count + evictable:
        raise no_room(manager.pool.fmt, count, evictable, manager.census())


def _require_safe(manager: CacheManager, count: int, evictable: int, short: int) -> None:
    if short:
        raise not_safe(manager.pool.fmt, count, short, evictable, manager.census())
