"""What one peer's prompts may have of this node's pages, while they are to come.

Guarantees: they have at most `limit` pages together, but for a request that is the only one to wait for that peer. Who
has started within it can get the rest of its pages within it as well: some order lets each go on when those before it
have their prompts, and the last one is alone by then (`banker`). Changes nothing but its own account.
"""

from __future__ import annotations

from collections import defaultdict

from pdkv.errors import CapacityError
from pdkv.ids import ReservationId
from pdkv.kvcache.banker import shortage
from pdkv.kvcache.reservation import Reservation


class PeerShares:
    def __init__(self, limit: int | None) -> None:
        """`limit` None: as many as there are."""
        self._limit = limit
        self._peer: dict[ReservationId, str] = {}
        self._of_peer: defaultdict[str, dict[ReservationId, Reservation]] = defaultdict(dict)

    def __len__(self) -> int:
        """Requests whose prompts are to come."""
        return len(self._peer)

    def waiting(self, peer: str) -> int:
        """Requests for that peer."""
        return len(self._of_peer.get(peer, ()))

    def lacking(self, peer: str) -> bool:
        """One of them has not got all pages of its prompt."""
        return any(map(lacks, self._of_peer.get(peer, {}).values()))

    def charge(self, peer: str, reservation: Reservation) -> None:
        self._peer[reservation.id] = peer
        self._of_peer[peer][reservation.id] = reservation

    def settle(self, reservation: Reservation) -> bool:
        """Its prompt has come, or nobody is to bring it any more. True if it was charged until now."""
        peer = self._peer.pop(reservation.id, "")
        if not peer:
            return False
        del self._of_peer[peer][reservation.id]
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        return True

    def require_start(self, peer: str, lacking: int, count: int) -> None:
        """A request whose prompt lacks so many pages may start with `count`. Raises `CapacityError`."""
        if self._limit is not None and peer in self._of_peer:
            self._require(peer, [*self._of_peer[peer].values()], (max(lacking - count, 0), count))

    def require_growth(self, reservation: Reservation, count: int) -> None:
        """A request that has started may have `count` more. Raises `CapacityError`."""
        peer = self._peer.get(reservation.id, "")
        if self._limit is not None and peer:
            others = [each for each in self._of_peer[peer].values() if each is not reservation]
            self._require(peer, others, (max(lacks(reservation) - count, 0), len(reservation.pages) + count))

    def _require(self, peer: str, others: list[Reservation], new: tuple[int, int]) -> None:
        limit, rows = self._limit or 0, [row for each in others if any(row := (lacks(each), len(each.pages)))]
        if not rows:
            return
        held = sum(pages for _, pages in rows)
        if new[0] or any(rest for rest, _ in rows):
            rest, back = zip(*rows, new, strict=True)
            short = shortage(limit - held - new[1], rest, back, exempt_last=True)
        else:  # nobody will take more: the same, for less
            short = held + new[1] - limit
        if short > 0:
            words = f"{held} pages are reserved for prompts from {peer}, {new[1]} more exceed {limit}"
            raise CapacityError(words, peer=peer, held_pages=held, wanted_pages=new[1], short_pages=short)


def lacks(reservation: Reservation) -> int:
    """Pages of its prompt, the tail's among them, that it hasn't got."""
    return max(min(reservation.prompt_pages + 1, reservation.total_pages) - len(reservation.sequence), 0)
